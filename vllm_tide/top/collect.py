"""Samples of servers, engines and trainers over the last seconds, for rates.

Read-only: claims and maps no segment, writes no file.
"""

from __future__ import annotations

import http.client
import json
import math
import time
import urllib.error
import urllib.request
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from vllm_tide.transport.rendezvous import inspect_manifests, is_live, is_spooled
from vllm_tide.transport.ring import peek_ring
from vllm_tide.transport.shm import MALFORMED
from vllm_tide.transport.versions import number_of
from vllm_tide.transport.weights import peek_weights

WINDOW_S = 30.0
"""Samples of this time (s) are kept, at least two."""

SILENT_S = 10.0
"""Age (s) at which a status is silent; trainers write every second, or per step."""
ENDED = ("stopped", "engine_gone")
OLD_S = 3600.0
"""Age (s) at which a trainer's status file is not shown."""

_READ = ("vllm_tide:", "vllm:")
_TOTALS = ("vllm:generation_tokens_total", "vllm:prompt_tokens_total")
_PAGE_S = 3.0
_MOST_BYTES = 16 << 20

_DAMAGE = (IndexError, OSError, *MALFORMED)

Json = dict[str, Any]
Labels = tuple[tuple[str, str], ...]


def named(table: str) -> dict[str, str]:
    """Parse items `name` or `name=source` into sources of figures by name."""
    items = (item.partition("=") for item in table.split())
    return {name: source or name for name, _, source in items}


# Figures of a trainer: fields of its status and of the status's `canary`
_STATUS = named("""
    pid state model_name cycles steps loss rows_read train_tokens last_decision
    holdout_acceptance_new holdout_acceptance_live published_version installed_version
    refused_versions rollbacks waiting_for
""")
_CANARY = named("""
    canary_undecided=undecided backoff_cycles speed_before speed_after
    speed_change=change speed_error=error speed_requests=requests
""")
# Figures of an engine, by source
_MANIFEST = named("engine_id pid num_speculative_tokens")
_RING = named("""
    ring_used_bytes=used_bytes ring_capacity_bytes=capacity_bytes
    ring_consumer_alive=consumer_alive corrupt_records written_rows dropped_rows
""")
_FEEDBACK = named("""
    installed_version refused_version refused_reason swap_pause_ms=swap_pause_ms_last
""")


@dataclass(frozen=True, slots=True)
class Page:
    """Samples of a `/metrics` page, or their growth.

    Attributes:
        t_s: Time of reading (monotonic), or duration of the growth.
        values: Finite values by sample name and sorted labels.
    """

    t_s: float
    values: Mapping[tuple[str, Labels], float]

    def value(
        self, name: str, of: Callable[[Iterable[float]], float] = sum
    ) -> float | None:
        """Sum (or reduce by `of`) a metric over all labels; None if not exported."""
        values = [v for (sample, _), v in self.values.items() if sample == name]
        return of(values) if values else None

    def by_label(self, name: str, label: str) -> dict[str, float]:
        sums: dict[str, float] = defaultdict(float)
        for (sample, labels), value in self.values.items():
            if sample == name and (key := dict(labels).get(label)):
                sums[key] += value
        return sums

    def models(self) -> list[str]:
        names = {dict(labels).get("model_name", "") for _, labels in self.values}
        return sorted(names - {""})

    def since(self, before: Page) -> Page:
        """Return the growth of every counter."""
        old = before.values
        grown = {k: max(0.0, v - old.get(k, 0.0)) for k, v in self.values.items()}
        return Page(self.t_s - before.t_s, grown)

    def restarted(self, before: Page) -> bool:
        """Return whether a total decreased since the page before."""
        return any((self.value(n) or 0) < (before.value(n) or 0) for n in _TOTALS)


EMPTY = Page(0.0, {})


def parse_address(text: str) -> str:
    """Return the base URL of "host:port" or of a URL, without credentials.

    Raises:
        ValueError: Not an http address.
    """
    parts = urlsplit(text if "://" in text else f"http://{text}")
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
        raise ValueError(text)
    place, path = parts.netloc.rpartition("@")[2], parts.path.rstrip("/")
    return f"{parts.scheme}://{place}{path.removesuffix('/metrics')}"


def fetch(url: str, seconds: float = _PAGE_S) -> Page | str:
    """Fetch the page of a server, or return the reason of a failure."""
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
    """Parse a Prometheus text exposition without buckets, or return a reason."""
    from prometheus_client.parser import text_string_to_metric_families

    values: dict[tuple[str, Labels], float] = {}
    # Parsing is slow, so skip the lines that are not needed.
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
        return "answers without metrics"
    return Page(t_s, values) if values else "answers without metrics of vLLM"


def read_engines(run_dir: Path) -> list[Json]:
    """Read the figures of all announced engines, also dead ones, oldest first.

    Figures of ring and weights are None without capture or swaps, or if the segment is
    gone.
    """
    engines = []
    manifests = [(p, m) for p, m in inspect_manifests(run_dir) if m is not None]
    for path, manifest in sorted(manifests, key=lambda pair: pair[1].created_unix):
        weights = peek_weights(str(manifest.weights))
        figures = {
            **_read(manifest, _MANIFEST),
            **_read(peek_ring(str(manifest.ring)), _RING),
            **_read(weights and weights.feedback, _FEEDBACK),
            "published_version": weights and number_of(weights.latest_version),
            "alive": is_live(path),
            "target": Path(str(manifest.target_path)).name,
            "draft": _draft_name(Path(str(manifest.draft_path))),
            "policy": _policy(manifest.tide),
            "spool": is_spooled(manifest),
        }
        for name in ("installed_version", "refused_version"):
            if figures[name] is not None:
                figures[name] = number_of(figures[name])
        figures["refused_reason"] = figures["refused_reason"] or ""
        engines.append(figures)
    return engines


def _read(source: object, names: dict[str, str]) -> Json:
    return {name: getattr(source, field, None) for name, field in names.items()}


def _draft_name(folder: Path) -> str:
    """Return the folder's name, or "fresh" for a cached fresh draft."""
    return "fresh" if folder.parent.name == "fresh" else folder.name


def _policy(tide: Any) -> str:
    try:
        return str(tide["control"]["policy"])
    except (LookupError, TypeError):
        return ""


def read_trainers(run_dir: Path, engines: Collection[str]) -> list[Json]:
    """Read the figures of the trainers' status files, newest first.

    Left out are files older than `OLD_S`, and trainers of none of the live `engines`
    that were killed, or that ended before these engines began.
    """
    trainers = []
    for path in run_dir.glob("trainer-*.json"):
        try:
            status = json.loads(path.read_text(encoding="utf-8"))
            age_s = max(0.0, time.time() - float(status["updated_unix"]))
            figures = trainer_figures(path.stem[len("trainer-") :], status, age_s)
        except _DAMAGE:
            continue
        served = set(status.get("engines") or ()) & set(engines)
        over = figures["silent"] or engines and status.get("state") in ENDED
        if age_s < OLD_S and (served or not over):
            trainers.append(figures)
    return sorted(trainers, key=lambda trainer: (trainer["age_s"], trainer["name"]))


def trainer_figures(name: str, status: Mapping[str, Any], age_s: float) -> Json:
    """Return the figures of a `TrainerStatus`; a missing one is None."""
    canary, published = status.get("canary") or {}, status.get("last_publish_unix")
    return {
        **{name: status.get(key) for name, key in _STATUS.items()},
        **{name: canary.get(key) for name, key in _CANARY.items()},
        "name": name,
        "age_s": age_s,
        "silent": status.get("state") not in ENDED and age_s > SILENT_S,
        "engines": len(status.get("engines") or ()),
        "seconds_since_publish": published and time.time() - published,
    }


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample.

    Attributes:
        pages: By URL: the page, or the reason of a failure.
    """

    t_s: float
    unix_s: float
    pages: dict[str, Page | str]
    engines: list[Json]
    trainers: list[Json]


class Sampler:
    """Takes samples and stores those of the last seconds.

    Args:
        run_dir: Run directory; may be absent.

    Attributes:
        history: Samples, oldest first.
    """

    def __init__(self, run_dir: Path, urls: Sequence[str]) -> None:
        self.run_dir = run_dir
        self.urls = urls
        self.history: deque[Sample] = deque()

    def take(self) -> None:
        """Take a sample; invalid data of a server or file do not raise."""
        with ThreadPoolExecutor() as pool:
            pages = dict(zip(self.urls, pool.map(fetch, self.urls), strict=True))
        engines = read_engines(self.run_dir)
        alive = [engine["engine_id"] for engine in engines if engine["alive"]]
        trainers = read_trainers(self.run_dir, alive)
        now = time.monotonic()
        self.history.append(Sample(now, time.time(), pages, engines, trainers))
        # Keep the oldest until the next one covers the window.
        while len(self.history) > 2 and now - self.history[1].t_s >= WINDOW_S:
            self.history.popleft()
