"""Where the hunks of the series lie in another release of vLLM; changes nothing.

:mod:`vllm_tide.patch_series` applies a hunk exactly or not at all. Here, for a person
who moves the series to a newer release, a hunk may also lose up to two lines of context
at each end, as with ``patch --fuzz=2``; and what does not fit is shown beside what is
there now. Standard library only.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from vllm_tide.patch_series import Hunk, Patch, PatchError

MAX_FUZZ = 2
"""Most lines of context that a hunk may lose at each end."""
CONTEXT = 3
# A conflict is shown with what lies this many lines around its likeliest place.
_WINDOW = 25
_SHOWN_LINES = 24


class FitState(StrEnum):
    """How a hunk fits."""

    CLEAN = "clean"  # at the line it names
    OFFSET = "offset"  # at another line, context unchanged
    FUZZ = "fuzz"  # some of its context changed: read it
    PRESENT = "present"  # upstream has these lines already
    CONFLICT = "conflict"


@dataclass(frozen=True, slots=True)
class HunkFit:
    """How one hunk fits.

    Attributes:
        path: File it changes.
        line: Line it names (1-based, in the file as the patches before leave it).
        state: See :class:`FitState`.
        at_line: Line of its first line in the new file; of its likeliest place for a
            conflict, 0 if there is none.
        fuzz: Most lines of context lost at one end.
        detail: One sentence and, for a conflict, a diff of its old lines and those
            there now; empty where it is clean.
    """

    path: str
    line: int
    state: FitState
    at_line: int
    fuzz: int
    detail: str

    @property
    def offset(self) -> int:
        """Lines between where it is and where it said it would be."""
        return self.at_line - self.line if self.at_line else 0


@dataclass(frozen=True, slots=True)
class Edit:
    """Lines ``[start, stop)`` (0-based) of a file are replaced by ``lines``."""

    start: int
    stop: int
    lines: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class PatchFit:
    """How one patch fits.

    Attributes:
        name: Of the patch.
        hunks: In the order of the patch.
        edits: Per file, what its hunks that fit change, in order.
        before: The touched files before it, by path.
        after: The touched files after it, by path.
        broken: Files that were Python before it and are not after it.
    """

    name: str
    hunks: tuple[HunkFit, ...]
    edits: dict[str, tuple[Edit, ...]]
    before: dict[str, bytes]
    after: dict[str, bytes]
    broken: tuple[str, ...]

    @property
    def applies(self) -> bool:
        """Whether nothing of it conflicts."""
        return not self.broken and all(
            hunk.state is not FitState.CONFLICT for hunk in self.hunks
        )

    @property
    def dropped(self) -> bool:
        """Whether upstream has all of it already."""
        return all(hunk.state is FitState.PRESENT for hunk in self.hunks)


def fit_series(
    patches: Iterable[Patch], read: Callable[[str], bytes]
) -> list[PatchFit]:
    """Fits a series to other sources; a conflict does not stop the patches after it.

    Args:
        patches: The series, in order.
        read: Returns the bytes of a path such as ``vllm/outputs.py``; raises
            ``PatchError`` where the release has no such file.
    """
    content: dict[str, bytes | None] = {}
    fits = []
    for patch in patches:
        hunks: list[HunkFit] = []
        edits: dict[str, tuple[Edit, ...]] = {}
        before: dict[str, bytes] = {}
        after: dict[str, bytes] = {}
        for path, wanted in patch.hunks.items():
            if path not in content:
                content[path] = _read(read, path)
            old = content[path]
            if old is None:
                hunks += _gone(path, wanted)
                continue
            found, made = _fit_file(path, split_lines(old), wanted)
            hunks += found
            edits[path], before[path] = made, old
            after[path] = content[path] = _edited(old, made)
        broken = tuple(
            path
            for path in after
            if path.endswith(".py")
            and _is_python(before[path])
            and not _is_python(after[path])
        )
        fits.append(PatchFit(patch.name, tuple(hunks), edits, before, after, broken))
    return fits


def split_lines(content: bytes) -> list[bytes]:
    """Lines with their ends; not splitlines(), which splits at a bare return too."""
    lines = [line + b"\n" for line in content.split(b"\n")]
    lines[-1] = lines[-1][:-1]
    return lines if lines[-1] else lines[:-1]


def _read(read: Callable[[str], bytes], path: str) -> bytes | None:
    try:
        return read(path)
    except PatchError:
        return None


def _gone(path: str, hunks: Iterable[Hunk]) -> Iterator[HunkFit]:
    said = "This release has no such file."
    for hunk in hunks:
        yield HunkFit(path, hunk.start, FitState.CONFLICT, 0, 0, said)


def _fit_file(
    path: str, lines: list[bytes], hunks: Iterable[Hunk]
) -> tuple[list[HunkFit], tuple[Edit, ...]]:
    found: list[HunkFit] = []
    edits: list[Edit] = []
    done = 0
    for hunk in hunks:
        fits, made, end = _fit_parts(path, lines, [hunk], done)
        if fits[-1].state is FitState.CONFLICT and len(parts := _parts(hunk)) > 1:
            # A line between two of its changes changed: each may still have a place.
            split = _fit_parts(path, lines, parts, done)
            if all(fit.state is not FitState.CONFLICT for fit in split[0]):
                fits, made, end = split
        found += fits
        edits += made
        done = end
    return found, tuple(edits)


def _fit_parts(
    path: str, lines: list[bytes], hunks: Iterable[Hunk], done: int
) -> tuple[list[HunkFit], list[Edit], int]:
    found: list[HunkFit] = []
    edits: list[Edit] = []
    for hunk in hunks:
        fit = _fit_hunk(path, lines, hunk, done)
        found.append(fit)
        if fit.state not in (FitState.CONFLICT, FitState.PRESENT):
            edits += _hunk_edits(hunk, fit.at_line - 1)
            # Not the end of its context, which the next one may share.
            done = edits[-1].stop
    return found, edits, done


def _parts(hunk: Hunk) -> list[Hunk]:
    """A hunk as one for each of its changes, each with its own lines of context."""
    opcodes = _matcher(hunk.before, hunk.after).get_opcodes()
    changes = [opcode for opcode in opcodes if opcode[0] != "equal"]
    parts = []
    done = 0
    for number, (_, i1, i2, j1, j2) in enumerate(changes):
        following = changes[number + 1][1] if number + 1 < len(changes) else None
        start = max(i1 - CONTEXT, done)
        stop = min(i2 + CONTEXT, len(hunk.before) if following is None else following)
        before, after = hunk.before[start:stop], hunk.after[j1:j2]
        after = (*hunk.before[start:i1], *after, *hunk.before[i2:stop])
        parts.append(Hunk(hunk.start + start, before, after, hunk.after[j1:j2]))
        done = i2
    return parts


def _fit_hunk(path: str, lines: list[bytes], hunk: Hunk, done: int) -> HunkFit:
    stated = hunk.start - 1
    exact = list(_places(lines, hunk.before, done))
    if stated in exact:
        return HunkFit(path, hunk.start, FitState.CLEAN, hunk.start, 0, "")
    if len(exact) == 1:
        return HunkFit(path, hunk.start, FitState.OFFSET, exact[0] + 1, 0, "")
    if len(exact) > 1:
        return _ambiguous(path, hunk, exact)
    there = list(_places(lines, hunk.after, done)) if hunk.added else []
    if there:
        said = "Upstream has these lines already."
        return HunkFit(path, hunk.start, FitState.PRESENT, there[0] + 1, 0, said)
    for lead, trail in _trims(*_context(hunk)):
        part = hunk.before[lead : len(hunk.before) - trail]
        places = list(_places(lines, part, done)) if part else []
        if len(places) > 1:
            return _ambiguous(path, hunk, places)
        if places and places[0] >= lead:
            said = (
                f"Its first {lead} and last {trail} lines of context changed: see "
                "that it still means the same there."
            )
            at, fuzz = places[0] - lead + 1, max(lead, trail)
            return HunkFit(path, hunk.start, FitState.FUZZ, at, fuzz, said)
    return _conflict(path, lines, hunk)


def _places(lines: list[bytes], want: tuple[bytes, ...], done: int) -> Iterator[int]:
    first, size = want[0], len(want)
    block = list(want)
    for at in range(done, len(lines) - size + 1):
        if lines[at] == first and lines[at : at + size] == block:
            yield at


def _context(hunk: Hunk) -> tuple[int, int]:
    """Number of unchanged lines at either end of a hunk."""
    pairs = list(zip(hunk.before, hunk.after, strict=False))
    head = next((n for n, (old, new) in enumerate(pairs) if old != new), len(pairs))
    pairs = list(zip(hunk.before[head:][::-1], hunk.after[head:][::-1], strict=False))
    tail = next((n for n, (old, new) in enumerate(pairs) if old != new), len(pairs))
    return head, tail


def _trims(head: int, tail: int) -> list[tuple[int, int]]:
    """Ways to lose context, the smallest loss first."""
    pairs = [
        (lead, trail)
        for lead in range(min(head, MAX_FUZZ) + 1)
        for trail in range(min(tail, MAX_FUZZ) + 1)
        if lead or trail
    ]
    return sorted(pairs, key=lambda pair: (sum(pair), max(pair)))


def _hunk_edits(hunk: Hunk, start: int) -> Iterator[Edit]:
    for tag, i1, i2, j1, j2 in _matcher(hunk.before, hunk.after).get_opcodes():
        if tag != "equal":
            yield Edit(start + i1, start + i2, hunk.after[j1:j2])


def _matcher(
    before: tuple[bytes, ...], after: tuple[bytes, ...]
) -> difflib.SequenceMatcher[bytes]:
    return difflib.SequenceMatcher(None, before, after, autojunk=False)


def _ambiguous(path: str, hunk: Hunk, places: list[int]) -> HunkFit:
    where = ", ".join(str(at + 1) for at in places[:8])
    near = min(places, key=lambda at: abs(at + 1 - hunk.start)) + 1
    said = f"Its lines occur {len(places)} times, at lines {where}: choose one."
    return HunkFit(path, hunk.start, FitState.CONFLICT, near, 0, said)


def _conflict(path: str, lines: list[bytes], hunk: Hunk) -> HunkFit:
    """Says where the hunk's lines went, as well as the file tells."""
    # A line that occurs once in the file votes for the place it came from.
    votes = [
        lines.index(line) - number
        for number, line in enumerate(hunk.before)
        if line.strip() and lines.count(line) == 1
    ]
    if not votes:
        said = "None of its lines is still there, or none of them only once."
        return HunkFit(path, hunk.start, FitState.CONFLICT, 0, 0, said)
    middle = sorted(votes)[len(votes) // 2]
    low = max(middle - _WINDOW, 0)
    window = lines[low : max(middle, 0) + len(hunk.before) + _WINDOW]
    blocks = _matcher(hunk.before, tuple(window)).get_matching_blocks()[:-1]
    first, last = blocks[0], blocks[-1]
    region = window[first.b : last.b + last.size]
    shown = list(
        difflib.unified_diff(_text(hunk.before), _text(region), n=CONTEXT, lineterm="")
    )[3:]
    more = len(shown) - _SHOWN_LINES
    if more > 0:
        shown = [*shown[:_SHOWN_LINES], f"({more} more lines)"]
    said = "The lines around it changed (- those it expects, + those there now):"
    return HunkFit(
        path,
        hunk.start,
        FitState.CONFLICT,
        low + first.b + 1,
        0,
        "\n".join([said, *shown]),
    )


def _text(lines: Iterable[bytes]) -> list[str]:
    return [line.decode(errors="replace").rstrip("\n") for line in lines]


def _edited(content: bytes, edits: Iterable[Edit]) -> bytes:
    lines = split_lines(content)
    for edit in reversed(list(edits)):
        lines[edit.start : edit.stop] = edit.lines
    return b"".join(lines)


def _is_python(content: bytes) -> bool:
    try:
        ast.parse(content)
    except (SyntaxError, ValueError):
        return False
    return True
