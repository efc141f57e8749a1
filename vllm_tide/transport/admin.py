"""Commands to a trainer, through a Unix socket of mode 0600 in the run directory.

Request and response are one line of JSON each: ``{"do": "pause"}`` and
``{"ok": true, ...}`` or ``{"ok": false, "error": message}``. The trainer polls the
socket between two steps and never waits for a client. Every process that can open the
socket can send commands: the modes of directory (0700) and file exclude other users.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from vllm_tide.transport.rendezvous import (
    EngineManifest,
    NotRunningError,
    prepare_run_dir,
    read_manifests,
)
from vllm_tide.transport.shm import TransportError

logger = logging.getLogger("vllm_tide.admin")

MAX_LINE = 4096
"""Maximum length of a request (bytes)."""
MAX_CLIENTS = 32
"""Maximum concurrent clients; if all are idle, the oldest is disconnected."""
CHECK_PERIOD_S = 1.0
"""Seconds between checks that the socket file exists; /tmp cleaners remove it."""
_PREFIX, _SUFFIX = "admin-", ".sock"
_STAGED = ".admin-*.new"
_STAGED_S = 60.0
"""A staged socket older than this (s) is abandoned: its process died before rename."""

Answer = dict[str, Any]


class NoTrainerError(NotRunningError):
    """No trainer is running in the run directory."""


class AdminSocket:
    """The trainer's side. No method raises after construction, or waits.

    Args:
        run_dir: Run directory. If no socket can be created, the reason is logged and
            the trainer runs without one.
    """

    def __init__(self, run_dir: Path) -> None:
        # The pid is not unique: containers that share the run directory may have the
        # same pid.
        number = f"{os.getpid()}-{secrets.token_hex(4)}"
        self.path = run_dir / f"{_PREFIX}{number}{_SUFFIX}"
        self._clients: dict[socket.socket, bytes] = {}  # and the bytes received so far
        self._unsent: dict[socket.socket, bytes] = {}  # rest of an answer
        self._listener: socket.socket | None = None
        self._next_check, self._last_error = 0.0, ""
        self._bind()

    def _bind(self) -> None:
        """Listen under the path, initially and whenever the file was removed."""
        self._next_check = time.monotonic() + CHECK_PERIOD_S
        if self._listener is not None and os.path.lexists(self.path):
            return
        try:
            _remove_dead_sockets(prepare_run_dir(self.path.parent))
            listener = _listen(self.path)
        except (OSError, TransportError) as error:
            if str(error) != self._last_error:
                self._last_error = str(error)
                logger.warning("no admin socket at %s: %s", self.path, error)
            return
        if self._listener is not None:
            self._listener.close()
        self._listener, self._last_error = listener, ""

    def poll(self, execute: Callable[[dict[str, Any]], Answer]) -> None:
        """Accept clients and answer the requests that have arrived."""
        if time.monotonic() >= self._next_check:
            self._bind()
        if self._listener is None:
            return
        with contextlib.suppress(OSError):  # no further client
            while len(self._clients) < MAX_CLIENTS:  # others stay in the backlog
                client, _ = self._listener.accept()
                client.setblocking(False)
                self._clients[client] = b""
        for client in list(self._clients):
            self._serve(client, execute)
        if len(self._clients) == MAX_CLIENTS:
            error = f"too many idle clients ({MAX_CLIENTS}); closing the oldest"
            self._reply(next(iter(self._clients)), {"ok": False, "error": error})

    def close(self) -> None:
        """Stop listening and remove the file. Idempotent."""
        self._next_check = math.inf
        listener, self._listener = self._listener, None
        if listener is None:
            return
        for client in self._clients:
            client.close()
        self._clients.clear()
        listener.close()
        with contextlib.suppress(OSError):
            self.path.unlink()

    def _serve(
        self, client: socket.socket, execute: Callable[[dict[str, Any]], Answer]
    ) -> None:
        if client in self._unsent:
            self._send(client, self._unsent[client])
            return
        try:
            part = client.recv(MAX_LINE)
        except BlockingIOError:
            return
        except OSError:
            part = b""
        received = self._clients[client] = self._clients[client] + part
        if b"\n" in received:
            self._reply(client, _answer(received.partition(b"\n")[0], execute))
        elif len(received) > MAX_LINE:
            error = f"a request must be one line of at most {MAX_LINE} bytes"
            self._reply(client, {"ok": False, "error": error})
        elif not part:
            self._drop(client)

    def _reply(self, client: socket.socket, answer: Answer) -> None:
        if client in self._unsent:  # it was answered and does not read
            self._drop(client)
        else:
            self._send(client, json.dumps(answer).encode() + b"\n")

    def _send(self, client: socket.socket, data: bytes) -> None:
        """Send without blocking; the next polls send the remaining bytes."""
        sent = len(data)
        try:
            sent = client.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            pass  # the client disconnected
        if sent < len(data):
            self._unsent[client] = data[sent:]
        else:
            self._drop(client)

    def _drop(self, client: socket.socket) -> None:
        del self._clients[client]
        self._unsent.pop(client, None)
        client.close()


def _answer(line: bytes, execute: Callable[[dict[str, Any]], Answer]) -> Answer:
    try:
        request = json.loads(line)
    except (ValueError, RecursionError):
        return {"ok": False, "error": "a request must be one line of JSON"}
    if not isinstance(request, dict) or not isinstance(request.get("do"), str):
        return {"ok": False, "error": 'a request must be an object with a string "do"'}
    try:
        return execute(request)
    except Exception as error:  # noqa: BLE001 - a command must not stop the trainer
        logger.exception("the command %r failed", request["do"])
        return {
            "ok": False,
            "error": f"the command failed ({type(error).__name__}); see the log",
        }


def trainer_sockets(run_dir: Path) -> list[Path]:
    """Return all trainer sockets of a run directory, also those of dead trainers."""
    return sorted(run_dir.glob(f"{_PREFIX}*{_SUFFIX}"))


def send(path: Path, request: dict[str, Any], timeout_s: float) -> Answer | None:
    """Send a command to one trainer.

    Args:
        timeout_s: Maximum wait for the answer (s): a trainer polls between two steps.

    Returns:
        The answer; None if the trainer is dead and only its socket file exists.

    Raises:
        TransportError: The trainer does not answer, or the answer is invalid.
    """
    with socket.socket(socket.AF_UNIX) as client, _reachable(path) as name:
        client.settimeout(timeout_s)
        try:
            client.connect(name)
            client.sendall(json.dumps(request).encode() + b"\n")
            line = client.makefile("rb").readline()
            if not line.endswith(b"\n"):
                raise TransportError(f"{path.name} disconnected without an answer")
            # NaN and infinity become null: they are invalid JSON for other programs.
            answer = json.loads(line, parse_float=_finite, parse_constant=_finite)
        except (ConnectionRefusedError, FileNotFoundError):
            return None
        except TimeoutError:
            raise TransportError(
                f"{path.name} has not answered in {timeout_s:g} s; is its trainer "
                "stopped? Increase --timeout if its steps are long"
            ) from None
        except OSError as error:
            raise TransportError(f"{path}: {error.strerror}") from None
        except (ValueError, RecursionError):
            raise TransportError(f"{path.name} answered with invalid JSON") from None
    if not isinstance(answer, dict):
        raise TransportError(f"{path.name} did not answer with a JSON object")
    return answer


def _finite(text: str) -> float | None:
    number = float(text)
    return number if math.isfinite(number) else None


def send_to_all(
    run_dir: Path, request: dict[str, Any], timeout_s: float
) -> dict[str, Answer]:
    """Send a command to every live trainer of a run directory.

    Returns:
        Answers by trainer (``trainer <pid>``, or ``trainer <pid>-<8 hex>`` if two have
        the same pid). If a trainer cannot be reached, its answer is the error.

    Raises:
        NoTrainerError: No trainer is running.
    """
    answers: dict[str, Answer] = {}
    for path in trainer_sockets(run_dir):
        try:
            answer = send(path, request, timeout_s)
        except TransportError as error:
            answer = {"ok": False, "error": str(error)}
        if answer is not None:
            number = path.name.removeprefix(_PREFIX).removesuffix(_SUFFIX)
            answers[number] = answer
    pids = Counter(number.partition("-")[0] for number in answers)
    result = {}
    for number, answer in answers.items():
        pid = number.partition("-")[0]
        result[f"trainer {pid if pids[pid] == 1 else number}"] = answer
    if not result:
        engines = read_manifests(run_dir)
        if engines and not any(map(_starts_trainer, engines)):
            raise NoTrainerError(
                f"no trainer answers in {run_dir}, and its server starts none "
                "(tide.preset, tide.train.autostart): see `vllm-tide top`"
            )
        if engines:
            raise NoTrainerError(
                f"no trainer answers in {run_dir}: it may be starting, see its "
                "trainer-*.log"
            )
        raise NoTrainerError(
            f"no trainer is running in {run_dir}, and no engine: give the server's run "
            "directory (--run-dir)"
        )
    return result


def _starts_trainer(engine: EngineManifest) -> bool:
    train, capture = engine.tide.get("train"), engine.tide.get("capture")
    return bool((train or {}).get("autostart")) and bool((capture or {}).get("enabled"))


def _listen(path: Path) -> socket.socket:
    """Create a listening socket and then rename it to `path`.

    A socket that is bound but not yet listening refuses connections like one of a dead
    process, so it must not be visible under its name.
    """
    listener = socket.socket(socket.AF_UNIX)
    staged = path.with_name(f".{path.stem}.new")
    try:
        with _reachable(staged) as name:
            listener.bind(name)
        staged.chmod(0o600)
        listener.listen()
        listener.setblocking(False)
        staged.rename(path)
    except BaseException:
        listener.close()
        staged.unlink(missing_ok=True)
        raise
    return listener


@contextlib.contextmanager
def _reachable(path: Path) -> Iterator[str]:
    """Yield a short path to a socket: the kernel limits it to 107 bytes.

    Raises:
        TransportError: The directory does not exist.
    """
    try:
        fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise TransportError(f"{path.parent}: {error.strerror}") from error
    try:
        yield f"/proc/self/fd/{fd}/{path.name}"
    finally:
        os.close(fd)


def _remove_dead_sockets(run_dir: Path) -> None:
    for path in run_dir.glob(_STAGED):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _STAGED_S:
                path.unlink()
    for path in trainer_sockets(run_dir):
        with socket.socket(socket.AF_UNIX) as client, _reachable(path) as name:
            try:
                client.settimeout(0.2)
                client.connect(name)
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
            except OSError:
                continue
