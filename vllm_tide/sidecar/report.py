"""Reports of a trainer: status file, event log, and Prometheus metrics.

The server's `/metrics` covers serving; the trainer's (`tide.train.metrics_port`) covers
training, as the trainer may run on another host and longer than a server.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import resource
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, fields
from operator import attrgetter
from pathlib import Path
from socketserver import ThreadingMixIn
from threading import Thread
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from vllm_tide.metrics import PREFIX, TRAINER, TRAINER_LABELS, finite
from vllm_tide.tracing import Tracing
from vllm_tide.transport.rendezvous import write_private
from vllm_tide.transport.shm import sanitize_for_log

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

logger = logging.getLogger("vllm_tide.train")

Family = CounterMetricFamily | GaugeMetricFamily

PERIOD_S = 1.0
"""Minimum interval between writes of the status file (s)."""
MAX_BYTES = 4 << 20
"""Size of the event log (bytes) at which its older half is removed."""
MAX_CONNECTIONS = 16
"""Maximum concurrent connections of the metrics server."""
IDLE_S = 10.0
"""Timeout of an idle connection to the metrics server (s)."""


def _of(source: str, default: Any = 0) -> Any:
    """Create a field that is copied from this attribute of the sidecar."""
    metadata = {"source": source}
    if default is dict:
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class TrainerStatus:
    """Fields of `trainer-<engine_id>.json`; `metrics.TRAINER` describes most of them.

    Attributes:
        state: "starting", "waiting", "training", "stopped" or "engine_gone".
        model_name: Served model name of the first engine.
        waiting_for: Why no draft can be published, or no cycle started, at present;
            empty if there is no reason.
        canary: Evaluation of the newest draft: `speed_before` and `speed_after` a swap
            in tokens per step without drafts, `change`, its `error`, `requests`.
        rollbacks: By the canary or by command.
        origin: Stored or first version of the published draft, if restored.
        tenant_keys: Ids of the keys of the tenant ids in its data.
        engines: Per engine: version published, installed, refused.
        terms: Mean of each loss term over the last step.
        adaptation: Of the fast draft (`tide.test_time.adapt`): `state` "off",
            "waiting", "learning" or "serving", `gain` over its base (tokens per verify
            step), `steps`, and `requests` used for training.
    """

    pid: int = field(default_factory=os.getpid)
    state: str = "starting"
    model_name: str = ""
    cycles: int = _of("trainer.cycles")
    steps: int = _of("trainer.steps")
    loss: float | None = _of("trainer.last_loss", None)
    rows_read: int = _of("trainer.rows_read")
    samples: int = _of("trainer.buffer.num_samples")
    train_tokens: int = _of("trainer.train_tokens")
    packing_waste: float = _of("trainer.packing_waste", 0.0)
    holdout_tokens: int = _of("trainer.buffer.holdout_tokens")
    holdout_acceptance_new: float | None = None
    holdout_acceptance_live: float | None = None
    last_decision: str = ""
    published_version: int = _of("deployment.published")
    installed_version: int = _of("deployment.installed")
    refused_versions: int = _of("deployment.refusals")
    publications: int = _of("deployment.publications")
    rollbacks: int = _of("deployment.canary.all_rollbacks")
    training_seconds: float = _of("training_seconds", 0.0)
    waiting_for: str = _of("deployment.waiting_for", "")
    requests: int = 0
    schedule: dict[str, Any] = field(default_factory=dict)
    canary: dict[str, Any] = field(default_factory=dict)
    engines: dict[str, dict[str, Any]] = field(default_factory=dict)
    feeds: dict[str, dict[str, int]] = field(default_factory=dict)
    terms: dict[str, float] = _of("trainer.last_terms", dict)
    tenant_keys: list[str] = field(default_factory=list)
    last_publish_unix: float | None = _of("deployment.last_publish_unix", None)
    rows_skipped: dict[str, int] = field(default_factory=dict)
    out_of_memory: int = _of("trainer.out_of_memory")
    failed_writes: int = _of("report.failed_writes")
    peak_rss_bytes: int = 0
    updated_unix: float = 0.0
    adaptation: dict[str, Any] = _of("fast.figures", dict)
    origin: str = _of("deployment.origin", "")

    def copy_from(self, sidecar: Any) -> None:
        for each in fields(self):
            if source := each.metadata.get("source"):
                setattr(self, each.name, attrgetter(source)(sidecar))


class Report:
    """Writes status file and event log, mode 0600; a full disk never stops training.

    An event is one line of JSON with numbers and fixed strings, without request data.
    With `tracing`, every event is also a span.
    """

    def __init__(
        self, run_dir: Path, name: str, tracing: Tracing | None = None
    ) -> None:
        self.path = run_dir / f"events-{name}.jsonl"
        self.status_path = run_dir / f"trainer-{name}.json"
        self.failed_writes = 0
        self._tracing = tracing
        self._next = 0.0

    def due(self) -> bool:
        return time.monotonic() >= self._next

    def write(self, status: TrainerStatus) -> None:
        self._next = time.monotonic() + PERIOD_S
        status.updated_unix = time.time()
        usage = resource.getrusage(resource.RUSAGE_SELF)
        status.peak_rss_bytes = usage.ru_maxrss * 1024
        values = finite(asdict(status))
        try:
            write_private(self.status_path, json.dumps(values, indent=1))
        except OSError:
            self.failed_writes += 1

    def add(self, event: str, **facts: Any) -> None:
        """Append one event.

        Args:
            event: cycle, publish, unpublished, rollback, keep, shift, pause, refused,
                joined, left, restored, purge, paused, resumed, adapted, given_back,
                state_dir_shared or not_stored.
            facts: JSON-serialisable; non-finite numbers become null.
        """
        line = {"unix": round(time.time(), 3), "event": event}
        line |= finite(facts)
        if self._tracing is not None:
            self._tracing.span(event, facts.get("seconds", 0.0), facts)
        pairs = (f"{k}={_readable(v)}" for k, v in line.items() if k != "unix")
        logger.info("%s", " ".join(pairs))
        try:
            if self._append((json.dumps(line) + "\n").encode()) > MAX_BYTES:
                self._halve()
        except OSError:
            self.failed_writes += 1

    def _append(self, line: bytes) -> int:
        """Append a complete line or nothing; return the size of the file.

        Raises:
            OSError: The line was not written; a partial write is truncated again.
        """
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            size = os.fstat(fd).st_size
            if size and os.pread(fd, 1, size - 1) != b"\n":  # a partial line
                line = b"\n" + line
            if os.write(fd, line) < len(line):
                os.ftruncate(fd, size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(fd)
        return size + len(line)

    def _halve(self) -> None:
        lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
        write_private(self.path, "".join(lines[len(lines) // 2 :]))


def _readable(value: Any) -> str:
    if isinstance(value, dict):
        pairs = (f"{sanitize_for_log(k)}: {_readable(v)}" for k, v in value.items())
        return f"{{{', '.join(pairs)}}}"
    return f"{value:.4g}" if isinstance(value, float) else sanitize_for_log(value)


class StatusCollector(Collector):
    """Converts the current status to metric families at each scrape."""

    def __init__(self, status: Callable[[], TrainerStatus]) -> None:
        self._status = status

    def collect(self) -> Iterable[Family]:
        status = self._status()
        model = status.model_name
        for metric in TRAINER:
            counts = metric.kind == "counter"
            kind: type[Family] = CounterMetricFamily if counts else GaugeMetricFamily
            labels = [*TRAINER_LABELS, *filter(None, [metric.label])]
            family = kind(PREFIX + metric.name, metric.text, labels=labels)
            name, _, key = metric.source.partition(".")
            value = getattr(status, name)
            if metric.label:  # copy: the trainer's thread replaces it
                for label, figures in dict(value).items():
                    family.add_metric([model, label], figures[key])
            else:
                if key:
                    value = value.get(key, 0 if counts else None)
                if value is not None:
                    family.add_metric([model], float(value))
            yield family


class MetricsHandler(WSGIRequestHandler):
    """Handles one connection, with one request, of the metrics server."""

    timeout = IDLE_S

    def log_message(self, *_: Any) -> None:
        """Suppress the log line of a request."""


class MetricsServer(ThreadingMixIn, WSGIServer):
    """Server with a thread per connection that closes the oldest of too many.

    A scrape takes milliseconds, so the oldest connection is an idle one.
    """

    daemon_threads = True

    def __init__(self, host: str, port: int) -> None:
        self._connections: list[socket.socket] = []
        # Otherwise IPv6 addresses are rejected.
        (self.address_family, *_), *_ = socket.getaddrinfo(host, port)
        super().__init__((host, port), MetricsHandler)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._connections.append(request)
        if len(self._connections) > MAX_CONNECTIONS:
            with contextlib.suppress(OSError):  # already closed
                self._connections.pop(0).shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with contextlib.suppress(ValueError):
            self._connections.remove(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Suppress the traceback of a connection that was closed during a request."""


def open_metrics(
    port: int, status: Callable[[], TrainerStatus], host: str = "127.0.0.1"
) -> None:
    """Serve `/metrics` from a daemon thread; do nothing if the port is 0."""
    if not port:
        return
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)  # memory, CPU time
    registry.register(StatusCollector(status))
    try:
        server = MetricsServer(host, port)
    except OSError as error:
        logger.error(
            "tide.train.metrics_port: %d cannot be opened on tide.train.metrics_host "
            "%s (%s); choose another port.",
            port,
            host,
            error.strerror,
        )
        return
    server.set_app(plain_text(make_wsgi_app(registry)))
    Thread(target=server.serve_forever, name="vllm-tide-metrics", daemon=True).start()


def plain_text(app: WSGIApplication) -> WSGIApplication:
    """Wrap `app` so that it returns Prometheus' text format for all clients.

    Prometheus requests OpenMetrics, in which prometheus_client 0.26 replaces the colon
    of a sample name by an underscore. vLLM's `/metrics` also uses the text format.
    """

    def plain(
        environ: WSGIEnvironment, start_response: StartResponse
    ) -> Iterable[bytes]:
        environ["HTTP_ACCEPT"] = "text/plain"
        return app(environ, start_response)

    return plain
