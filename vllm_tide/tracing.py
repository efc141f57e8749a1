"""OpenTelemetry spans of rare events: swaps, training cycles, what the gate decided.

On only where an OTLP endpoint is configured: with vLLM's `--otlp-traces-endpoint`
(which puts it into the environment of its processes, and so of a trainer it starts), or
with OpenTelemetry's own variables. Otherwise nothing is imported, and the cost is one
`is None` per event. Spans carry numbers and fixed words, never content of a request.

OpenTelemetry sends them in a thread of its own; nothing here raises or waits.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from functools import lru_cache
from importlib import import_module
from typing import Any

logger = logging.getLogger("vllm.tide")

PREFIX = "vllm_tide"
_ENDPOINT = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
_GENERAL = "OTEL_EXPORTER_OTLP_ENDPOINT"
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
# A collector that does not answer must not hold up the end of a process for long.
_TIMEOUT_S = 5


class Tracing:
    """Sends spans."""

    def __init__(self, tracer: Any) -> None:
        self._tracer = tracer

    def span(self, name: str, seconds: float, facts: Mapping[str, Any]) -> None:
        """Send something that ends now.

        Args:
            name: Such as "swap"; `vllm_tide.` is put before it.
            seconds: How long it took (s); 0 for a decision.
            facts: Attributes; what is no number, flag or text is left out.
        """
        end_ns = time.time_ns()
        try:
            span = self._tracer.start_span(
                f"{PREFIX}.{name}",
                start_time=end_ns - int(max(seconds, 0.0) * 1e9),
                attributes={
                    f"{PREFIX}.{key}": value
                    for key, value in facts.items()
                    if isinstance(value, bool | int | float | str)
                },
            )
            span.end(end_time=end_ns)
        except Exception:  # noqa: BLE001 - a span is never worth serving or training
            logger.exception("vllm_tide: a span was not sent")


@lru_cache(maxsize=1)
def open_tracing(process: str) -> Tracing | None:
    """Tracer that this process sends spans with; None where no endpoint is configured.

    vLLM's own provider where it set one up in this process, so that spans of both come
    from one resource; else one of ours.
    """
    if not (os.environ.get(_ENDPOINT) or os.environ.get(_GENERAL)):
        return None
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    try:
        return Tracing(_provider(process).get_tracer(PREFIX))
    except Exception as error:  # noqa: BLE001 - neither serving nor training needs it
        logger.warning("vllm_tide: no traces are sent: %s", error)
        return None


def _provider(process: str) -> Any:
    from opentelemetry import trace
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    found = trace.get_tracer_provider()
    if isinstance(found, TracerProvider):
        return found
    told: dict[str, Any] = {f"{PREFIX}.process": process, "process.pid": os.getpid()}
    if "OTEL_SERVICE_NAME" not in os.environ:
        told["service.name"] = PREFIX
    provider = TracerProvider(resource=Resource.create(told))
    provider.add_span_processor(BatchSpanProcessor(_exporter()))
    return provider


def _exporter() -> Any:
    """An exporter; the protocol is vLLM's default unless the environment says so."""
    chosen = [value for name in _PROTOCOLS if (value := os.environ.get(name))]
    protocol = chosen[0] if chosen else "grpc"
    kind = {"grpc": "grpc", "http/protobuf": "http"}.get(protocol)
    if kind is None:
        raise ValueError(
            f"{_PROTOCOLS[0]}: {protocol!r} is not supported; use grpc or http/protobuf"
        )
    # The exporters read the endpoint from the environment, each by its own rules.
    options: dict[str, Any] = {"timeout": _TIMEOUT_S}
    if kind == "grpc":
        # As with vLLM `grpc://host` and a bare address are collectors without TLS.
        endpoint = os.environ.get(_ENDPOINT) or os.environ[_GENERAL]
        options["insecure"] = not endpoint.startswith("https://")
    module = import_module(f"opentelemetry.exporter.otlp.proto.{kind}.trace_exporter")
    return module.OTLPSpanExporter(**options)
