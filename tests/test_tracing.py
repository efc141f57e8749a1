"""Spans of rare events: sent only where an endpoint is configured."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
)

from vllm_tide import tracing
from vllm_tide.sidecar.report import Report

VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
# A process that sends one of each and ends: spans must be out by then.
SENDER = """
import sys
from pathlib import Path
from vllm_tide.tracing import open_tracing
from vllm_tide.sidecar.report import Report
log = Report(Path(sys.argv[1]), "e", open_tracing("trainer"))
log.add("cycle", cycle=3, seconds=1.5, gain=None, publish=True, reason="better")
log.add("publish", version=2)
"""


@pytest.fixture(autouse=True)
def nothing_configured(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    tracing.open_tracing.cache_clear()
    yield
    tracing.open_tracing.cache_clear()


@pytest.fixture
def collector():
    """An OTLP collector over HTTP; the received requests."""
    got: list[ExportTraceServiceRequest] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            got.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1/traces", got
    server.shutdown()
    server.server_close()


@pytest.mark.slow
def test_without_an_endpoint_nothing_is_imported_and_nothing_sent():
    code = (
        "import sys; from vllm_tide.tracing import open_tracing;"
        "assert open_tracing('engine') is None;"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.slow
def test_an_ending_process_has_sent_its_spans(collector, tmp_path, monkeypatch):
    endpoint, got = collector
    monkeypatch.setenv(VARIABLES[0], endpoint)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    began = time.time_ns()
    done = subprocess.run(
        [sys.executable, "-c", SENDER, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    (resource,) = [resource for request in got for resource in request.resource_spans]
    facts = {item.key: item.value.string_value for item in resource.resource.attributes}
    assert (facts["service.name"], facts["vllm_tide.process"]) == (
        "vllm_tide",
        "trainer",
    )
    (scope,) = resource.scope_spans
    cycle, publish = scope.spans
    assert (cycle.name, publish.name) == ("vllm_tide.cycle", "vllm_tide.publish")
    assert cycle.end_time_unix_nano - cycle.start_time_unix_nano == 1_500_000_000
    assert publish.end_time_unix_nano == publish.start_time_unix_nano > began
    attributes = {
        item.key.removeprefix("vllm_tide."): item.value for item in cycle.attributes
    }
    assert set(attributes) == {"cycle", "seconds", "publish", "reason"}  # no null
    assert (attributes["cycle"].int_value, attributes["publish"].bool_value) == (
        3,
        True,
    )


def test_a_span_that_fails_costs_nothing(tmp_path):
    class Broken:
        def start_span(self, *_, **__):
            raise RuntimeError("no memory")

    log = Report(tmp_path, "e", tracing.Tracing(Broken()))
    log.add("publish", version=1)
    assert len(Path(log.path).read_text().splitlines()) == 1


def test_a_wrong_protocol_is_logged_once_and_nothing_is_sent(monkeypatch, caplog):
    monkeypatch.setenv(VARIABLES[1], "localhost:4317")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "smoke-signals")
    assert tracing.open_tracing("engine") is None
    assert tracing.open_tracing("engine") is None
    (record,) = caplog.records
    assert "'smoke-signals' is not supported" in record.getMessage()


def test_switched_off_by_opentelemetrys_own_variable(monkeypatch):
    monkeypatch.setenv(VARIABLES[1], "localhost:4317")
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert tracing.open_tracing("engine") is None
