"""Readings of servers, engines and trainers, kept for some seconds: a rate needs two.

Looks on and changes nothing: no segment is claimed or mapped, no file is written.
"""

from __future__ import annotations

import http.client
import json
import math
import time
import urllib.error
import urllib.request
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from vllm_tide.transport.rendezvous import inspect_manifests
from vllm_tide.transport.ring import RingStats, peek_ring
from vllm_tide.transport.weights import peek_weights

WINDOW_S = 10.0
"""Rates are means over this time (s), or over one interval where that is longer."""

SILENT_S = 10.0
"""A trainer writes every second, in a long step less often."""
ENDED = ("stopped", "engine_gone")

_READ = ("vllm_tide:", "vllm:")
_TOTALS = ("vllm:generation_tokens_total", "vllm:prompt_tokens_total")
_VERSION = "vllm_tide:draft_version"
_PAGE_S = 3.0
_MOST_BYTES = 16 << 20

Json = dict[str, Any]
Labels = tuple[tuple[str, str], ...]


def named(table: str) -> dict[str, str]:
    """Sources of figures by name, of words `name` or `name=source`."""
    words = (word.partition("=") for word in table.split())
    return {name: source or name for name, _, source in words}


# Figures of a trainer and the fields of its status, by type
_TEXTS = named("""
    state model_name last_decision waiting_for schedule_mode=schedule.mode
    schedule_reason=schedule.reason
""")
_NUMBERS = named("""
    loss holdout_acceptance_new holdout_acceptance_live short_average=schedule.short
    long_average=schedule.long speed_before=canary.speed_before
    speed_after=canary.speed_after speed_change=canary.change speed_error=canary.error
""")
_COUNTS = named("""
    pid cycles steps rows_read train_tokens published_version installed_version
    refused_versions publications rollbacks shifts=schedule.shifts
    canary_requests=canary.requests backoff_cycles=canary.backoff_cycles
""")
# Figures of an engine, and what they are read of
_MANIFEST = named("engine_id pid num_speculative_tokens")
_RING = named("""
    ring_used_bytes=used_bytes ring_capacity_bytes=capacity_bytes
    ring_consumer_alive=consumer_alive corrupt_records
""")
_FEEDBACK = named("""
    installed_version refused_version refused_reason swap_pause_ms=swap_pause_ms_last
""")


@dataclass(frozen=True, slots=True)
class Page:
    """Samples of a `/metrics`, or how much they grew.

    Attributes:
        t_s: When it was read (monotonic clock), or the time that it grew in.
        values: Finite values by sample name and sorted labels.
    """

    t_s: float
    values: Mapping[tuple[str, Labels], float]

    def value(
        self, name: str, of: Callable[[Iterable[float]], float] = sum
    ) -> float | None:
        """Sum (or another reduction) over all labels; None if it is not exported."""
        values = [v for (sample, _), v in self.values.items() if sample == name]
        return of(values) if values else None

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """Sums by the values of one label."""
        sums: dict[str, float] = defaultdict(float)
        for (sample, labels), value in self.values.items():
            if sample == name and (key := dict(labels).get(label)):
                sums[key] += value
        return sums

    def models(self) -> list[str]:
        """Names of the models served."""
        names = {dict(labels).get("model_name", "") for _, labels in self.values}
        return sorted(names - {""})

    def since(self, before: Page) -> Page:
        """Growth of every counter."""
        old = before.values
        grown = {k: max(0.0, v - old.get(k, 0.0)) for k, v in self.values.items()}
        return Page(self.t_s - before.t_s, grown)

    def restarted(self, before: Page) -> bool:
        """True if a total fell since the page before."""
        return any((self.value(n) or 0) < (before.value(n) or 0) for n in _TOTALS)


EMPTY = Page(0.0, {})


def parse_address(text: str) -> str:
    """URL of "host:port" or a URL, with or without "/metrics"; without a password.

    Raises:
        ValueError: It is neither.
    """
    parts = urlsplit(text if "://" in text else f"http://{text}")
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
        raise ValueError(text)
    place, path = parts.netloc.rpartition("@")[2], parts.path.rstrip("/")
    return f"{parts.scheme}://{place}{path.removesuffix('/metrics')}"


def fetch(url: str, seconds: float = _PAGE_S) -> Page | str:
    """Page of a server, or why there is none."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{url}/metrics", timeout=seconds) as answer:
            text = answer.read(_MOST_BYTES).decode("utf-8", "replace")
    except urllib.error.HTTPError as error:
        return f"answers {error.code} {error.reason}"
    except (OSError, UnicodeError, http.client.HTTPException) as error:
        cause = getattr(error, "reason", error)
        why = getattr(cause, "strerror", None) or type(cause).__name__
        return f"does not answer ({why})"
    return parse_page(text, time.monotonic())


def parse_page(text: str, t_s: float) -> Page | str:
    """Page of a Prometheus text exposition, or why it is none; without buckets."""
    from prometheus_client.parser import text_string_to_metric_families

    values: dict[tuple[str, Labels], float] = {}
    # Parsing is slow, and most of the page is of no interest here.
    lines = [
        line
        for line in text.splitlines()
        if line.removeprefix("# TYPE ").startswith(_READ) and "_bucket{" not in line
    ]
    try:
        for family in text_string_to_metric_families("\n".join(lines) + "\n"):
            for sample in family.samples:
                if math.isfinite(sample.value):
                    labels = tuple(sorted(sample.labels.items()))
                    values[sample.name, labels] = float(sample.value)
    except (ValueError, IndexError, KeyError):
        return "answers with no metrics"
    return Page(t_s, values) if values else "answers with no metrics of vLLM"


def look_at_engines(run_dir: Path) -> list[tuple[str, RingStats | None, Json]]:
    """Name of the ring, its counters and figures of each announced engine.

    Oldest first, dead ones too; `alive` is None where its pid cannot be looked up, and
    the rest where there is no capture, there are no swaps, or they are gone.
    """
    looks = []
    manifests = [m for _, m in inspect_manifests(run_dir) if m is not None]
    for manifest in sorted(manifests, key=lambda m: m.created_unix):
        ring = peek_ring(str(manifest.ring))
        weights = peek_weights(str(manifest.weights))
        feedback = weights and weights.feedback
        figures = {
            **_read(manifest, _MANIFEST),
            **_read(ring, _RING),
            **_read(feedback, _FEEDBACK),
            "published_version": weights and weights.latest_version,
            "alive": manifest.owner_alive(),
            "target": Path(str(manifest.target_path)).name,
            "draft": Path(str(manifest.draft_path)).name,
            "policy": _policy(manifest.tide),
        }
        figures["refused_reason"] = figures["refused_reason"] or ""
        looks.append((manifest.ring, ring, figures))
    return looks


def _read(source: object, names: dict[str, str]) -> Json:
    return {name: getattr(source, field, None) for name, field in names.items()}


def _policy(tide: Any) -> str:
    try:
        return str(tide["control"]["policy"])
    except (LookupError, TypeError):
        return ""


def look_at_trainers(run_dir: Path) -> list[Json]:
    """Figures of the trainers' status files, the newest first."""
    looks = []
    for path in run_dir.glob("trainer-*.json"):
        try:
            status = json.loads(path.read_text(encoding="utf-8"), parse_int=float)
            age_s = max(0.0, time.time() - float(status["updated_unix"]))
        except (LookupError, OSError, RecursionError, TypeError, ValueError):
            continue
        if math.isfinite(age_s):
            looks.append(trainer_figures(path.stem[len("trainer-") :], status, age_s))
    return sorted(looks, key=lambda look: (look["age_s"], look["name"]))


def trainer_figures(name: str, status: Mapping[str, Any], age_s: float) -> Json:
    """Figures of a `TrainerStatus`; one of the wrong type counts as missing."""
    flat = dict(status)
    for part in ("schedule", "canary"):
        if isinstance(fields := status.get(part), dict):
            flat |= {f"{part}.{key}": value for key, value in fields.items()}

    def find(field: str, *kinds: type) -> Any:
        value: Any = flat.get(field)
        if type(value) not in kinds or float in kinds and not math.isfinite(value):
            return None
        return value

    published = find("last_publish_unix", int, float)
    state = find("state", str) or "unknown"
    return {
        **{name: int(find(key, int, float) or 0) for name, key in _COUNTS.items()},
        **{name: find(key, int, float) for name, key in _NUMBERS.items()},
        **{name: find(key, str) or "" for name, key in _TEXTS.items()},
        "name": name,
        "state": state,
        "age_s": age_s,
        "silent": state not in ENDED and age_s > SILENT_S,
        "engines": len(find("engines", dict) or ()),
        "collecting": find("schedule.collecting", bool) or False,
        "canary_undecided": find("canary.undecided", bool) or False,
        "seconds_since_publish": published and time.time() - published,
    }


@dataclass(frozen=True, slots=True)
class Sample:
    """One moment.

    Attributes:
        t_s: Monotonic clock.
        pages: By URL: the page, or why there is none.
        first_pages: By URL: last page of the server's run that was seen while it still
            served the draft that it began with.
    """

    t_s: float
    unix_s: float
    pages: dict[str, Page | str]
    engines: list[tuple[str, RingStats | None, Json]]
    trainers: list[Json]
    first_pages: dict[str, Page] = field(default_factory=dict)


class Sampler:
    """Looks at everything and remembers.

    Args:
        run_dir: Run directory; need not exist, now or later.
        urls: Servers.

    Attributes:
        history: Samples of the last seconds, oldest first.
    """

    def __init__(self, run_dir: Path, urls: Sequence[str]) -> None:
        self.run_dir = run_dir
        self.urls = urls
        self.history: deque[Sample] = deque()
        self._first: dict[str, Page] = {}

    def take(self) -> None:
        """Looks now; never raises for what the watched do."""
        with ThreadPoolExecutor() as pool:
            pages = dict(zip(self.urls, pool.map(fetch, self.urls), strict=True))
        for url, page in pages.items():
            if isinstance(page, str):
                continue
            if page.value(_VERSION, max) == 0:
                self._first[url] = page
            elif url in self._first and page.restarted(self._first[url]):
                del self._first[url]
        engines, trainers = (
            look_at_engines(self.run_dir),
            look_at_trainers(self.run_dir),
        )
        now = time.monotonic()
        first = dict(self._first)
        self.history.append(Sample(now, time.time(), pages, engines, trainers, first))
        # The oldest stays until the next is old enough to stand for the window.
        while len(self.history) > 2 and now - self.history[1].t_s >= WINDOW_S:
            self.history.popleft()
