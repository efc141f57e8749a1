"""Reduce a lock to the hashes of files for x86-64 Linux (glibc).

usage: linux_hashes.py LOCK

A release of a compiled package has a hundred files for other platforms. Names and
hashes of the files come from the package index. If a release has no wheels for some of
`PYTHONS`, the hashes of its source archives are kept too.
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


def pythons_of(tag: Tag) -> frozenset[str]:
    """Return the Pythons of `PYTHONS` that can install a wheel of this tag."""
    linux = "manylinux" in tag.platform or tag.platform.startswith("linux")
    if tag.platform != "any" and not (linux and tag.platform.endswith("_x86_64")):
        return frozenset()
    if tag.interpreter.startswith("py3"):
        return frozenset(PYTHONS)
    if tag.abi == "abi3" and (since := re.fullmatch(r"cp3(\d+)", tag.interpreter)):
        return frozenset(p for p in PYTHONS if int(p[3:]) >= int(since[1]))
    same = tag.interpreter in PYTHONS and tag.abi in (tag.interpreter, "none")
    return frozenset({tag.interpreter} if same else ())


def files_of(name: str) -> dict[str, frozenset[str] | None]:
    """Return the Pythons of each file by SHA-256; None: a source archive."""
    request = urllib.request.Request(
        f"{PyPI.simple_url}/{canonicalize_name(name)}/",
        headers={"Accept": "application/vnd.pypi.simple.v1+json"},
    )
    with urllib.request.urlopen(request, timeout=180) as answer:
        files = json.load(answer)["files"]
    result: dict[str, frozenset[str] | None] = {}
    for file in files:
        pythons: frozenset[str] | None = None
        if file["filename"].endswith(".whl"):
            try:
                tags = parse_wheel_filename(file["filename"])[3]
            except InvalidWheelFilename:  # an outdated file name
                tags = frozenset()
            pythons = frozenset().union(*map(pythons_of, tags))
        result[file["hashes"].get("sha256", "")] = pythons
    return result


def without_others(entry: str, known: dict[str, frozenset[str] | None]) -> str:
    """Return a pin of the lock with the hashes for this platform."""
    hashes = _HASH.findall(entry)
    wheels = [digest for digest in hashes if known.get(digest)]
    covered = frozenset().union(*(known[digest] or () for digest in wheels))
    sources = [d for d in hashes if d in known and known[d] is None]
    chosen = wheels if covered == frozenset(PYTHONS) else sorted(wheels + sources)
    pin = entry[: entry.index("--hash=")].rstrip().removesuffix("\\").rstrip()
    lines = (f"    --hash=sha256:{digest}" for digest in chosen or hashes)
    return " \\\n".join([pin, *lines]) + "\n"


def main() -> int:
    """Rewrite the lock; return the exit status."""
    path = Path(sys.argv[1])
    text = path.read_text()
    entries = re.split(r"(?m)^(?=[A-Za-z0-9])", text)
    pins = [match[1] for entry in entries if (match := _PIN.match(entry))]
    with ThreadPoolExecutor(8) as pool:
        known = dict(zip(pins, pool.map(files_of, pins), strict=True))
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
