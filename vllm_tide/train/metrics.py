"""The trainer's own Prometheus endpoint: the figures of its status file.

Serving is seen on the server's `/metrics`, training here (`tide.train.metrics_port`):
the trainer may be on another host, and outlives servers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from vllm_tide.train.status import TrainerStatus

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

logger = logging.getLogger("vllm_tide.train")

LABELS = ("model_name",)
Family = CounterMetricFamily | GaugeMetricFamily

# name -> (help, field of the status)
COUNTERS = {
    "vllm_tide:trainer_cycles": ("Training cycles finished.", "cycles"),
    "vllm_tide:trainer_steps": ("Optimizer steps.", "steps"),
    "vllm_tide:trainer_tokens": ("Tokens trained on.", "train_tokens"),
    "vllm_tide:trainer_rows_read": ("Rows read from the engines.", "rows_read"),
    "vllm_tide:trainer_requests": ("Served requests followed.", "requests"),
    "vllm_tide:trainer_seconds": (
        "Time in training cycles, evaluations included (seconds).",
        "training_seconds",
    ),
    "vllm_tide:trainer_publications": ("Heads published.", "publications"),
    "vllm_tide:trainer_rollbacks": ("Heads taken back by the canary.", "rollbacks"),
    "vllm_tide:trainer_refused": ("Heads that no engine took.", "refused_versions"),
    "vllm_tide:trainer_out_of_memory": (
        "Training cycles that the trainer's device had no memory for.",
        "out_of_memory",
    ),
    "vllm_tide:trainer_failed_writes": (
        "Status files and events that could not be written.",
        "failed_writes",
    ),
}
GAUGES = {
    "vllm_tide:trainer_loss": ("Loss of the last optimizer step.", "loss"),
    "vllm_tide:trainer_holdout_acceptance_new": (
        "Held-out acceptance length of the candidate (tokens).",
        "holdout_acceptance_new",
    ),
    "vllm_tide:trainer_holdout_acceptance_live": (
        "Held-out acceptance length of the head served then (tokens).",
        "holdout_acceptance_live",
    ),
    "vllm_tide:trainer_published_version": (
        "Newest head published.",
        "published_version",
    ),
    "vllm_tide:trainer_installed_version": (
        "Newest head that an engine serves.",
        "installed_version",
    ),
    "vllm_tide:trainer_last_publication_timestamp_seconds": (
        "Unix time of the newest publication (seconds).",
        "last_publish_unix",
    ),
    "vllm_tide:trainer_packing_waste": (
        "Share of batch rows that stayed empty (0 to 1).",
        "packing_waste",
    ),
}
SCHEDULE = {
    "vllm_tide:trainer_collecting": ("1 while engines send full rows.", "collecting"),
    "vllm_tide:trainer_short_average": (
        "Short average of the accepted share of drafted tokens.",
        "short",
    ),
    "vllm_tide:trainer_long_average": (
        "Long average of the accepted share of drafted tokens.",
        "long",
    ),
}
SCHEDULE_COUNTERS = {
    "vllm_tide:trainer_shifts": ("Shifts of the traffic seen.", "shifts"),
    "vllm_tide:trainer_pauses": ("Times that training was paused.", "pauses"),
}
ENGINE_VERSION = (
    "vllm_tide:trainer_engine_version",
    "Head that each engine serves, in the trainer's numbers.",
)


class StatusCollector(Collector):
    """Turns a status into metric families when it is scraped.

    Args:
        status: Gives the current one.
    """

    def __init__(self, status: Callable[[], TrainerStatus]) -> None:
        self._status = status

    def collect(self) -> Iterable[Family]:
        """See `prometheus_client`."""
        status = self._status()
        model = status.model_name
        schedule = dict(status.schedule)  # replaced as a whole by the trainer's thread
        for name, (text, key) in COUNTERS.items():
            yield _counter(name, text, model, getattr(status, key))
        for name, (text, key) in GAUGES.items():
            yield _gauge(name, text, model, getattr(status, key))
        for name, (text, key) in SCHEDULE.items():
            yield _gauge(name, text, model, schedule.get(key))
        for name, (text, key) in SCHEDULE_COUNTERS.items():
            yield _counter(name, text, model, schedule.get(key, 0))
        engines = GaugeMetricFamily(*ENGINE_VERSION, labels=[*LABELS, "engine_id"])
        for engine, told in dict(status.engines).items():
            engines.add_metric([model, engine], told["installed"])
        yield engines


def _counter(name: str, text: str, model: str, value: float) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=LABELS)
    family.add_metric([model], float(value))
    return family


def _gauge(name: str, text: str, model: str, value: float | None) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=LABELS)
    if value is not None:
        family.add_metric([model], float(value))
    return family


def open_metrics(
    port: int, status: Callable[[], TrainerStatus], host: str = "127.0.0.1"
) -> None:
    """Serve `/metrics` from a daemon thread.

    Args:
        port: 0 does nothing.
        status: Gives the current status.
        host: Address to listen on.
    """
    if not port:
        return
    registry = CollectorRegistry()
    registry.register(StatusCollector(status))
    try:
        server, _ = start_http_server(port, host, registry)
    except OSError as error:
        logger.error(
            "tide.train.metrics_port: %d cannot be opened on tide.train.metrics_host "
            "%s (%s); choose another.",
            port,
            host,
            error.strerror,
        )
        return
    app = server.get_app()
    if app is not None:
        server.set_app(plain_text(app))


def plain_text(app: WSGIApplication) -> WSGIApplication:
    """`app` in Prometheus' text format, whatever its reader prefers.

    Prometheus prefers OpenMetrics, in which prometheus_client 0.26 writes an underscore
    for the colon of a sample's name. vLLM's own `/metrics` is plain text too.
    """

    def plain(
        environ: WSGIEnvironment, start_response: StartResponse
    ) -> Iterable[bytes]:
        environ["HTTP_ACCEPT"] = "text/plain"
        return app(environ, start_response)

    return plain
