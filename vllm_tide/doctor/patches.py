"""Are the patches in the installed vLLM, whole, and if not: which are missing?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from vllm_tide import patch_series, patching
from vllm_tide.doctor.finding import Finding, failed, ok
from vllm_tide.doctor.subject import Subject
from vllm_tide.patch_series import Patch, PatchError
from vllm_tide.patching import PatchState, Status

_APPLY = "Run 'vllm-tide patch apply' before the server is started again."
_REINSTALL = "Reinstall vLLM, then run 'vllm-tide patch apply'."


def check(subject: Subject) -> Iterator[Finding]:
    """Judge the vLLM of this Python."""
    del subject
    yield judge()


def judge(target: Path | None = None, root: Path | None = None) -> Finding:
    """Judge an installed vLLM.

    Args:
        target: Its site-packages folder; this Python's if None.
        root: Patch folder; the project's own if None.
    """
    try:
        root = root or patch_series.patches_root()
        found = patching.status(target, root)
        if found.state is PatchState.APPLIED:
            return ok("patches", found.sentence)
        series = patch_series.load_series(root)
        missing = missing_patches(series, found, patching.find_target(target).root)
    except PatchError as error:
        return failed("patches", str(error), _REINSTALL)
    which = f" Not in place: {', '.join(missing)}." if missing else ""
    advice = _REINSTALL if found.state is PatchState.FOREIGN else _APPLY
    return failed("patches", f"{found.state}: {found.sentence}{which}", advice)


def missing_patches(series: Iterable[Patch], found: Status, root: Path) -> list[str]:
    """Names of the patches with an added line that their file does not hold.

    Args:
        series: All patches.
        found: What the files look like.
        root: Folder that holds `vllm/`.
    """
    lines: dict[str, set[bytes]] = {}
    for path, kind in found.files.items():
        if kind != "patched":
            lines[path] = _lines(root / path)
    return [
        patch.name.removesuffix(".patch")
        for patch in series
        if any(
            line not in lines[path]
            for path, hunks in patch.hunks.items()
            if path in lines
            for hunk in hunks
            for line in hunk.added
        )
    ]


def _lines(path: Path) -> set[bytes]:
    try:
        return set(path.read_bytes().splitlines(keepends=True))
    except OSError:
        return set()
