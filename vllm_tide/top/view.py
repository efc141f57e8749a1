"""The screen: templates of lines, laid out by rich.

Non-ASCII and control characters are replaced, as names and reasons come from other
processes and might contain escape sequences.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from vllm_tide.top.collect import ENDED, Json, Sampler
from vllm_tide.top.figures import make_picture

_OTHER = re.compile(r"[^ -~]")
_FIGURE = re.compile(r"\{(\w+):?([^}]*)\}")
_STYLES = {True: "green", False: "yellow", None: "default"}

# Lines of templates (see `_text`), in the order of the screen
_RING = (
    "{capture}|{ring_used_bytes:mib} of {ring_capacity_bytes:whole_mib} MiB, "
    "{ring_consumer_alive:reader}"
)
_SERVER = {
    "tokens/s": "[bold]{tokens_per_s:.1f}[/] out, {prompt_tokens_per_s:.1f} in   "
    "{running:.0f} running, {waiting:.0f} waiting",
    "drafting": "[bold]{acceptance_length:.2f}[/] tokens per verify step, "
    "{draft_depth:.2f} drafted",
}
_TIDE = {
    "control": "|no draft in {off_share:.0%} of steps|, {speed:.2f} times plain "
    "decoding",
    "memory": "|{memory_proposals_per_s:.1f} proposals/s, {memory_length:.2f} "
    "tokens per step with one",
    "draft": "version {draft_version:.0f} served, {swaps:.0f} swaps"
    "|, last pause {last_swap_seconds:ms} ms"
    "|[yellow]; refused: {refused_drafts:.0f}[/]",
    "ring": _RING,
    "capture": "{capture_off}|{captured_rows_per_s:.1f} rows/s"
    "|, dropped per second: {dropped_rows_per_s:.1f}",
    "faults": "|[red]{faults:.0f}[/]",
}
_ENGINE = {
    "ring": _RING,
    "capture": "|{written_rows} rows|, {dropped_rows} dropped"
    "|[red], {corrupt_records} records damaged[/]",
    "draft": "|version {installed_version} installed, pause {swap_pause_ms:.1f} ms"
    "|, {published_version} published"
    "|[yellow], {refused_version} refused[/]| ({refused_reason})",
}
_TRAINER = {
    "cycle": "{cycles}, {steps} steps, loss [bold]{loss:.3f}[/], "
    "{train_tokens} tokens trained, {rows_read} rows read",
    "held out": "|acceptance {holdout_acceptance_new:.3f} new"
    "|, {holdout_acceptance_live:.3f} served (last scored cycle)",
    "gate": "|{last_decision}",
    "draft": "version {published_version} published, {installed_version} installed"
    "|, last {seconds_since_publish:age} ago"
    "|[yellow]; {refused_versions} refused[/]|[yellow]; {rollbacks} rolled back[/]",
    "canary": "|[yellow]{canary}[/]",
    "waiting for": "|[yellow]{waiting_for}[/]",
}


def plain(picture: Json, columns: int | None = None) -> str:
    """Format the complete picture without colour."""
    console = Console(width=columns, color_system=None)
    with console.capture() as capture:
        console.print(body(picture))
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def body(picture: Json) -> RenderableType:
    """Lay out the verdicts, then servers, engines and trainers."""
    clock = time.strftime("%H:%M:%S", time.localtime(picture["unix_s"]))
    brief = any(server["tide"] for server in picture["servers"])
    none = _text("Unknown: no server is given (--url) and no trainer runs.")
    return Group(
        _text(f"[bold]vllm-tide top[/]  {clock}  {{run_dir}}", picture),
        *[
            _text(f"[{_STYLES[item['helps']]}]{{sentence}}[/]  [dim]{{name}}[/]", item)
            for item in picture["helping"]
        ]
        or [none],
        *map(_server, picture["servers"]),
        *[_engine(engine, brief) for engine in picture["engines"]]
        or [_text("[bold]ENGINE[/] none announced")],
        *map(_trainer, picture["trainers"]),
        *[] if picture["trainers"] else [_text(f"[bold]TRAINER[/] {_unseen(picture)}")],
    )


def _unseen(picture: Json) -> str:
    """Describe a trainer without a status file."""
    if any(engine["spool"] and engine["alive"] for engine in picture["engines"]):
        return "at the other end of the spool (tide.spool.url)"
    rings = (*picture["engines"], *picture["servers"])
    if any(ring.get("ring_consumer_alive") for ring in rings):
        return "starting" if picture["engines"] else "in another directory (--run-dir)"
    return "none seen"


def watch(sampler: Sampler, interval: float) -> None:
    """Show the full screen until Ctrl-C or SIGTERM."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    # Also under nohup; there is no terminal to restore.
    signal.signal(signal.SIGHUP, lambda number, _: os._exit(128 + number))
    with Live("vllm-tide top  reading ...", screen=True) as live:
        while True:
            sampler.take()
            picture = make_picture(sampler.history, str(sampler.run_dir))
            live.update(body(picture), refresh=True)
            time.sleep(interval)


_SPECS: dict[str, Callable[[Any], str]] = {
    "age": lambda seconds: str(timedelta(seconds=int(seconds))),
    "mib": lambda size: f"{size / (1 << 20):.1f}",
    "whole_mib": lambda size: f"{size / (1 << 20):.0f}",
    "reader": lambda alive: "read by a trainer" if alive else "not being read",
    "ms": lambda seconds: f"{1e3 * seconds:.1f}",
}


def _shown(value: Any, spec: str) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {_shown(v, spec)}" for k, v in value.items() if v)
    if isinstance(value, list):
        return " ".join(map(str, value))
    if value is None:
        return "-"
    try:
        return _SPECS[spec](value) if spec in _SPECS else format(value, spec)
    except (ArithmeticError, TypeError, ValueError):  # a status file of another version
        return "-"


def _text(template: str, figures: Json | None = None) -> Text:
    """Fill figures into a template of rich's markup.

    `{name:spec}` is a figure formatted by one of `_SPECS` or by Python. A part after a
    `|` is left out if one of its figures is none, empty or 0. Values are escaped.
    """

    def shown(match: re.Match[str]) -> str:
        text = _shown((figures or {})[match[1]], match[2])
        return escape(_OTHER.sub("?", text))

    def has_values(part: str) -> bool:
        return {"", "-", "0"}.isdisjoint(map(shown, _FIGURE.finditer(part)))

    first, *parts = template.split("|")
    line = _FIGURE.sub(shown, first + "".join(filter(has_values, parts)))
    return Text.from_markup(line, emoji=False, overflow="fold")


def _block(title: str, rows: dict[str, str], figures: Json) -> RenderableType:
    """Lay out a title and its rows; a row without text is left out."""
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(style="dim", min_width=13, no_wrap=True)
    table.add_column(overflow="fold")
    for label, template in rows.items():
        if text := _text(template, figures):
            table.add_row(f"  {label}", text)
    return Group(_text(title, figures), table)


def _server(server: Json) -> RenderableType:
    if server["error"]:
        return _text("[bold]SERVER[/] {url}  [red]{error}[/]", server)
    capture = "" if server["ring_capacity_bytes"] else "none reported"
    tide = (
        _TIDE if server["tide"] else {"tide": "[yellow]not configured on this server"}
    )
    title = "[bold]SERVER[/] {url}  {models}"
    off = "off in the last step (`vllm-tide status`); "
    off = off if server["capture_on"] == 0 else ""
    shown = server | {"capture": capture, "capture_off": off}
    return _block(title, _SERVER | tide, shown)


def _engine(engine: Json, brief: bool) -> RenderableType:
    """Lay out an engine; `brief` leaves out figures shown for its server."""
    alive, style = ("alive", "green") if engine["alive"] else ("dead", "red")
    title = (
        f"[bold]ENGINE[/] {{engine_id:.12}} pid {{pid}} [{style}]{alive}[/]  {{target}}"
        " + {draft}, {num_speculative_tokens} draft tokens|, {policy}"
    )
    capture = "" if engine["ring_capacity_bytes"] else "no capture"
    return _block(title, {} if brief else _ENGINE, engine | {"capture": capture})


def _trainer(trainer: Json) -> RenderableType:
    seen = (
        "[yellow]no news for {age_s:age}: busy or killed"
        if trainer["silent"]
        else "seen {age_s:age} ago"
    )
    style = _STYLES[trainer["state"] in ("training", "waiting")]
    cycles, canary = trainer["backoff_cycles"], ""
    if trainer["canary_undecided"]:
        canary = "undecided"
    elif cycles:
        canary = f"publishing waits {cycles} cycles after a rollback"
    figures = trainer | {
        "canary": canary,
        "several": "" if trainer["engines"] == 1 else "s",
    }
    title = (
        f"[bold]TRAINER[/] {{name:.12}} pid {{pid}} [{style}]{{state}}[/], {{engines}} "
        f"engine{{several}}, {seen}"
    )
    return _block(title, {} if trainer["state"] in ENDED else _TRAINER, figures)
