"""Moves the patch series to another release of vLLM, or says what stands in the way.

Works on source archives and in memory: no installed vLLM is read or changed. The series
is written anew only if every hunk has a place, and then only after the written files
have been read back and applied strictly. Standard library only.
"""

from __future__ import annotations

import hashlib
import re
import tarfile
import zipfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_tide.patch_fit import (
    CONTEXT,
    Edit,
    FitState,
    HunkFit,
    PatchFit,
    fit_series,
    split_lines,
)
from vllm_tide.patch_series import (
    VLLM_VERSION,
    Manifest,
    Patch,
    PatchError,
    apply_series,
    load_series,
    parse_patch,
    sha256,
)

REPORT_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Source:
    """The touched files of a release.

    Attributes:
        name: Of the archive or folder.
        version: What it says it is; empty if it does not say.
        files: Content by path.
    """

    name: str
    version: str
    files: dict[str, bytes]

    def read(self, path: str) -> bytes:
        """Content of a file; raises ``PatchError`` if the release has none."""
        try:
            return self.files[path]
        except KeyError:
            raise PatchError(f"{self.name} has no {path}.") from None


@dataclass(frozen=True, slots=True)
class Rebase:
    """What became of the series."""

    to: str
    source: Source
    patches: list[Patch]
    fits: list[PatchFit]

    @property
    def applies(self) -> bool:
        """Whether every hunk has a place."""
        return all(fit.applies for fit in self.fits)


def rebase(root: Path, to: str, source_path: Path) -> Rebase:
    """Fits the series of a patch folder to a release.

    Args:
        root: Patch folder.
        to: Version of the release.
        source_path: Its source archive, wheel or unpacked folder.

    Raises:
        PatchError: The archive cannot be read, or is of another version.
    """
    patches = load_series(root)
    source = read_source(source_path, {path for p in patches for path in p.hunks})
    if source.version and source.version.partition("+")[0] != to:
        raise PatchError(
            f"{source_path} holds vLLM {source.version}, not {to}: give the version "
            "and the source of one release."
        )
    return Rebase(to, source, patches, fit_series(patches, source.read))


def read_source(path: Path, wanted: Iterable[str]) -> Source:
    """Reads files of a source archive (``.tar.gz``), wheel (``.whl``) or folder.

    Raises:
        PatchError: It cannot be read, or holds no vLLM.
    """
    wanted = {*wanted, "vllm/__init__.py"}
    try:
        if path.is_dir():
            names = [name for name in wanted if (path / name).is_file()]
            files = {name: (path / name).read_bytes() for name in names}
            about = [path / "PKG-INFO", *path.glob("vllm*.dist-info/METADATA")]
            info = next((file.read_bytes() for file in about if file.is_file()), b"")
        elif path.suffix == ".whl":
            files, info = _read_wheel(path, wanted)
        else:
            files, info = _read_sdist(path, wanted)
    except (OSError, tarfile.TarError, zipfile.BadZipFile, EOFError) as error:
        raise PatchError(
            f"{path} cannot be read as a source archive, wheel or folder of vLLM "
            f"({error})."
        ) from error
    if files.pop("vllm/__init__.py", None) is None:
        raise PatchError(f"{path} holds no vllm package: give vLLM's source archive.")
    version = re.search(rb"^Version: (\S+)", info, re.M)
    return Source(path.name, version[1].decode() if version else "", files)


def _read_sdist(path: Path, wanted: set[str]) -> tuple[dict[str, bytes], bytes]:
    files: dict[str, bytes] = {}
    info = b""
    with tarfile.open(path) as archive:
        for member in archive:
            _, _, name = member.name.partition("/")
            if member.isfile() and (name in wanted or name == "PKG-INFO"):
                stream = archive.extractfile(member)
                content = stream.read() if stream else b""
                if name == "PKG-INFO":
                    info = content
                else:
                    files[name] = content
    return files, info


def _read_wheel(path: Path, wanted: set[str]) -> tuple[dict[str, bytes], bytes]:
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        files = {name: archive.read(name) for name in names if name in wanted}
        about = [n for n in names if re.fullmatch(r"[^/]+\.dist-info/METADATA", n)]
        return files, archive.read(about[0]) if about else b""


def as_json(result: Rebase) -> dict[str, Any]:
    """The report, JSON-able."""
    return {
        "format": REPORT_FORMAT,
        "from": VLLM_VERSION,
        "to": result.to,
        "source": result.source.name,
        "applies": result.applies,
        "hunks": _counts(result.fits),
        "patches": [
            {
                "name": fit.name,
                "applies": fit.applies,
                "dropped": fit.dropped,
                "broken_files": list(fit.broken),
                "hunks": [
                    {
                        "path": hunk.path,
                        "line": hunk.line,
                        "state": str(hunk.state),
                        "at_line": hunk.at_line,
                        "offset": hunk.offset,
                        "fuzz": hunk.fuzz,
                        "detail": hunk.detail,
                    }
                    for hunk in fit.hunks
                ],
            }
            for fit in result.fits
        ],
    }


def as_text(result: Rebase) -> str:
    """The report for a person: a line per patch and hunk, and a sum."""
    out = []
    for fit in result.fits:
        verdict = "applies" if fit.applies else "CONFLICT"
        if fit.dropped:
            verdict = "is upstream already: drop it"
        out.append(f"{fit.name}: {verdict}")
        out += [_hunk_text(hunk) for hunk in fit.hunks]
        out += [f"  {path}: no longer Python after it" for path in fit.broken]
    counts = ", ".join(f"{n} {state}" for state, n in _counts(result.fits).items() if n)
    good = sum(fit.applies for fit in result.fits)
    out.append(
        f"vLLM {VLLM_VERSION} to {result.to}: {good} of {len(result.fits)} patches "
        f"apply (hunks: {counts})"
    )
    return "\n".join(out)


def _hunk_text(hunk: HunkFit) -> str:
    where = f"  {hunk.path}:{hunk.line}: {hunk.state}"
    if hunk.state is FitState.CONFLICT:
        where += f", near line {hunk.at_line}" if hunk.at_line else ""
    elif hunk.state is not FitState.CLEAN:
        where += f" {hunk.fuzz}" if hunk.fuzz else ""
        where += f", at line {hunk.at_line} ({hunk.offset:+d})"
    if hunk.detail:
        where += ": " + hunk.detail.replace("\n", "\n      ")
    return where


def _counts(fits: Iterable[PatchFit]) -> dict[str, int]:
    found = Counter(hunk.state for fit in fits for hunk in fit.hunks)
    return {str(state): found[state] for state in FitState}


def write_series(result: Rebase, root: Path, out: Path) -> list[Path]:
    """Writes the moved series as a patch folder.

    Args:
        result: Of :func:`rebase`; all of it must apply.
        root: Patch folder it came from: the headers are kept word for word.
        out: New folder, or an empty one.

    Returns:
        The files written.

    Raises:
        PatchError: A hunk conflicts, ``out`` is not empty or cannot be written.
    """
    if not result.applies:
        raise PatchError(f"--out: nothing written to {out}, because not all applies.")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise PatchError(f"--out: {out} is not an empty folder: name another one.")
    kept = [fit for fit in result.fits if not fit.dropped]
    folder = f"vllm-{result.to}"
    texts: dict[str, bytes] = {}
    written: list[Patch] = []
    for fit in kept:
        old = (root / f"vllm-{VLLM_VERSION}" / f"{fit.name}.patch").read_bytes()
        head = old.partition(b"\ndiff --git ")[0] + b"\n"
        data = head + b"".join(
            _file_diff(path, fit.before[path], fit.after[path], edits)
            for path, edits in fit.edits.items()
            if edits
        )
        written.append(parse_patch(fit.name, data))
        texts[f"{folder}/{fit.name}.patch"] = data
    manifest = _proven_manifest(result, written, kept)
    texts[f"{folder}/manifest.json"] = manifest.dump().encode()
    names = "".join(f"{fit.name}\n" for fit in kept)
    texts["series"] = (
        "# The order in which the patches apply. Written by vllm-tide patch rebase.\n"
        + names
    ).encode()
    try:
        (out / folder).mkdir(parents=True, exist_ok=True)
        for name, data in texts.items():
            (out / name).write_bytes(data)
    except OSError as error:
        raise PatchError(f"--out: {out} cannot be written ({error}).") from error
    return [out / name for name in texts]


def _proven_manifest(
    result: Rebase, written: list[Patch], fits: list[PatchFit]
) -> Manifest:
    """The manifest of the new files, after applying them as `patch apply` would."""
    before, after = apply_series(written, result.source.read)
    fitted: dict[str, bytes] = {}
    for fit in fits:
        fitted |= {path: fit.after[path] for path, edits in fit.edits.items() if edits}
    if after != fitted:
        raise PatchError("The written series does not do what was fitted: a defect.")
    images = {path: {sha256(before[path]): sha256(after[path])} for path in before}
    names = {patch.name: patch.sha256 for patch in written}
    return Manifest(result.to, names, images)


def _file_diff(path: str, old: bytes, new: bytes, edits: Iterable[Edit]) -> bytes:
    lines = split_lines(old)
    out = [
        f"diff --git a/{path} b/{path}\n".encode(),
        f"index {_blob(old)}..{_blob(new)} 100644\n".encode(),
        f"--- a/{path}\n+++ b/{path}\n".encode(),
    ]
    shift = 0
    for group in _grouped(edits):
        start = max(group[0].start - CONTEXT, 0)
        stop = min(group[-1].stop + CONTEXT, len(lines))
        body: list[bytes] = []
        at = start
        for edit in group:
            body += [b" " + line for line in lines[at : edit.start]]
            body += [b"-" + line for line in lines[edit.start : edit.stop]]
            body += [b"+" + line for line in edit.lines]
            at = edit.stop
        body += [b" " + line for line in lines[at:stop]]
        grown = sum(len(edit.lines) - (edit.stop - edit.start) for edit in group)
        size = stop - start
        head = f"@@ -{start + 1},{size} +{start + 1 + shift},{size + grown} @@\n"
        out += [head.encode(), *body]
        shift += grown
    text = b"".join(
        line if line.endswith(b"\n") else line + b"\n\\ No newline at end of file\n"
        for line in out
    )
    return text


def _grouped(edits: Iterable[Edit]) -> list[list[Edit]]:
    """Edits whose context would touch share a hunk."""
    groups: list[list[Edit]] = []
    for edit in edits:
        if groups and edit.start - groups[-1][-1].stop <= 2 * CONTEXT:
            groups[-1].append(edit)
        else:
            groups.append([edit])
    return groups


def _blob(content: bytes) -> str:
    """The name that git gives to this content."""
    head = f"blob {len(content)}\0".encode()
    return hashlib.sha1(head + content, usedforsecurity=False).hexdigest()
