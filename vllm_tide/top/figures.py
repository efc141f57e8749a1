"""Figures of one sample: the objects that `--json` prints and `view` draws.

None means unknown or not exported.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from vllm_tide.top.collect import EMPTY, ENDED, Json, Page, Sample, named

_DRAFTS = "vllm:spec_decode_num_drafts_total"
_DRAFT_TOKENS = "vllm:spec_decode_num_draft_tokens_total"
_ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
_MEMORY = "vllm_tide:memory_proposals_total", "vllm_tide:memory_accepted_tokens_total"
_STEPS = "vllm_tide:control_steps_total"
_DRAFT_PASSES = "vllm_tide:draft_passes_total"
_OFF = "vllm_tide:steps_without_drafts_total"
_MOSTLY = 0.9
_FEW_DRAFTS = 0.1  # of the memory's proposals
_RATES_S = 10.0  # window of a server's figures; that of a verdict is longer
_DECIDES_S = 8.0  # shortest window of a verdict: the speed of a few steps varies
_PLAIN_OVER_MEASURED = (
    "vllm_tide:plain_step_seconds_total",
    "vllm_tide:step_seconds_total",
)

# Figure of a server -> metric: summed over engines, maximum, per second
_SUMS = named("""
    running=vllm:num_requests_running waiting=vllm:num_requests_waiting
    swaps=vllm_tide:swaps_total ring_used_bytes=vllm_tide:ring_used_bytes
    ring_capacity_bytes=vllm_tide:ring_capacity_bytes
    ring_consumer_alive=vllm_tide:ring_consumer_alive
""")
_LARGEST = named("""
    draft_version=vllm_tide:draft_version
    last_swap_seconds=vllm_tide:last_swap_seconds
    capture_on=vllm_tide:capture_on
""")
_PER_SECOND = named("""
    tokens_per_s=vllm:generation_tokens_total
    prompt_tokens_per_s=vllm:prompt_tokens_total
    captured_rows_per_s=vllm_tide:captured_rows_total
""")


def make_picture(history: Sequence[Sample], run_dir: str) -> Json:
    """Return all figures from the samples of the last seconds, oldest first."""
    now = history[-1]
    # Also a silent one: a step on a busy machine may take long.
    alive = [trainer for trainer in now.trainers if trainer["state"] not in ENDED]
    return {
        "unix_s": now.unix_s,
        "run_dir": run_dir,
        "helping": _verdicts(history, alive),
        "servers": [server_figures(history, url) for url in now.pages],
        "engines": now.engines,
        "trainers": now.trainers,
    }


def is_empty(picture: Json) -> bool:
    """Return whether there is no engine, trainer or server."""
    return (
        all(server["error"] for server in picture["servers"])
        and not any(engine["alive"] for engine in picture["engines"])
        and not any(map(is_running, picture["trainers"]))
    )


def is_running(trainer: Json) -> bool:
    """Return whether a trainer runs, by its status file."""
    return not trainer["silent"] and trainer["state"] not in ENDED


def verdict(history: Sequence[Sample], url: str, trainer: Json | None) -> Json:
    """Return the verdict on adaptation at a server; `helps` is None if unknown.

    Based on the canary's comparison of the last two drafts. The text also has the speed
    over plain decoding and the acceptance length.
    """
    page, grown = _window(history, url)
    if page is EMPTY:
        reason = history[-1].pages.get(url, "was not read")
        text = f"No metrics: the server {reason}."
        return {"name": url, "helps": None, "sentence": text}
    version = page.value(_LARGEST["draft_version"], max)
    if version is None:
        return _verdict(url, None, "tide is not configured on this server")
    length, speed = _length(grown), _ratio(grown, *_PLAIN_OVER_MEASURED)
    proposals, accepted = (grown.value(name) or 0.0 for name in _MEMORY)
    off, share = _off(grown)
    known = [f"{speed:.2f}x of plain decoding over {grown.t_s:.0f} s"] if speed else []
    known += [f"{length:.2f} tokens per verify step"] if length else []
    if share is not None and share >= _MOSTLY:
        why = ", ".join(f"{name} {count:.0f}" for name, count in off.items() if count)
        if not proposals:
            text = f"drafting is off in {share:.0%} of steps ({why})"
            return _decided(url, False, text, grown)
        text = (
            f"now the draft is off in {share:.0%} of steps ({why}); the memory drafts, "
            f"{1 + accepted / proposals:.2f} tokens in its steps"
        )
        return _verdict(url, None, text)
    if proposals:
        known += [f"{1 + accepted / proposals:.2f} in steps that the memory drafts"]
    running = page.value("vllm:num_requests_running")
    still = grown.value("vllm:generation_tokens_total") == 0
    if running and still and grown.t_s >= _DECIDES_S:  # longer than usual prefills
        text = f"no token in {grown.t_s:.0f} s, while {running:.0f} requests run"
        return _verdict(url, None, f"{text}: the server is very busy or hangs")
    if not known:
        when = "recently" if page.value(_DRAFTS) else "yet"
        return _verdict(url, None, f"nothing drafted {when}")
    faster, figures = speed is not None and speed > 1.0, ", ".join(known)
    if not version:
        text = f"{figures}; no draft trained here is served"
        return _decided(url, None if speed is None else faster, text, grown)
    helps, comparison = _last_swap(trainer)
    helps = helps and (faster or speed is None)
    return _decided(url, helps, f"{figures}; {comparison}", grown)


def server_figures(history: Sequence[Sample], url: str) -> Json:
    """Return the figures of a server over the last seconds; None on an `error`.

    `acceptance_length` is vLLM's: 1 + accepted / drafts, with the bonus token, without
    drafts of the memory; `draft_depth` is draft passes per step; `off_share` is a share
    of steps; `faults` and `refused_drafts` are totals. `memory_length` is tokens per
    step with a proposal of the memory.
    """
    page, grown = _window(history, url, _RATES_S)
    newest = history[-1].pages.get(url, "not read")
    steps = grown.value(_STEPS)
    proposals, from_memory = (grown.value(name) for name in _MEMORY)
    dropped = grown.by_label("vllm_tide:dropped_rows_total", "reason")
    rates = {k: grown.value(name) for k, name in _PER_SECOND.items()}
    # Draft passes of control, averaged over the window; else vLLM's draft tokens.
    drafted = (_DRAFT_PASSES, _STEPS) if steps else (_DRAFT_TOKENS, _DRAFTS)
    depth = _ratio(grown, *drafted)
    figures: Json = {
        "url": url,
        "error": newest if isinstance(newest, str) else "",
        "models": page.models(),
        "seconds": grown.t_s,
        **{k: v and v / grown.t_s for k, v in rates.items()},
        **{k: page.value(name) for k, name in _SUMS.items()},
        **{k: page.value(name, max) for k, name in _LARGEST.items()},
        "acceptance_length": _length(grown),
        "draft_depth": depth,
        "speed": _ratio(grown, *_PLAIN_OVER_MEASURED) if depth else None,
        "off_share": _off(grown)[1],
        "memory_proposals_per_s": proposals / grown.t_s if proposals else None,
        "memory_length": 1 + (from_memory or 0) / proposals if proposals else None,
        "refused_drafts": page.by_label("vllm_tide:refused_drafts_total", "reason"),
        "dropped_rows_per_s": {k: v / grown.t_s for k, v in dropped.items() if v},
        "faults": page.by_label("vllm_tide:faults_total", "reason"),
    }
    figures["tide"] = figures["draft_version"] is not None
    if (alive := figures["ring_consumer_alive"]) is not None:
        figures["ring_consumer_alive"] = alive > 0
    return figures


def _verdicts(history: Sequence[Sample], trainers: list[Json]) -> list[Json]:
    """Return the verdict on each server, or on each trainer without --url."""
    if not history[-1].pages:
        return [_verdict(each["name"], *_last_swap(each)) for each in trainers]
    verdicts = []
    for url, page in history[-1].pages.items():
        models = page.models() if isinstance(page, Page) else []
        own = (each for each in trainers if each["model_name"] in models)
        verdicts.append(verdict(history, url, next(own, None)))
    return verdicts


def _last_swap(trainer: Json | None) -> tuple[bool | None, str]:
    """Return whether the last swap helped, and the canary's measurement."""
    if trainer is None:
        return None, "no trainer of this model reports in the run directory"
    change, error = trainer["speed_change"], trainer["speed_error"]
    figures = (trainer["speed_before"], trainer["speed_after"], change, error)
    if not all(isinstance(figure, int | float) for figure in figures):
        return None, "the served draft has not been compared with its predecessor"
    before, after = trainer["speed_before"], trainer["speed_after"]
    text = (
        f"the last swap, without the memory's steps: {before:.2f}x -> {after:.2f}x of "
        f"plain decoding ({change:+.0%} +- {error:.0%}, "
        f"{trainer['speed_requests'] or 0} requests)"
    )
    if trainer["canary_undecided"]:
        return None, f"undecided, {text}"
    if abs(change) <= error:
        return None, f"no clear difference, {text}"
    return change > 0, text


def _decided(url: str, helps: bool | None, text: str, grown: Page) -> Json:
    if helps is not None and grown.t_s < _DECIDES_S:
        helps, text = None, f"measured for {grown.t_s:.0f} s only; {text}"
    return _verdict(url, helps, text)


def _verdict(name: str, helps: bool | None, text: str) -> Json:
    label = {True: "Helps", False: "Does not help yet", None: "Unknown"}[helps]
    return {"name": name, "helps": helps, "sentence": f"{label}: {text}."}


def _window(
    history: Sequence[Sample], url: str, longest_s: float = math.inf
) -> tuple[Page, Page]:
    """Return the newest page and its growth, both empty if unknown.

    A gap or a restart (a decreased total) begins a new window.

    Args:
        longest_s: Longest window, if it has an older page at all (s).
    """
    pages = [sample.pages.get(url) for sample in history]
    now = pages.pop()
    if not isinstance(now, Page):
        return EMPTY, EMPTY
    oldest = now
    for page in reversed(pages):
        if not isinstance(page, Page) or oldest.restarted(page):
            break
        if oldest is not now and now.t_s - page.t_s > longest_s:
            break
        oldest = page
    return now, EMPTY if oldest is now else now.since(oldest)


def _off(page: Page) -> tuple[dict[str, float], float | None]:
    """Return the steps without any drafts by reason, and their share of all steps.

    Steps with proposals of the memory are not among them.
    """
    off, steps = page.by_label(_OFF, "reason"), page.value(_STEPS)
    off.pop("memory", None)
    return off, sum(off.values()) / steps if steps else None


def _ratio(page: Page, name: str, of: str) -> float | None:
    """Return the ratio of two values; None if one is missing or the second is 0."""
    value, total = page.value(name), page.value(of)
    return value / total if total and value is not None else None


def _length(page: Page) -> float | None:
    """Return the acceptance length without the memory's drafts, which vLLM counts."""
    drafts, accepted = page.value(_DRAFTS), page.value(_ACCEPTED)
    # Without a draft pass, only drafts of earlier passes and of the memory are counted.
    if not drafts or accepted is None or page.value(_DRAFT_PASSES) == 0:
        return None
    proposals, from_memory = (page.value(name) or 0.0 for name in _MEMORY)
    drafts -= proposals
    # The counters are of slightly different times: a small remainder is no measurement.
    few = max(1.0, _FEW_DRAFTS * proposals)
    return 1 + max(accepted - from_memory, 0.0) / drafts if drafts >= few else None
