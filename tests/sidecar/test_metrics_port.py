"""The trainer's `/metrics`: readers with open connections block nothing else."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import urllib.request

import pytest

from bench.harness.server import free_port
from vllm_tide.sidecar import report
from vllm_tide.sidecar.report import TrainerStatus, open_metrics


@pytest.fixture
def port():
    number = free_port()
    open_metrics(number, lambda: TrainerStatus(model_name="m"))
    return number


def scrape(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as page:
        return page.read().decode()


def connect(port):
    return socket.create_connection(("127.0.0.1", port), timeout=30)


def ended(connection):
    with contextlib.suppress(ConnectionResetError):
        return connection.recv(1) == b""
    return True


def test_idle_connections_are_few_and_the_oldest_is_closed(port, capfd):
    threads, fds = threading.active_count(), len(os.listdir("/proc/self/fd"))
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(connect(port)) for _ in range(100)]
        assert 'trainer_cycles_total{model_name="m"}' in scrape(port)
        assert all(ended(connection) for connection in connections[:80])
        until = time.monotonic() + 30
        while threading.active_count() - threads > 16:
            assert time.monotonic() < until, threading.enumerate()
            time.sleep(0.01)
        assert len(os.listdir("/proc/self/fd")) - fds <= 100 + 16
    assert 'trainer_cycles_total{model_name="m"}' in scrape(port)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("request_so_far", [b"", b"GET /metrics HTTP/1.1\r\nHost:"])
def test_a_silent_connection_is_closed(monkeypatch, capfd, request_so_far):
    monkeypatch.setattr(report.MetricsHandler, "timeout", 0.2)
    number = free_port()
    open_metrics(number, TrainerStatus)
    with connect(number) as connection:
        connection.sendall(request_so_far)
        assert ended(connection)
    assert "vllm_tide:" in scrape(number)
    assert capfd.readouterr().err == ""


def test_a_used_port_gives_one_line(caplog):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        open_metrics(number, TrainerStatus)
    assert f"tide.train.metrics_port: {number} cannot be opened" in caplog.text


def test_its_host_may_be_an_ipv6_address():
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
            number = probe.getsockname()[1]
    except OSError:
        pytest.skip("no IPv6 here")
    open_metrics(number, TrainerStatus, "::1")
    with urllib.request.urlopen(f"http://[::1]:{number}/metrics", timeout=30) as page:
        assert page.status == 200
