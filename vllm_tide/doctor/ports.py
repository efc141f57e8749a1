"""Are the ports free that a server and its trainer would open?"""

from __future__ import annotations

import errno
import http.client
import socket
from collections.abc import Iterator

from vllm_tide.doctor.finding import Finding, failed, ok, skipped, warning
from vllm_tide.doctor.subject import Subject

_SECONDS = 1.0
_MOST_BYTES = 4 << 20


def check(subject: Subject) -> Iterator[Finding]:
    """Try the server's port and the trainer's."""
    yield judge("server port", subject.port, "--port", "", b"vllm:")
    train = subject.tide.train if subject.tide is not None else None
    if train is None or not train.metrics_port:
        yield skipped("trainer port", "tide.train.metrics_port is not set.")
    else:
        yield judge(
            "trainer port",
            train.metrics_port,
            "tide.train.metrics_port",
            train.metrics_host,
            b"vllm_tide:trainer_",
        )


def judge(name: str, port: int, knob: str, host: str, ours: bytes) -> Finding:
    """Try to bind a port, and ask who holds it if that fails.

    Args:
        name: Of the finding.
        port: TCP port.
        knob: Where another one is chosen.
        host: Address that would be bound; empty for all.
        ours: What `/metrics` of a process of ours contains.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            return failed(
                name, f"{port} cannot be opened ({error.strerror}).", f"Change {knob}."
            )
    else:
        return ok(name, f"{port} is free.")
    if ours in _metrics(port):
        return warning(
            name,
            f"{port} is held by a running {name.split()[0]} of this kind.",
            f"Fine if that is the one you look at; to start another change {knob}.",
        )
    return failed(name, f"{port} is taken by another process.", f"Change {knob}.")


def _metrics(port: int) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_SECONDS)
    try:
        connection.request("GET", "/metrics")
        return connection.getresponse().read(_MOST_BYTES)
    except (OSError, http.client.HTTPException):
        return b""
    finally:
        connection.close()
