"""Blocks on a screen: one column, or two where it is wide enough."""

from __future__ import annotations

import time

from vllm_tide.top.local_view import engine_block, trainer_block
from vllm_tide.top.picture import Picture
from vllm_tide.top.server_view import server_block
from vllm_tide.top.text import Block, Line, Style, clipped, line, width

TWO_COLUMNS = 164
_GAP = 3


def body(picture: Picture, columns: int) -> Block:
    """All lines of a picture, none wider than the screen.

    Args:
        picture: Figures.
        columns: Of the screen.
    """
    brief = any(not server.error and server.tide for server in picture.servers)
    left = [server_block(server) for server in picture.servers]
    left += [engine_block(engine, brief=brief) for engine in picture.engines]
    right = [trainer_block(trainer) for trainer in picture.trainers]
    if not picture.engines:
        left.append([line(("ENGINE ", Style.TITLE), "none announced")])
    if not picture.trainers:
        right.append([line(("TRAINER ", Style.TITLE), "none seen")])
    if picture.old_trainers:
        text = f"{picture.old_trainers} status files of ended trainers not shown"
        right.append([line((text, Style.LABEL))])
    if columns < TWO_COLUMNS:
        return [clipped(found, columns) for block in left + right for found in block]
    half = (columns - _GAP) // 2
    return _beside(sum(left, []), sum(right, []), half)


def screen(picture: Picture, columns: int, rows: int, offset: int) -> Block:
    """Exactly `rows` lines for a terminal.

    Args:
        picture: Figures.
        columns: Of the screen.
        rows: Of the screen.
        offset: Lines of the body scrolled away; too many show the last ones.
    """
    lines = body(picture, columns)
    room = max(rows - 2, 0)
    offset = min(max(offset, 0), max(len(lines) - room, 0))
    shown = lines[offset : offset + room]
    hidden = len(lines) - offset - len(shown)
    more = f"   {hidden} more lines below (arrows)" if hidden else ""
    foot = line((f"q quits{more}", Style.LABEL))
    filled = [title(picture), *shown, *([[]] * (room - len(shown))), foot]
    return [clipped(found, columns) for found in filled[:rows]]


def title(picture: Picture) -> Line:
    """The first line."""
    clock = time.strftime("%H:%M:%S", time.localtime(picture.unix_s))
    return line(("vllm-tide top", Style.TITLE), f"  {clock}  {picture.run_dir}")


def _beside(left: Block, right: Block, half: int) -> Block:
    lines = []
    for i in range(max(len(left), len(right))):
        first = clipped(left[i], half) if i < len(left) else []
        second = clipped(right[i], half) if i < len(right) else []
        gap = " " * (half + _GAP - width(first)) if second else ""
        lines.append([*first, (gap, Style.PLAIN), *second])
    return lines
