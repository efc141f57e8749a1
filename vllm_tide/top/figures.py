"""Figures of one moment: the objects that `--json` prints and `view` draws.

None stands for what is not known, or not exported.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from vllm_tide.top.collect import EMPTY, ENDED, Json, Page, Sample, named

OLD_S = 3600.0
"""Status files of trainers that ended longer ago (s) are counted, not shown."""
FEW_DRAFTS = 100
"""Acceptance of fewer drafts is too uncertain for a verdict."""
GAIN = 1.01
"""What is less than this times better is not better."""

_DRAFTS = "vllm:spec_decode_num_drafts_total"
_DRAFT_TOKENS = "vllm:spec_decode_num_draft_tokens_total"
_ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
_MEMORY = "vllm_tide:memory_proposals_total", "vllm_tide:memory_accepted_tokens_total"
_PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
_STEPS = "vllm_tide:control_rounds_total"
_DRAFT_STEPS = "vllm_tide:draft_steps_total"
_BY_LENGTH = "vllm_tide:rounds_by_length_total"
_OFF = "vllm_tide:off_rounds_total"

# Figure of a server -> metric: summed over engines, the largest one, per second
_SUMS = named("""
    running=vllm:num_requests_running waiting=vllm:num_requests_waiting
    swaps=vllm_tide:swaps_total ring_used_bytes=vllm_tide:ring_used_bytes
    ring_capacity_bytes=vllm_tide:ring_capacity_bytes
    ring_consumer_alive=vllm_tide:ring_consumer_alive
""")
_LARGEST = named("""
    draft_version=vllm_tide:draft_version
    swap_seconds_last=vllm_tide:swap_seconds_last
    swap_seconds_max=vllm_tide:swap_seconds_max
    predicted_step_s=vllm_tide:predicted_step_seconds
    measured_step_s=vllm_tide:measured_step_seconds
    time_model_error=vllm_tide:time_model_error_ratio
    throughput_ratio=vllm_tide:throughput_ratio
""")
_PER_SECOND = named("""
    tokens_per_s=vllm:generation_tokens_total
    prompt_tokens_per_s=vllm:prompt_tokens_total
    captured_rows_per_s=vllm_tide:captured_rows_total
""")


def make_picture(history: Sequence[Sample], run_dir: str) -> Json:
    """All figures, of the samples of the last seconds, oldest first."""
    now = history[-1]
    trainers = [look for look in now.trainers if look["age_s"] < OLD_S]
    return {
        "unix_s": now.unix_s,
        "run_dir": run_dir,
        "helping": _verdicts(history, list(filter(is_running, trainers))),
        "servers": [server_figures(history, url) for url in now.pages],
        "engines": [f | _ring_rates(history, ring) for ring, _, f in now.engines],
        "trainers": trainers,
        "old_trainers": len(now.trainers) - len(trainers),
    }


def is_empty(picture: Json) -> bool:
    """True if there is no live engine, no trainer at work, no server that answers."""
    return (
        all(server["error"] for server in picture["servers"])
        and all(engine["alive"] is False for engine in picture["engines"])
        and not any(map(is_running, picture["trainers"]))
    )


def is_running(trainer: Json) -> bool:
    """True if a trainer works, as far as its file tells."""
    return not trainer["silent"] and trainer["state"] not in ENDED


def verdict(history: Sequence[Sample], url: str, trainer: Json | None) -> Json:
    """Verdict on adaptation at a server; `helps` is None where it is not known.

    Decides by speed over plain decoding where control measures it, else by acceptance;
    by what the trainer compared where the first draft was never seen serving.
    """
    now = history[-1]
    page, grown = _window(history, url)
    if page is EMPTY:
        return _said(url, None, f"the server {now.pages.get(url, 'was not seen')}")
    version = page.value(_LARGEST["draft_version"], max)
    if version is None:
        return _said(url, None, "tide is not configured on this server")
    length, speed = _length(grown), _speed(grown)
    if length is None:
        off = sum(grown.by_label(_OFF, "reason").values())
        if off and off == grown.value(_STEPS):
            return _said(url, False, "control drafts nothing, plain decoding is faster")
        when = "yet" if _length(page) is None else "lately"
        return _said(url, None, f"nothing drafted {when}")
    figures = f"{length:.2f} tokens a verify step"
    figures += f", {speed:.2f}x of plain" if speed else ""
    if not version:
        return _said(url, False, f"no trained draft serves; {figures}")
    first = now.first_pages.get(url, EMPTY)
    before, speed_before = _length(first), _speed(first)
    if before is None:
        helps, compared = _compared(trainer)
        return _said(url, helps, f"{compared}; {figures}")
    since = time.localtime(now.unix_s - now.t_s + first.t_s)
    figures = f"{before:.2f} -> {figures} since {time.strftime('%H:%M', since)}"
    better = length / before
    if speed and speed_before:
        better = speed / speed_before
        figures += f", {speed_before:.2f}x before"
    if min(grown.value(_DRAFTS) or 0, first.value(_DRAFTS) or 0) < FEW_DRAFTS:
        return _said(url, None, f"too few drafts; {figures}")
    return _said(url, better >= GAIN and (speed or GAIN) > 1, figures)


def server_figures(history: Sequence[Sample], url: str) -> Json:
    """Figures of a server over the last seconds; with an `error` the rest is empty.

    `acceptance_length` is vLLM's: 1 + accepted / drafts, the target's own token
    included, without the drafts of the memory; `draft_length` are draft passes per
    step; `lengths` and `off_rounds` are shares of steps; `slo_*`, `faults`,
    `refused_drafts` are totals since its start.
    """
    page, grown = _window(history, url)
    seen = history[-1].pages.get(url, "not seen")
    steps, off = grown.value(_STEPS), grown.by_label(_OFF, "reason")
    dropped = grown.by_label("vllm_tide:dropped_rows_total", "reason")
    limits = page.by_label("vllm_tide:slo_requests_total", "outcome")
    rates = {k: grown.value(name) for k, name in _PER_SECOND.items()}
    drafts = grown.value(_DRAFTS)
    positions = _shares(grown, _PER_POSITION, "position", drafts) if drafts else {}
    figures: Json = {
        "url": url,
        "error": seen if isinstance(seen, str) else "",
        "models": page.models(),
        "seconds": grown.t_s,
        **{k: v and v / grown.t_s for k, v in rates.items()},
        **{k: page.value(name) for k, name in _SUMS.items()},
        **{k: page.value(name, max) for k, name in _LARGEST.items()},
        "acceptance_length": _length(grown),
        "acceptance_length_total": _length(page),
        "acceptance_by_position": list(positions.values()),
        # Of control, as a mean over the window; else what vLLM drafted.
        "draft_length": _ratio(grown, _DRAFT_STEPS, _STEPS)
        if steps
        else _ratio(grown, _DRAFT_TOKENS, _DRAFTS),
        "lengths": _shares(grown, _BY_LENGTH, "length", None),
        "off_share": sum(off.values()) / steps if steps else None,
        "off_rounds": {k: v / steps for k, v in off.items() if v} if steps else {},
        "refused_drafts": page.by_label("vllm_tide:refused_drafts_total", "reason"),
        "dropped_rows_per_s": {k: v / grown.t_s for k, v in dropped.items() if v},
        "slo_met": limits.get("met", 0.0),
        "slo_missed": limits.get("missed", 0.0),
        "slo_rounds_missed": page.value("vllm_tide:slo_rounds_missed_total") or 0.0,
        "faults": page.by_label("vllm_tide:faults_total", "reason"),
    }
    figures["tide"] = figures["draft_version"] is not None
    if (alive := figures["ring_consumer_alive"]) is not None:
        figures["ring_consumer_alive"] = alive > 0
    for name in ("predicted_step_s", "measured_step_s", "throughput_ratio"):
        figures[name] = figures[name] or None  # never set, a gauge is exported as 0
    return figures


def _verdicts(history: Sequence[Sample], trainers: list[Json]) -> list[Json]:
    """One for each server, or for each trainer where no server was asked."""
    if not history[-1].pages:
        return [_said(look["name"], *_compared(look)) for look in trainers]
    verdicts = []
    for url, page in history[-1].pages.items():
        models = page.models() if isinstance(page, Page) else []
        own = (look for look in trainers if look["model_name"] in models)
        verdicts.append(verdict(history, url, next(own, None)))
    return verdicts


def _compared(trainer: Json | None) -> tuple[bool | None, str]:
    """Measurement of the canary between the last two drafts."""
    if trainer is None:
        return None, "the first draft was not seen serving"
    change, error = trainer["speed_change"], trainer["speed_error"]
    if None in (trainer["speed_before"], trainer["speed_after"], change, error):
        return None, "no swap was compared with the draft before it yet"
    text = (
        f"{trainer['speed_before']:.2f}x -> {trainer['speed_after']:.2f}x of plain "
        f"with the last swap ({change:+.0%} +- {error:.0%})"
    )
    if trainer["canary_undecided"] or abs(change) <= error:
        return None, f"undecided, {text}"
    return change > 0, text


def _said(name: str, helps: bool | None, text: str) -> Json:
    words = {True: "Helps", False: "Does not help yet", None: "Not known"}[helps]
    return {"name": name, "helps": helps, "sentence": f"{words}: {text}."}


def _window(history: Sequence[Sample], url: str) -> tuple[Page, Page]:
    """Page of now and its growth, both empty where they are not known.

    A gap or a restart (a total that fell) begins a new window.
    """
    pages = [sample.pages.get(url) for sample in history]
    now = pages.pop()
    if not isinstance(now, Page):
        return EMPTY, EMPTY
    oldest = now
    for page in reversed(pages):
        if not isinstance(page, Page) or oldest.restarted(page):
            break
        oldest = page
    return now, EMPTY if oldest is now else now.since(oldest)


def _ring_rates(history: Sequence[Sample], ring: str) -> Json:
    """Rows written and dropped per second of a ring; no other ever has its name."""
    seen = [
        (sample.t_s, stats.written_rows, stats.dropped_rows)
        for sample in history
        for name, stats, _ in sample.engines
        if name == ring and stats
    ]
    rates: list[float | None] = [None, None]
    if seen and seen[-1][0] > seen[0][0]:
        seconds, *grown = (
            new - old for old, new in zip(seen[0], seen[-1], strict=True)
        )
        rates = [max(0, rows) / seconds for rows in grown]
    return {"rows_per_s": rates[0], "dropped_rows_per_s": rates[1]}


def _ratio(page: Page, name: str, of: str) -> float | None:
    """Ratio of two values; None if one is missing or the second is 0."""
    value, whole = page.value(name), page.value(of)
    return value / whole if whole and value is not None else None


def _speed(page: Page) -> float | None:
    """Time of plain decoding over that of the measured steps; None if it is 0."""
    names = "vllm_tide:plain_seconds_total", "vllm_tide:round_seconds_total"
    return _ratio(page, *names) or None


def _length(page: Page) -> float | None:
    """Of the draft's steps: vLLM counts those of the memory too."""
    drafts, accepted = page.value(_DRAFTS), page.value(_ACCEPTED)
    if not drafts or accepted is None:
        return None
    proposals, from_memory = (page.value(name) or 0.0 for name in _MEMORY)
    drafts -= proposals
    return 1.0 + (accepted - from_memory) / drafts if drafts > 0 else None


def _shares(grown: Page, name: str, label: str, whole: float | None) -> Json:
    """Shares of a whole by a label that is a number, in order."""
    counts = grown.by_label(name, label)
    names = sorted(filter(str.isdigit, counts), key=int)
    whole = whole or sum(counts.values())
    return {name: counts[name] / whole for name in names} if whole else {}
