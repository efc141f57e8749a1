"""Readings of a server's `/metrics`, and what they say about a stretch of time.

Values of one metric are summed over the labels `model_name` and `engine` (one engine is
served) and kept apart by every other label (`reason`, `le`).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

# Names without the "_total" suffix that prometheus gives to counters.
DRAFTS = "vllm:spec_decode_num_drafts"
DRAFT_TOKENS = "vllm:spec_decode_num_draft_tokens"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens"
RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
GENERATED = "vllm:generation_tokens"
SWAPS = "vllm_tide:swaps"
SWAP_SECONDS = "vllm_tide:swap_seconds"
DRAFT_VERSION = "vllm_tide:draft_version"
_KEPT_PREFIXES = (
    "vllm_tide:",
    "vllm:spec_decode_",
    GENERATED,
    "vllm:num_preemptions",
    RUNNING,
    WAITING,
)
_DROPPED_LABELS = ("model_name", "engine", "position")
_Key = tuple[str, tuple[tuple[str, str], ...]]


@dataclass(frozen=True, slots=True)
class Scrape:
    """One reading of `/metrics`."""

    t_s: float  # seconds since the run's start
    values: dict[_Key, float]  # value by sample name and its remaining labels

    def value(self, name: str, default: float = 0.0) -> float:
        found = [
            number
            for (sample, _), number in self.values.items()
            if sample in (name, name + "_total")
        ]
        return sum(found) if found else default

    def has(self, name: str) -> bool:
        wanted = (name, name + "_total", name + "_count")
        return any(sample in wanted for sample, _ in self.values)

    def by_label(self, name: str, label: str) -> dict[str, float]:
        totals: dict[str, float] = {}
        for (sample, labels), number in self.values.items():
            key = dict(labels).get(label)
            if sample in (name, name + "_total") and key is not None:
                totals[key] = totals.get(key, 0.0) + number
        return totals

    def buckets(self, name: str) -> list[tuple[float, float]]:
        counts = self.by_label(name + "_bucket", "le")
        return sorted((float(bound), count) for bound, count in counts.items())


def parse_metrics(text: str, t_s: float) -> Scrape:
    values: dict[_Key, float] = {}
    # The parser is slow and shares the engine's cores: it gets the kept lines only.
    kept = "\n".join(
        line
        for line in text.splitlines()
        if line.removeprefix("# HELP ")
        .removeprefix("# TYPE ")
        .startswith(_KEPT_PREFIXES)
    )
    for family in text_string_to_metric_families(kept + "\n"):
        if not family.name.startswith(_KEPT_PREFIXES):
            continue
        for sample in family.samples:
            # "per position" counters repeat the totals kept above.
            if sample.name.endswith("_created") or "per_pos" in sample.name:
                continue
            labels = tuple(
                sorted(
                    (key, value)
                    for key, value in sample.labels.items()
                    if key not in _DROPPED_LABELS
                )
            )
            key = (sample.name, labels)
            values[key] = values.get(key, 0.0) + float(sample.value)
    return Scrape(t_s, values)


def bucket_quantile(buckets: list[tuple[float, float]], share: float) -> float:
    """Upper estimate of a quantile from cumulative buckets; NaN if empty."""
    total = buckets[-1][1] if buckets else 0.0
    if total <= 0:
        return math.nan
    return next(bound for bound, count in buckets if count >= share * total)


@dataclass(slots=True)
class Scraper:
    """Samples a server periodically, and on demand at the edges of segments.

    A reading that fails while the server is busy is skipped and counted.
    """

    url: str
    origin_s: float  # time.perf_counter() at the run's start
    period_s: float = 1.0
    samples: list[Scrape] = field(default_factory=list)
    num_failed: int = 0

    async def read(self, session: aiohttp.ClientSession) -> Scrape:
        timeout = aiohttp.ClientTimeout(total=30)
        async with session.get(self.url + "/metrics", timeout=timeout) as response:
            response.raise_for_status()
            text = await response.text()
        sample = parse_metrics(text, time.perf_counter() - self.origin_s)
        self.samples.append(sample)
        return sample

    async def run(
        self, session: aiohttp.ClientSession, on_sample: Callable[[Scrape], None]
    ) -> None:
        while True:
            try:
                on_sample(await self.read(session))
            except (aiohttp.ClientError, TimeoutError):
                self.num_failed += 1
            await asyncio.sleep(self.period_s)


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
    """Drafted, verified and accepted tokens between two readings.

    * `drafted`: tokens the draft model produced, by our counter, or for plain vLLM
      the next; `verified`: those sent to the target, by vLLM's.
    * `accepted`: verified tokens that were right.
    * `rounds`: (request, step) pairs that verified at least one draft token, which
      is what vLLM counts as drafts; `request_rounds`: all pairs, those without
      speculation included = generated - accepted, since each emits one token more
      than it accepts.
    * `acceptance_length` = 1 + accepted / rounds, vLLM's definition.
    * `*_per_request_round`: the AdaSpec paper's Table 2, rounds without
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
    """`vllm_tide:` metrics of a stretch, for the record.

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
    """Columns of the length-and-batch plot (the paper's figure 13).

    `draft_length` is the engine's gauge; `length` is what every arm has: draft
    tokens verified per request and round since the sample before, rounds without
    speculation counted as zero.
    """
    names = (
        "t_s",
        "running",
        "waiting",
        "draft_length",
        "length",
        "output_tokens_per_s",
    )
    columns: dict[str, list[float | None]] = {name: [] for name in names}
    ordered = sorted(samples, key=lambda sample: sample.t_s)
    for before, after in zip(ordered, ordered[1:], strict=False):
        generated, accepted, verified = (
            after.value(name) - before.value(name)
            for name in (GENERATED, ACCEPTED, DRAFT_TOKENS)
        )
        seconds, rounds = after.t_s - before.t_s, generated - accepted
        row = (
            round(after.t_s, 2),
            after.value(RUNNING),
            after.value(WAITING),
            after.value(TIDE_LENGTH) if after.has(TIDE_LENGTH) else None,
            round(verified / rounds, 3) if rounds > 0 else None,
            round(generated / seconds, 2) if seconds > 0 else None,
        )
        for name, value in zip(names, row, strict=True):
            columns[name].append(value)
    return columns
