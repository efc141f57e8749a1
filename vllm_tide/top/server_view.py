"""Lines about a server."""

from __future__ import annotations

from vllm_tide.top.server_figures import ServerFigures
from vllm_tide.top.text import (
    Block,
    Line,
    Style,
    bar,
    line,
    listed,
    mib,
    number,
    percent,
    row,
    shares,
)

# Rows lost in the middle of requests; over_budget leaves whole requests out.
_BEHIND = {"ring_full", "cut_short"}
_FULL = 0.9  # of a ring, from which on rows are about to be dropped


def server_block(server: ServerFigures) -> Block:
    """What a server does; a line that would say nothing is left out."""
    title = ("SERVER ", Style.TITLE)
    if server.error:
        return [line(title, server.url, "  ", (server.error, Style.BAD))]
    head = line(title, server.url, "  ", listed(server.models))
    lines = [head, _load(server), _acceptance(server), _length(server)]
    if not server.tide:
        lines.append(row("tide", ("not configured on this server", Style.WARN)))
        return [found for found in lines if found]
    lines += [
        _off(server),
        _control(server),
        _draft(server),
        _ring(server),
        _capture(server),
        _slo(server),
        _faults(server),
    ]
    return [found for found in lines if found]


def _load(server: ServerFigures) -> Line:
    return row(
        "tokens/s",
        (number(server.tokens_per_s), Style.TITLE),
        f" out, {number(server.prompt_tokens_per_s)} in   "
        f"{number(server.running, 0)} running, {number(server.waiting, 0)} waiting",
    )


def _acceptance(server: ServerFigures) -> Line:
    if server.acceptance_length_total is None:
        return row("acceptance", "nothing drafted yet")
    positions = " ".join(percent(share) for share in server.acceptance_by_position)
    return row(
        "acceptance",
        (number(server.acceptance_length, 2), Style.TITLE),
        f" tokens/draft ({number(server.acceptance_length_total, 2)} since start)",
        f", by position {positions}" if positions else "",
    )


def _length(server: ServerFigures) -> Line:
    spread = " ".join(f"{k}:{percent(v)}" for k, v in server.lengths.items() if v)
    return row(
        "length",
        f"{number(server.draft_length, 2)} tokens drafted per step",
        f"; by length {spread}" if spread else "",
    )


def _off(server: ServerFigures) -> Line:
    if server.off_share is None:
        return []
    why = f": {shares(server.off_rounds)}" if server.off_rounds else ""
    return row("off", f"no draft in {percent(server.off_share)} of steps{why}")


def _control(server: ServerFigures) -> Line:
    if server.measured_step_s is None:
        return []
    predicted = server.predicted_step_s
    return row(
        "step",
        f"{number(1e3 * server.measured_step_s)} ms, predicted "
        f"{number(None if predicted is None else 1e3 * predicted)} ms; tokens/s "
        f"{number(server.throughput_ratio, 2)} times predicted",
    )


def _draft(server: ServerFigures) -> Line:
    parts = [
        f"version {number(server.draft_version, 0)} served",
        f"{number(server.swaps, 0)} swaps",
    ]
    if server.swap_seconds_last is not None:
        parts.append(
            f"last pause {number(1e3 * server.swap_seconds_last)} ms (max "
            f"{number(1e3 * (server.swap_seconds_max or 0.0))})"
        )
    refused = {k: v for k, v in server.refused_drafts.items() if v}
    names = listed([f"{reason} {count:.0f}" for reason, count in refused.items()])
    return row(
        "draft",
        listed(parts),
        (f"; refused: {names}", Style.WARN) if names else "",
    )


def _ring(server: ServerFigures) -> Line:
    capacity = server.ring_capacity_bytes
    if not capacity:
        return row("ring", "no capture")
    used = (server.ring_used_bytes or 0.0) / capacity
    return row(
        "ring",
        (bar(used), Style.WARN if used >= _FULL else Style.PLAIN),
        f" {percent(used)} of {mib(capacity)}, ",
        ("read by a trainer", Style.GOOD)
        if server.ring_consumer_alive
        else ("no trainer", Style.WARN),
    )


def _capture(server: ServerFigures) -> Line:
    if not server.ring_capacity_bytes:
        return []
    lost = server.dropped_rows_per_s
    names = listed([f"{reason} {rate:.1f}" for reason, rate in sorted(lost.items())])
    return row(
        "capture",
        f"{number(server.captured_rows_per_s)} rows/s, dropped "
        f"{number(sum(lost.values()))}/s",
        (f" ({names})", Style.WARN if _BEHIND & lost.keys() else Style.PLAIN)
        if names
        else "",
    )


def _slo(server: ServerFigures) -> Line:
    ended = server.slo_met + server.slo_missed
    if not ended and not server.slo_rounds_missed:
        return []
    text = f"{server.slo_met:.0f} of {ended:.0f} requests kept their limit"
    share = f" ({percent(server.slo_met / ended)})" if ended else ""
    return row(
        "SLO",
        (f"{text}{share}", Style.WARN if server.slo_missed else Style.GOOD),
        f"; {server.slo_rounds_missed:.0f} steps could not",
    )


def _faults(server: ServerFigures) -> Line:
    found = {k: v for k, v in server.faults.items() if v}
    if not found:
        return []
    names = listed([f"{reason} {count:.0f}" for reason, count in found.items()])
    return row("faults", (names, Style.BAD))
