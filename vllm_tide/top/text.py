"""Pieces of a line, their colours, and figures in words. ASCII only.

A name or reason comes from another process: what is no printable ASCII is replaced, so
that no escape sequence of anybody else's reaches the terminal, and a character is
always one column.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import Enum

_OTHER = re.compile(r"[^ -~]")


class Style(Enum):
    """What a piece means; the value is its ANSI attribute."""

    PLAIN = ""
    TITLE = "1"
    LABEL = "2"
    GOOD = "32"
    WARN = "33"
    BAD = "31"


Piece = tuple[str, Style]
Line = list[Piece]
Block = list[Line]
"""Lines that belong together: a server, an engine, a trainer."""


def line(*pieces: str | Piece) -> Line:
    """A line of pieces; a bare string is plain."""
    styled = [p if isinstance(p, tuple) else (p, Style.PLAIN) for p in pieces]
    return [(_OTHER.sub("?", text), style) for text, style in styled if text]


def row(label: str, *pieces: str | Piece) -> Line:
    """A line with a label before it."""
    return line((f"  {label:<11} ", Style.LABEL), *pieces)


def width(pieces: Line) -> int:
    """Columns of a line."""
    return sum(len(text) for text, _ in pieces)


def clipped(pieces: Line, columns: int) -> Line:
    """A line of at most so many columns; one that was cut ends in `>`."""
    if width(pieces) <= columns:
        return pieces
    found: Line = []
    left = columns - 1
    for text, style in pieces:
        found.append((text[:left], style))
        left -= len(found[-1][0])
    return [*found, (">"[:columns], Style.LABEL)]


def rendered(pieces: Line, *, colour: bool) -> str:
    """A line as text, with ANSI attributes if wanted."""
    if not colour:
        return "".join(text for text, _ in pieces)
    return "".join(
        f"\033[{style.value}m{text}\033[0m" if style.value else text
        for text, style in pieces
    )


def bar(share: float, columns: int = 10) -> str:
    """A share of 0 to 1 as `[###.......]`."""
    share = min(max(share, 0.0), 1.0)
    filled = round(share * columns)
    return f"[{'#' * filled}{'.' * (columns - filled)}]"


def number(value: float | None, digits: int = 1, unit: str = "") -> str:
    """A figure, or `-` where there is none."""
    return "-" if value is None else f"{value:.{digits}f}{unit}"


def percent(share: float) -> str:
    """A share as a whole number of percent; `<1%` for what is not quite none."""
    return "<1%" if 0 < share < 0.005 else f"{share:.0%}"


def mib(num_bytes: float) -> str:
    """Bytes in MiB."""
    return f"{num_bytes / (1 << 20):.0f} MiB"


def ago(seconds: float) -> str:
    """An age in the unit that suits it."""
    for limit, length, unit in ((120, 1, "s"), (7200, 60, "min"), (172800, 3600, "h")):
        if seconds < limit:
            return f"{max(seconds, 0) / length:.0f} {unit}"
    return f"{seconds / 86400:.0f} days"


def listed(parts: Sequence[str]) -> str:
    """Parts behind each other with commas."""
    return ", ".join(parts)


def shares(by_name: dict[str, float]) -> str:
    """Shares by name, the largest first."""
    ordered = sorted(by_name.items(), key=lambda item: (-item[1], item[0]))
    return listed([f"{name} {percent(share)}" for name, share in ordered])
