"""What the server's own counters say about a stretch, and over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .scrape import (
    ACCEPTED,
    DRAFT_TOKENS,
    DRAFTS,
    GENERATED,
    RUNNING,
    WAITING,
    Scrape,
)

TIDE_DRAFTED = "vllm_tide:drafted_tokens"
TIDE_STEPS = "vllm_tide:draft_steps"
TIDE_OFF = "vllm_tide:off_rounds"
TIDE_LENGTH = "vllm_tide:draft_length"
# Capture, swaps and training are off in this benchmark.
_NOT_CONTROL = (
    "vllm_tide:captured_",
    "vllm_tide:dropped_",
    "vllm_tide:refused_",
    "vllm_tide:ring_",
    "vllm_tide:swap",
    "vllm_tide:draft_version",
)


def _grown(name: str, before: Scrape, after: Scrape) -> int | None:
    if not after.has(name):
        return None
    return round(after.value(name) - before.value(name))


def speculation(before: Scrape, after: Scrape) -> dict[str, Any]:
    """Return drafted, verified and accepted tokens between two readings.

    * ``drafted``: tokens the draft model produced, by our counter, or for plain vLLM
      the next; ``verified``: those sent to the target, by vLLM's.
    * ``accepted``: verified tokens that were right.
    * ``rounds``: (request, step) pairs that verified at least one draft token, which
      is what vLLM counts as drafts; ``request_rounds``: all pairs, those without
      speculation included = generated - accepted, since each emits one token more
      than it accepts.
    * ``acceptance_length`` = 1 + accepted / rounds, vLLM's definition.
    * ``*_per_request_round``: the AdaSpec paper's Table 2, rounds without
      speculation counted as zero.

    A counter the server does not export is None. Ours reach the front end twice a
    second and with a step, vLLM's with each: nothing is a ratio of one to the other.
    """
    drafted = _grown(TIDE_DRAFTED, before, after)
    verified = _grown(DRAFT_TOKENS, before, after)
    accepted = _grown(ACCEPTED, before, after)
    rounds = _grown(DRAFTS, before, after)
    generated = round(after.value(GENERATED) - before.value(GENERATED))
    drafted = verified if drafted is None else drafted
    request_rounds = generated - (accepted or 0)

    def per_round(value: int | None) -> float | None:
        if value is None or request_rounds <= 0:
            return None
        return round(value / request_rounds, 4)

    off = {
        reason: round(count - before.by_label(TIDE_OFF, "reason").get(reason, 0.0))
        for reason, count in after.by_label(TIDE_OFF, "reason").items()
    }
    return {
        "drafted": drafted,
        "verified": verified,
        "accepted": accepted,
        "rounds": rounds,
        "request_rounds": request_rounds,
        "acceptance_length": round(1 + (accepted or 0) / rounds, 4) if rounds else None,
        "acceptance_rate": round(accepted / verified, 4)
        if accepted is not None and verified
        else None,
        "drafted_per_request_round": per_round(drafted),
        "verified_per_request_round": per_round(verified),
        "accepted_per_request_round": per_round(accepted),
        "draft_steps": _grown(TIDE_STEPS, before, after),
        "off_rounds": off if after.has(TIDE_OFF) else None,
    }


def tide_values(before: Scrape, after: Scrape) -> dict[str, Any]:
    """Return the ``vllm_tide:`` metrics of a stretch, for the record.

    Counters as they grew, by label value where they have a label (reason, length);
    gauges as they were at the end.
    """
    found: dict[str, Any] = {}
    for (name, labels), value in sorted(after.values.items()):
        if not name.startswith("vllm_tide:") or name.startswith(_NOT_CONTROL):
            continue
        if name.endswith("_total"):
            value -= before.values.get((name, labels), 0.0)
        if labels:
            key = "/".join(text for _, text in labels)
            found.setdefault(name, {})[key] = value
        else:
            found[name] = value
    return found


def time_series(samples: Sequence[Scrape]) -> Mapping[str, list[float | None]]:
    """Return the columns of the length-and-batch plot (the paper's figure 13).

    ``draft_length`` is the engine's gauge; ``length`` is what every arm has: draft
    tokens verified per request and round since the sample before, rounds without
    speculation counted as zero.
    """
    columns: dict[str, list[float | None]] = {
        name: []
        for name in (
            "t_s",
            "running",
            "waiting",
            "draft_length",
            "length",
            "output_tokens_per_s",
        )
    }
    ordered = sorted(samples, key=lambda sample: sample.t_s)
    for before, after in zip(ordered, ordered[1:], strict=False):
        seconds = after.t_s - before.t_s
        generated = after.value(GENERATED) - before.value(GENERATED)
        rounds = generated - (after.value(ACCEPTED) - before.value(ACCEPTED))
        verified = after.value(DRAFT_TOKENS) - before.value(DRAFT_TOKENS)
        gauge = after.value(TIDE_LENGTH) if after.has(TIDE_LENGTH) else None
        columns["t_s"].append(round(after.t_s, 2))
        columns["running"].append(after.value(RUNNING))
        columns["waiting"].append(after.value(WAITING))
        columns["draft_length"].append(gauge)
        columns["length"].append(round(verified / rounds, 3) if rounds > 0 else None)
        columns["output_tokens_per_s"].append(
            round(generated / seconds, 2) if seconds > 0 else None
        )
    return columns
