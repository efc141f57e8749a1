"""The patch series: its files, headers, hunks and manifest. Reads; never changes vLLM.

A small strict applier replaces ``git apply``: production images often have no git, and
``git apply`` inside a checkout silently does nothing. What was given up: fuzz, new or
renamed files, mode changes and binary hunks, all of which the law in patches/README.md
forbids anyway. Standard library only.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

VLLM_VERSION = "0.32.0"
"""The release that is installed by default; the patches are written on it."""
VLLM_VERSIONS = (VLLM_VERSION, "0.33.0")
"""The releases that the same patches fit, hunks at other lines where need be."""
SUPPORTED = "vLLM " + " or ".join(VLLM_VERSIONS)
"""For sentences."""
MANIFEST_FORMAT = 1
HEADER_FIELDS = (
    "Why",
    "Why-Not-Plugin",
    "Neutral-When",
    "Guarded-By",
    "Forwarded",
    "Drop-When",
)

_HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_FIELD = re.compile(r"([A-Z][A-Za-z-]+):[ \t]+(.*)")
_FORWARDED = re.compile(r"(no|not-needed|https://\S+)$")
_ALLOWED_META = (b"index ", b"--- ", b"+++ ")
_NO_NEWLINE = b"\\ No newline at end of file"


class PatchError(RuntimeError):
    """The patch set cannot do what was asked; the message is one sentence for users."""


@dataclass(frozen=True, slots=True)
class Hunk:
    """One hunk: ``before`` and ``after`` are whole lines with their line ends."""

    start: int
    before: tuple[bytes, ...]
    after: tuple[bytes, ...]
    added: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Patch:
    """One file of the series."""

    name: str
    subject: str
    fields: Mapping[str, str]
    hunks: Mapping[str, tuple[Hunk, ...]]
    sha256: str

    @property
    def num_added(self) -> int:
        """Number of added lines."""
        return sum(len(hunk.added) for file in self.hunks.values() for hunk in file)


@dataclass(frozen=True, slots=True)
class Manifest:
    """What the series does, in hashes.

    ``images`` maps each touched file to {SHA-256 before: SHA-256 after}. There is more
    than one pair where releases, or the CPU and the GPU wheel, differ in a file.
    """

    vllm_version: str
    patches: Mapping[str, str]
    images: Mapping[str, Mapping[str, str]]

    def dump(self) -> str:
        """Serialises to stable JSON."""
        return (
            json.dumps(
                {
                    "format": MANIFEST_FORMAT,
                    "vllm_version": self.vllm_version,
                    "patches": dict(self.patches),
                    "files": {
                        path: dict(sorted(pairs.items()))
                        for path, pairs in sorted(self.images.items())
                    },
                },
                indent=2,
            )
            + "\n"
        )


def sha256(data: bytes) -> str:
    """Returns the SHA-256 of ``data`` in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def patches_root() -> Path:
    """Finds the patch folder: the checkout's ``patches/``, or the installed copy."""
    package = Path(__file__).resolve().parent
    for root in (package / "_patches", package.parent / "patches"):
        if (root / "series").is_file():
            return root
    raise PatchError(f"No patch series lies beside {package}: reinstall vllm_tide.")


def manifest_path(root: Path) -> Path:
    """Returns where the manifest of the patch folder ``root`` lies."""
    return root / f"vllm-{VLLM_VERSION}" / "manifest.json"


def load_manifest(root: Path) -> Manifest:
    """Reads the manifest of the patch folder ``root``."""
    path = manifest_path(root)
    try:
        raw = json.loads(path.read_text())
        if raw["format"] != MANIFEST_FORMAT:
            raise PatchError(f"{path} has format {raw['format']}, not 1.")
        return Manifest(raw["vllm_version"], raw["patches"], raw["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PatchError(f"{path} is not a manifest: {error}.") from error


def series_names(root: Path) -> list[str]:
    """Returns the names in ``series``, in order."""
    lines = (root / "series").read_text().splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def load_series(root: Path) -> list[Patch]:
    """Reads and parses every patch that ``series`` names, in order."""
    folder = root / f"vllm-{VLLM_VERSION}"
    patches = []
    for name in series_names(root):
        try:
            data = (folder / f"{name}.patch").read_bytes()
        except OSError as error:
            raise PatchError(
                f"series names {name}, but its file is unreadable."
            ) from error
        patches.append(parse_patch(name, data))
    return patches


def parse_patch(name: str, data: bytes) -> Patch:
    """Parses one ``git format-patch`` file, refusing what the law forbids."""
    head, separator, diff = data.partition(b"\ndiff --git ")
    if not separator:
        raise PatchError(f"{name}: no diff.")
    diff = separator[1:] + diff
    mail_head, _, body = head.decode().partition("\n\n")
    subject = re.search(
        r"^Subject: (?:\[PATCH[^]]*\] )?(.*(?:\n .*)*)", mail_head, re.M
    )
    fields: dict[str, str] = {}
    field = ""
    for line in body.splitlines():
        if match := _FIELD.match(line):
            field = match[1]
            fields[field] = match[2].strip()
        elif field and line.startswith((" ", "\t")):
            fields[field] += " " + line.strip()
        else:
            field = ""
    return Patch(
        name=name,
        subject=" ".join(subject[1].split()) if subject else "",
        fields=fields,
        hunks=_parse_diff(name, diff),
        sha256=sha256(data),
    )


def _parse_diff(name: str, diff: bytes) -> dict[str, tuple[Hunk, ...]]:
    files: dict[str, list[Hunk]] = {}
    path = ""
    lines = diff.split(b"\n")
    at = 0
    while at < len(lines):
        line = lines[at]
        if line.startswith(b"diff --git a/"):
            path = line.rpartition(b" b/")[2].decode()
            if path in files or not path.startswith("vllm/"):
                raise PatchError(f"{name}: a second or foreign section for {path}.")
            files[path] = []
            at += 1
        elif match := _HUNK.match(line):
            hunk, at = _parse_hunk(name, lines, at, match)
            files[path].append(hunk)
        elif line and not line.startswith(_ALLOWED_META):
            raise PatchError(
                f"{name}: '{line.decode(errors='replace')}' is not allowed (no new, "
                "renamed, binary or re-moded files)."
            )
        else:
            if line.startswith((b"--- /dev/null", b"+++ /dev/null")):
                raise PatchError(f"{name}: adds or removes {path}.")
            at += 1
    if not files or not all(files.values()):
        raise PatchError(f"{name}: no hunks.")
    return {path: tuple(hunks) for path, hunks in files.items()}


def _parse_hunk(
    name: str, lines: list[bytes], at: int, match: re.Match[bytes]
) -> tuple[Hunk, int]:
    start = int(match[1])
    want = [int(match[2] or 1), int(match[4] or 1)]
    before: list[bytes] = []
    after: list[bytes] = []
    added: list[bytes] = []
    at += 1
    while len(before) < want[0] or len(after) < want[1]:
        if at >= len(lines) or lines[at][:1] not in (b" ", b"+", b"-"):
            raise PatchError(f"{name}: a hunk at line {start} is cut short.")
        tag, text = lines[at][:1], lines[at][1:] + b"\n"
        at += 1
        if at < len(lines) and lines[at] == _NO_NEWLINE:
            text = text[:-1]
            at += 1
        if tag != b"+":
            before.append(text)
        if tag != b"-":
            after.append(text)
        if tag == b"+":
            added.append(text)
    if [len(before), len(after)] != want:
        raise PatchError(f"{name}: a hunk at line {start} has wrong counts.")
    return Hunk(start, tuple(before), tuple(after), tuple(added)), at


def apply_hunks(name: str, path: str, content: bytes, hunks: Iterable[Hunk]) -> bytes:
    """Applies hunks to a file; every context line must match exactly.

    A hunk may lie at another line than it says (releases, and the CPU and GPU wheels,
    differ above it), but then its lines must occur in the file exactly once.
    """
    # Not splitlines(): it would also split at a bare carriage return.
    lines = [line + b"\n" for line in content.split(b"\n")]
    lines[-1] = lines[-1][:-1]
    if not lines[-1]:
        lines.pop()
    out: list[bytes] = []
    done = 0
    for hunk in hunks:
        at = _locate(lines, hunk, done)
        if at is None:
            raise PatchError(
                f"{name} does not fit {path} near line {hunk.start}: the lines there "
                f"are not those of {SUPPORTED}."
            )
        out += lines[done:at]
        out += hunk.after
        done = at + len(hunk.before)
    return b"".join(out + lines[done:])


def _locate(lines: list[bytes], hunk: Hunk, done: int) -> int | None:
    want, size = list(hunk.before), len(hunk.before)

    def fits(at: int) -> bool:
        return at >= done and lines[at : at + size] == want

    stated = hunk.start - 1
    if fits(stated):
        return stated
    found = [at for at in range(done, len(lines) - size + 1) if fits(at)]
    return found[0] if len(found) == 1 else None


def apply_series(
    patches: Iterable[Patch], read: Callable[[str], bytes]
) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Applies a series in memory.

    Args:
        patches: The series, in order.
        read: Returns the pristine bytes of a path such as ``vllm/outputs.py``.

    Returns:
        The touched files before and after, by path.
    """
    before: dict[str, bytes] = {}
    after: dict[str, bytes] = {}
    for patch in patches:
        for path, hunks in patch.hunks.items():
            if path not in before:
                before[path] = after[path] = read(path)
            after[path] = apply_hunks(patch.name, path, after[path], hunks)
    return before, after


def build_manifest(
    patches: list[Patch], readers: Iterable[Callable[[str], bytes]]
) -> Manifest:
    """Builds the manifest from one or more pristine forms of the package."""
    images: dict[str, dict[str, str]] = {}
    for read in readers:
        before, after = apply_series(patches, read)
        for path, content in before.items():
            images.setdefault(path, {})[sha256(content)] = sha256(after[path])
    names = {patch.name: patch.sha256 for patch in patches}
    return Manifest(", ".join(VLLM_VERSIONS), names, images)


def lint(root: Path, patches: list[Patch]) -> list[str]:
    """Checks series against files, headers and the law; returns the problems."""
    problems = []
    names = series_names(root)
    on_disk = {path.stem for path in (root / f"vllm-{VLLM_VERSION}").glob("*.patch")}
    problems += [
        f"{name} is in series twice" for name in names if names.count(name) > 1
    ]
    problems += [
        f"{name}.patch is not in series" for name in sorted(on_disk - set(names))
    ]
    tests = root.parent / "tests"
    for patch in patches:
        problems += _lint_patch(patch, root.parent if tests.is_dir() else None)
    return problems


def _lint_patch(patch: Patch, checkout: Path | None) -> list[str]:
    name, fields = patch.name, patch.fields
    problems = [
        f"{name}: header field {field} is missing"
        for field in HEADER_FIELDS
        if not fields.get(field)
    ]
    if slug(patch.subject) != name:
        problems.append(f"{name}: its subject gives the name {slug(patch.subject)}")
    if not _FORWARDED.match(fields.get("Forwarded", "no")):
        problems.append(f"{name}: Forwarded is neither no, not-needed nor a link")
    for guard in re.split(r"[,\s]+", fields.get("Guarded-By", "")):
        if guard and checkout and not (checkout / guard.partition("::")[0]).is_file():
            problems.append(f"{name}: guard test {guard} does not exist")
    for path, hunks in patch.hunks.items():
        for line in (line for hunk in hunks for line in hunk.added):
            if re.match(rb"(from|import)\s+vllm_tide", line):
                problems.append(f"{name}: {path} imports vllm_tide at module top")
            if line.rstrip(b"\r\n") != line.rstrip():
                problems.append(f"{name}: {path} gets trailing white space")
    return problems


def slug(subject: str) -> str:
    """Returns the file name that a commit subject gives."""
    return re.sub(r"[^a-z0-9]+", "-", subject.lower()).strip("-")
