"""Readings of a server's `/metrics`.

Values of one metric are summed over the labels `model_name` and `engine` (there is one
engine) and separated by every other label (`reason`, `le`).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

# Names without the "_total" suffix that Prometheus adds to counters.
DRAFTS = "vllm:spec_decode_num_drafts"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens"
RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
GENERATED = "vllm:generation_tokens"
SWAPS = "vllm_tide:swaps"
SWAP_SECONDS = "vllm_tide:swap_seconds"
LAST_SWAP = "vllm_tide:last_swap_seconds"
LONGEST_SWAP = "vllm_tide:longest_swap_seconds"
DRAFT_VERSION = "vllm_tide:draft_version"
_PREFIXES = (
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
        matches = [
            number
            for (sample, _), number in self.values.items()
            if sample in (name, name + "_total")
        ]
        return sum(matches) if matches else default

    def has(self, name: str) -> bool:
        names = (name, name + "_total", name + "_count")
        return any(sample in names for sample, _ in self.values)

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
    # The parser is slow and shares the engine's cores, so it gets only these lines.
    selected = "\n".join(
        line
        for line in text.splitlines()
        if line.removeprefix("# HELP ").removeprefix("# TYPE ").startswith(_PREFIXES)
    )
    for family in text_string_to_metric_families(selected + "\n"):
        if not family.name.startswith(_PREFIXES):
            continue
        for sample in family.samples:
            # "per position" counters repeat the totals.
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
    """Return an upper estimate of a quantile from cumulative buckets; NaN if empty."""
    total = buckets[-1][1] if buckets else 0.0
    if total <= 0:
        return math.nan
    return next(bound for bound, count in buckets if count >= share * total)


@dataclass(slots=True)
class Scraper:
    """Reader of a server's metrics, periodically and at the edges of segments.

    A reading that fails because the server is busy is skipped and counted.
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
