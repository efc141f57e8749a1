"""OpenTelemetry spans of rare events: swaps, training cycles, decisions of the gate.

Tracing is on if an OTLP endpoint is configured: with vLLM's `--otlp-traces-endpoint`,
which sets it in the environment of its processes and of a trainer they start, or with
OpenTelemetry's variables. Otherwise OpenTelemetry is not imported. Spans contain
numbers and fixed words, never content of a request.

OpenTelemetry sends them in a background thread. This module neither raises nor blocks.
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
# Limits how long a collector that does not respond delays the exit of a process.
_TIMEOUT_S = 5


class Tracing:
    """Sender of spans."""

    def __init__(self, tracer: Any) -> None:
        self._tracer = tracer

    def span(self, name: str, seconds: float, facts: Mapping[str, Any]) -> None:
        """Send a span that ends now.

        Args:
            name: Name such as "swap", without the prefix `vllm_tide.`.
            seconds: Duration (s); 0 for a decision.
            facts: Attributes; values other than numbers, flags and texts are omitted.
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
        except Exception:  # noqa: BLE001 - tracing must not affect serving or training
            logger.exception("vllm_tide: a span was not sent")


@lru_cache(maxsize=1)
def open_tracing(process: str) -> Tracing | None:
    """Return the tracer of this process; None without a configured endpoint.

    If vLLM has set up a provider in this process it is used, so that all spans have one
    resource; otherwise a new one is created.
    """
    if not (os.environ.get(_ENDPOINT) or os.environ.get(_GENERAL)):
        return None
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    try:
        return Tracing(_provider(process).get_tracer(PREFIX))
    except Exception as error:  # noqa: BLE001 - serving and training do not need it
        logger.warning("vllm_tide: no traces are sent: %s", error)
        return None


def _provider(process: str) -> Any:
    from opentelemetry import trace
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    existing = trace.get_tracer_provider()
    if isinstance(existing, TracerProvider):
        return existing
    facts: dict[str, Any] = {f"{PREFIX}.process": process, "process.pid": os.getpid()}
    if "OTEL_SERVICE_NAME" not in os.environ:
        facts["service.name"] = PREFIX
    provider = TracerProvider(resource=Resource.create(facts))
    provider.add_span_processor(BatchSpanProcessor(_exporter()))
    return provider


def _exporter() -> Any:
    """Create an exporter with the environment's protocol, or vLLM's default."""
    chosen = [value for name in _PROTOCOLS if (value := os.environ.get(name))]
    protocol = chosen[0] if chosen else "grpc"
    kind = {"grpc": "grpc", "http/protobuf": "http"}.get(protocol)
    if kind is None:
        raise ValueError(
            f"{_PROTOCOLS[0]}: {protocol!r} is not supported; use grpc or http/protobuf"
        )
    # The exporters read the endpoint from the environment, by different rules.
    options: dict[str, Any] = {"timeout": _TIMEOUT_S}
    if kind == "grpc":
        # As in vLLM, `grpc://host` and a bare address are collectors without TLS.
        endpoint = os.environ.get(_ENDPOINT) or os.environ[_GENERAL]
        options["insecure"] = not endpoint.startswith("https://")
    module = import_module(f"opentelemetry.exporter.otlp.proto.{kind}.trace_exporter")
    return module.OTLPSpanExporter(**options)
