"""The screen: lines of templates, which rich lays out.

ASCII only: a name or reason comes from another process, and what is no printable ASCII
is replaced, so that no escape sequence of anybody else's reaches the terminal.
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

from vllm_tide.top.collect import Json, Sampler
from vllm_tide.top.figures import make_picture

# Rows lost in the middle of requests; over_budget leaves whole requests out.
_BEHIND = {"ring_full", "cut_short"}
_OTHER = re.compile(r"[^ -~]")
_FIGURE = re.compile(r"\{(\w+):?([^}]*)\}")
_STYLES = {True: "green", False: "yellow", None: "default"}

# Lines of templates (see `_text`), in the order of the screen
_RING = (
    "{capture}|{ring_used_bytes:mib} of {ring_capacity_bytes:whole} MiB, "
    "{ring_consumer_alive:reader}"
)
_SERVER = {
    "tokens/s": "[bold]{tokens_per_s:.1f}[/] out, {prompt_tokens_per_s:.1f} in   "
    "{running:.0f} running, {waiting:.0f} waiting",
    "acceptance": "|[bold]{acceptance_length:.2f}[/] tokens/draft"
    "| ({acceptance_length_total:.2f} since start)|, by position "
    "{acceptance_by_position:share}",
    "length": "{draft_length:.2f} tokens drafted per step|; by length {lengths:share}",
}
_TIDE = {
    "off": "|no draft in {off_share:share} of steps|: {off_rounds:share}",
    "step": "|{measured_step_s:ms} ms|, predicted {predicted_step_s:ms} ms"
    "|; tokens/s {throughput_ratio:.2f} times predicted",
    "draft": "version {draft_version:.0f} served, {swaps:.0f} swaps"
    "|, last pause {swap_seconds_last:ms} ms| (max {swap_seconds_max:ms})"
    "|[yellow]; refused: {refused_drafts:.0f}[/]",
    "ring": _RING,
    "capture": "|{captured_rows_per_s:.1f} rows/s"
    "|, dropped per second: [{lost}]{dropped_rows_per_s:.1f}[/]",
    "SLO": "|limits of requests: {requests:.0f}|; {slo_rounds_missed:.0f} steps "
    "could not",
    "faults": "|[red]{faults:.0f}[/]",
}
_ENGINE = {
    "ring": _RING,
    "capture": "|{rows_per_s:.1f} rows/s, dropped {dropped_rows_per_s:.1f}/s"
    "|[red], {corrupt_records} records damaged[/]",
    "draft": "|version {installed_version} installed|, {published_version} published"
    "|[yellow], {refused_version} refused[/]| ({refused_reason})"
    "|; pause {swap_pause_ms:.1f} ms",
}
_TRAINER = {
    "cycle": "{cycles}, {steps} steps, loss [bold]{loss:.3f}[/], "
    "{train_tokens} tokens trained, {rows_read} rows read",
    "held out": "|acceptance {holdout_acceptance_new:.3f} new"
    "|, {holdout_acceptance_live:.3f} served|: {last_decision}",
    "draft": "version {published_version} published, {installed_version} installed"
    "|, last {seconds_since_publish:age} ago"
    "|[yellow]; {refused_versions} refused[/]|[yellow]; {rollbacks} rolled back[/]",
    "schedule": "|{schedule_mode}, {schedule}|, accepted {short_average:.3f} lately"
    "|, {long_average:.3f} usually|, {shifts} shifts",
    "  because": "|{schedule_reason}",
    "canary": "|[yellow]{canary}[/]",
    "  speed": "|{speed_before:.2f} -> {speed_after:.2f} times plain, "
    "{canary_requests} requests| ({speed_change:+.0%} +- {speed_error:.0%})",
    "waiting for": "|[yellow]{waiting_for}[/]",
}


def plain(picture: Json, columns: int | None = None) -> str:
    """Text of the whole picture, however long, without colour."""
    console = Console(width=columns, color_system=None)
    with console.capture() as capture:
        console.print(body(picture))
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def body(picture: Json) -> RenderableType:
    """All lines: the verdicts first, then servers, engines and trainers."""
    clock = time.strftime("%H:%M:%S", time.localtime(picture["unix_s"]))
    brief = any(server["tide"] for server in picture["servers"])
    none = _text("Not known: no server was asked (--url), no trainer runs.")
    old = "|[dim]{old_trainers} status files of ended trainers not shown[/]"
    return Group(
        _text(f"[bold]vllm-tide top[/]  {clock}  {{run_dir}}", picture),
        *[
            _text(
                f"[{_STYLES[found['helps']]}]{{sentence}}[/]  [dim]{{name}}[/]", found
            )
            for found in picture["helping"]
        ]
        or [none],
        *map(_server, picture["servers"]),
        *[_engine(engine, brief) for engine in picture["engines"]]
        or [_text("[bold]ENGINE[/] none announced")],
        *map(_trainer, picture["trainers"]),
        *[] if picture["trainers"] else [_text("[bold]TRAINER[/] none seen")],
        *filter(None, [_text(old, picture)]),
    )


def watch(sampler: Sampler, interval: float) -> None:
    """Shows the full screen until Ctrl-C or SIGTERM."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    # Also under nohup; no terminal is left to restore.
    signal.signal(signal.SIGHUP, lambda number, _: os._exit(128 + number))
    with Live("vllm-tide top  looking ...", screen=True) as live:
        while True:
            sampler.take()
            picture = make_picture(sampler.history, str(sampler.run_dir))
            live.update(body(picture), refresh=True)
            time.sleep(interval)


def percent(share: float) -> str:
    """A share as a whole number of percent; `<1%` for what is not quite none."""
    return "<1%" if 0 < share < 0.005 else f"{share:.0%}"


_SPECS: dict[str, Callable[[Any], str]] = {
    "age": lambda seconds: (
        str(timedelta(seconds=int(seconds))) if abs(seconds) < 1e11 else "-"
    ),
    "mib": lambda size: f"{size / (1 << 20):.1f}",
    "whole": lambda size: f"{size / (1 << 20):.0f}",
    "reader": lambda alive: "read by a trainer" if alive else "no trainer",
    "ms": lambda seconds: f"{1e3 * seconds:.1f}",
    "share": percent,
}


def _shown(value: Any, spec: str) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {_shown(v, spec)}" for k, v in value.items() if v)
    if isinstance(value, list):
        return " ".join(_shown(one, spec) for one in value)
    if value is None:
        return "-"
    return _SPECS[spec](value) if spec in _SPECS else format(value, spec)


def _text(template: str, figures: Json | None = None) -> Text:
    """A line of a template of rich's markup, with figures in it.

    `{name:spec}` is a figure in one of `_SPECS`, or as Python formats it. A part behind
    a `|` is left out where one of its figures has nothing to tell: none, empty, 0. What
    others wrote is made harmless.
    """

    def shown(found: re.Match[str]) -> str:
        text = _shown((figures or {})[found[1]], found[2])
        return escape(_OTHER.sub("?", text))

    def telling(part: str) -> bool:
        return {"", "-", "0"}.isdisjoint(map(shown, _FIGURE.finditer(part)))

    first, *parts = template.split("|")
    line = _FIGURE.sub(shown, first + "".join(filter(telling, parts)))
    return Text.from_markup(line, emoji=False, overflow="fold")


def _block(head: str, rows: dict[str, str], figures: Json) -> RenderableType:
    """Lines that belong together; a row that has no text is left out."""
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(style="dim", min_width=13, no_wrap=True)
    table.add_column(overflow="fold")
    for label, template in rows.items():
        if text := _text(template, figures):
            table.add_row(f"  {label}", text)
    return Group(_text(head, figures), table)


def _server(server: Json) -> RenderableType:
    if server["error"]:
        return _text("[bold]SERVER[/] {url}  [red]{error}[/]", server)
    lost = _BEHIND & server["dropped_rows_per_s"].keys()
    requests = {"kept": server["slo_met"], "missed": server["slo_missed"]}
    figures = server | {
        "lost": "yellow" if lost else "default",
        "requests": requests,
        "capture": "" if server["ring_capacity_bytes"] else "no capture",
    }
    rows = _SERVER | (
        _TIDE if server["tide"] else {"tide": "[yellow]not configured on this server"}
    )
    if server["acceptance_length_total"] is None:
        rows["acceptance"] = "nothing drafted yet"
    return _block("[bold]SERVER[/] {url}  {models}", rows, figures)


def _engine(engine: Json, brief: bool) -> RenderableType:
    """An engine; `brief` leaves out what the page of its server shows."""
    alive = {True: "alive", False: "dead", None: "pid not to be seen"}[engine["alive"]]
    style = "green" if engine["alive"] else "red"
    head = (
        f"[bold]ENGINE[/] {{engine_id:.12}} pid {{pid}} [{style}]{alive}[/]  {{target}}"
        " + {draft}, {num_speculative_tokens} draft tokens|, {policy}"
    )
    capture = "" if engine["ring_capacity_bytes"] else "no capture"
    return _block(head, {} if brief else _ENGINE, engine | {"capture": capture})


def _trainer(trainer: Json) -> RenderableType:
    seen = (
        "[red]silent for {age_s:age}" if trainer["silent"] else "seen {age_s:age} ago"
    )
    style = _STYLES[trainer["state"] in ("training", "waiting")]
    cycles, canary = trainer["backoff_cycles"], ""
    if trainer["canary_undecided"]:
        canary = "undecided"
    elif cycles:
        canary = f"backing off {cycles} cycles after a rollback"
    figures = trainer | {
        "canary": canary,
        "schedule": "collecting" if trainer["collecting"] else "paused",
        "several": "" if trainer["engines"] == 1 else "s",
    }
    head = (
        f"[bold]TRAINER[/] {{name:.12}} pid {{pid}} [{style}]{{state}}[/], {{engines}} "
        f"engine{{several}}, {seen}"
    )
    return _block(head, _TRAINER, figures)
