"""Leaves in a lock only hashes of files that can be installed on x86-64 Linux (glibc).

usage: linux_hashes.py LOCK

A release of a compiled package has a hundred files for other machines; their hashes
were most of the lock. Asks the package index for names and hashes. A release without a
wheel that fits keeps its source archives.
"""

from __future__ import annotations

import json
import re
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from packaging.tags import Tag
from packaging.utils import (
    InvalidWheelFilename,
    canonicalize_name,
    parse_wheel_filename,
)
from pip._internal.models.index import PyPI

PYTHONS = ("cp311", "cp312", "cp313", "cp314")
_PIN = re.compile(r"^([A-Za-z0-9._-]+)==")
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")


def fits(tag: Tag) -> bool:
    """Whether a wheel of this tag can be installed on the machines of the lock."""
    linux = "manylinux" in tag.platform or tag.platform.startswith("linux")
    if tag.platform != "any" and not (linux and tag.platform.endswith("_x86_64")):
        return False
    if tag.interpreter in PYTHONS:
        return tag.abi in (tag.interpreter, "abi3", "none")
    older = re.fullmatch(r"cp3(\d+)", tag.interpreter)
    if older is not None:
        return tag.abi == "abi3" and int(older[1]) < 11
    return tag.interpreter.startswith("py3") or tag.interpreter == "py2.py3"


def installable(name: str) -> dict[str, bool]:
    """SHA-256 of each file of a project: whether it is a wheel that fits."""
    request = urllib.request.Request(
        f"{PyPI.simple_url}/{canonicalize_name(name)}/",
        headers={"Accept": "application/vnd.pypi.simple.v1+json"},
    )
    with urllib.request.urlopen(request, timeout=180) as answer:
        files = json.load(answer)["files"]
    found = {}
    for file in files:
        try:
            tags = parse_wheel_filename(file["filename"])[3]
        except InvalidWheelFilename:  # a source archive, or a name from old times
            tags = frozenset()
        found[file["hashes"].get("sha256", "")] = any(map(fits, tags))
    return found


def without_others(entry: str, known: dict[str, bool]) -> str:
    """One pin of the lock with the hashes that are of use."""
    hashes = _HASH.findall(entry)
    kept = [digest for digest in hashes if known.get(digest)] or hashes
    head = entry[: entry.index("--hash=")].rstrip().removesuffix("\\").rstrip()
    return " \\\n".join([head, *(f"    --hash=sha256:{d}" for d in kept)]) + "\n"


def main() -> int:
    """Rewrite the lock; the exit status."""
    path = Path(sys.argv[1])
    text = path.read_text()
    entries = re.split(r"(?m)^(?=[A-Za-z0-9])", text)
    pins = [match[1] for entry in entries if (match := _PIN.match(entry))]
    with ThreadPoolExecutor(8) as pool:
        known = dict(zip(pins, pool.map(installable, pins), strict=True))
    out = [
        without_others(entry, known[match[1]])
        if (match := _PIN.match(entry)) and "--hash=" in entry
        else entry
        for entry in entries
    ]
    path.write_text("".join(out))
    print(f"{path.name}: {len(text)} -> {path.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
