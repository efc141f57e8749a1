"""Lines about engines and trainers."""

from __future__ import annotations

from vllm_tide.top.local_figures import EngineFigures, TrainerFigures
from vllm_tide.top.text import (
    Block,
    Line,
    Piece,
    Style,
    ago,
    bar,
    line,
    listed,
    mib,
    number,
    percent,
    row,
)

_SHORT_ID = 12


def engine_block(engine: EngineFigures, *, brief: bool) -> Block:
    """What an engine says of itself in shared memory.

    Args:
        engine: Its figures.
        brief: Leave out what the page of its server shows.
    """
    state: Piece = {
        True: ("alive", Style.GOOD),
        False: ("dead", Style.BAD),
        None: ("pid not to be seen", Style.WARN),
    }[engine.alive]
    head = line(
        ("ENGINE ", Style.TITLE),
        f"{engine.engine_id[:_SHORT_ID]} pid {engine.pid} ",
        state,
        f"  {engine.target} + {engine.draft}, "
        f"{engine.num_speculative_tokens} draft tokens",
        f", {engine.policy}" if engine.policy else "",
    )
    lines = [head]
    if not brief:
        lines += [_ring(engine), _capture(engine)]
    lines.append(_draft(engine, brief=brief))
    return [found for found in lines if found]


def trainer_block(trainer: TrainerFigures) -> Block:
    """What a trainer says in its status file."""
    lines = [
        _head(trainer),
        _progress(trainer),
        _held_out(trainer),
        _published(trainer),
        _schedule(trainer),
        row("  because", trainer.schedule_reason) if trainer.schedule_reason else [],
        _canary(trainer),
    ]
    if trainer.waiting_for:
        lines.append(row("waiting for", (trainer.waiting_for, Style.WARN)))
    return [found for found in lines if found]


def _ring(engine: EngineFigures) -> Line:
    if not engine.ring_capacity_bytes:
        return row("ring", "none")
    used = (engine.ring_used_bytes or 0) / engine.ring_capacity_bytes
    return row(
        "ring",
        f"{bar(used)} {percent(used)} of {mib(engine.ring_capacity_bytes)}, ",
        ("read by a trainer", Style.GOOD)
        if engine.ring_consumer_alive
        else ("no trainer", Style.WARN),
    )


def _capture(engine: EngineFigures) -> Line:
    if not engine.ring_capacity_bytes:
        return []
    dropped = engine.dropped_rows_per_s
    return row(
        "capture",
        f"{number(engine.rows_per_s)} rows/s, ",
        (f"dropped {number(dropped)}/s", Style.WARN if dropped else Style.PLAIN),
        (f", {engine.corrupt_records} records damaged", Style.BAD)
        if engine.corrupt_records
        else "",
    )


def _draft(engine: EngineFigures, *, brief: bool) -> Line:
    if engine.published_version is None:
        return []
    refused = engine.refused_version
    if brief and not refused:
        return []
    installed = "-" if engine.installed_version is None else engine.installed_version
    return row(
        "draft",
        f"version {installed} installed, {engine.published_version} published",
        (f", {refused} refused ({engine.refused_reason})", Style.WARN)
        if refused
        else "",
        f"; pause {number(engine.swap_pause_ms)} ms",
    )


def _head(trainer: TrainerFigures) -> Line:
    style = {"training": Style.GOOD, "waiting": Style.GOOD}.get(
        trainer.state, Style.WARN
    )
    return line(
        ("TRAINER ", Style.TITLE),
        f"{trainer.name[:_SHORT_ID]} pid {trainer.pid} ",
        (trainer.state, style),
        f", {trainer.engines} engine{'' if trainer.engines == 1 else 's'}, ",
        (f"silent for {ago(trainer.age_s)}", Style.BAD)
        if trainer.silent
        else f"seen {ago(trainer.age_s)} ago",
    )


def _progress(trainer: TrainerFigures) -> Line:
    return row(
        "cycle",
        f"{trainer.cycles}, {trainer.steps} steps, loss ",
        (number(trainer.loss, 3), Style.TITLE),
        f", {trainer.train_tokens} tokens trained, {trainer.rows_read} rows read",
    )


def _held_out(trainer: TrainerFigures) -> Line:
    new, live = trainer.holdout_acceptance_new, trainer.holdout_acceptance_live
    if new is None and live is None:
        return row("held out", "not evaluated yet")
    decision = trainer.last_decision
    return row(
        "held out",
        f"acceptance {number(new, 3)} new, {number(live, 3)} served",
        f": {decision}" if decision else "",
    )


def _published(trainer: TrainerFigures) -> Line:
    parts = [
        f"version {trainer.published_version} published",
        f"{trainer.installed_version} installed",
    ]
    if trainer.seconds_since_publish is not None:
        parts.append(f"last {ago(trainer.seconds_since_publish)} ago")
    bad = []
    if trainer.refused_versions:
        bad.append(f"{trainer.refused_versions} refused")
    if trainer.rollbacks:
        bad.append(f"{trainer.rollbacks} rolled back")
    return row(
        "draft",
        listed(parts),
        (f"; {listed(bad)}", Style.WARN) if bad else "",
    )


def _schedule(trainer: TrainerFigures) -> Line:
    if not trainer.schedule_mode:
        return []
    averages = ""
    if trainer.short_average is not None:
        averages = (
            f", accepted {number(trainer.short_average, 3)} lately, "
            f"{number(trainer.long_average, 3)} usually, {trainer.shifts} shifts"
        )
    return row(
        "schedule",
        "collecting" if trainer.collecting else "paused",
        averages,
    )


def _canary(trainer: TrainerFigures) -> Line:
    served = (
        f"speed over plain {number(trainer.speed_before, 2)} -> "
        f"{number(trainer.speed_after, 2)}, {trainer.canary_requests} requests"
    )
    if trainer.speed_change is not None and trainer.speed_error is not None:
        served += f" ({trainer.speed_change:+.0%} +- {trainer.speed_error:.0%})"
    if trainer.canary_undecided:
        return row("canary", ("undecided", Style.WARN), f": {served}")
    if trainer.backoff_cycles:
        waits = f"{trainer.backoff_cycles} cycles after a rollback"
        return row("canary", (f"backing off {waits}", Style.WARN))
    return row("canary", f"no trial; last {served}") if trainer.canary_requests else []
