"""Orders to a trainer, through a Unix socket of mode 0600 in the run directory.

One line of JSON each way: ``{"do": "pause"}``, answered with ``{"ok": true, ...}`` or
``{"ok": false, "error": sentence}``. The trainer looks between two steps and never
waits for a client. Whoever may open the socket may give orders: the run directory
(0700) and the file's mode keep others out.
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

from vllm_tide.transport.rendezvous import NobodyThere, prepare_run_dir
from vllm_tide.transport.shm import TransportError

logger = logging.getLogger("vllm_tide.admin")

MAX_LINE = 4096
"""Longest request (bytes)."""
MAX_CLIENTS = 32
"""Clients at once; of so many that say nothing the oldest is sent away."""
LOOK_S = 1.0
"""Seconds between two checks that the socket's name is there: cleaners take it."""
_PREFIX, _SUFFIX = "admin-", ".sock"
_STAGED = ".admin-*.new"
_STAGED_S = 60.0
"""A socket that was made longer ago (s) and got no name will not get one any more."""

Answer = dict[str, Any]


class NoTrainer(NobodyThere):
    """No trainer runs in a run directory."""


class AdminSocket:
    """The trainer's end. Nothing here raises after it was made, or waits.

    Args:
        run_dir: Run directory. While no socket can be made (the reason is logged) the
            trainer works without one.
    """

    def __init__(self, run_dir: Path) -> None:
        # Not by the pid alone: containers that share the run directory may have the
        # same one.
        number = f"{os.getpid()}-{secrets.token_hex(4)}"
        self.path = run_dir / f"{_PREFIX}{number}{_SUFFIX}"
        self._clients: dict[socket.socket, bytes] = {}  # and what they said so far
        self._unsent: dict[socket.socket, bytes] = {}  # of an answer
        self._listener: socket.socket | None = None
        self._next, self._why = 0.0, ""
        self._bind()

    def _bind(self) -> None:
        """Listen under the name, at first and where somebody removed it."""
        self._next = time.monotonic() + LOOK_S
        if self._listener is not None and os.path.lexists(self.path):
            return
        try:
            _sweep(prepare_run_dir(self.path.parent))
            listener = _bound(self.path)
        except (OSError, TransportError) as error:
            if str(error) != self._why:
                self._why = str(error)
                logger.warning("no admin socket at %s: %s", self.path, error)
            return
        if self._listener is not None:
            self._listener.close()
        self._listener, self._why = listener, ""

    def poll(self, carry_out: Callable[[dict[str, Any]], Answer]) -> None:
        """Answer what has arrived."""
        if time.monotonic() >= self._next:
            self._bind()
        if self._listener is None:
            return
        with contextlib.suppress(OSError):  # there is no other
            while len(self._clients) < MAX_CLIENTS:  # the system lets others wait
                client, _ = self._listener.accept()
                client.setblocking(False)
                self._clients[client] = b""
        for client in list(self._clients):
            self._serve(client, carry_out)
        if len(self._clients) == MAX_CLIENTS:
            error = f"{MAX_CLIENTS} clients say nothing; the oldest is sent away"
            self._reply(next(iter(self._clients)), {"ok": False, "error": error})

    def close(self) -> None:
        """Stop listening and remove the file. Idempotent."""
        self._next = math.inf
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
        self, client: socket.socket, carry_out: Callable[[dict[str, Any]], Answer]
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
        said = self._clients[client] = self._clients[client] + part
        if b"\n" in said:
            self._reply(client, _answered(said.partition(b"\n")[0], carry_out))
        elif len(said) > MAX_LINE:
            error = f"a request is one line of at most {MAX_LINE} bytes"
            self._reply(client, {"ok": False, "error": error})
        elif not part:
            self._drop(client)

    def _reply(self, client: socket.socket, answer: Answer) -> None:
        if client in self._unsent:  # it was answered, and does not read
            self._drop(client)
        else:
            self._send(client, json.dumps(answer).encode() + b"\n")

    def _send(self, client: socket.socket, said: bytes) -> None:
        """Send what the system holds now; the rest goes at the next looks."""
        sent = len(said)
        try:
            sent = client.send(said)
        except BlockingIOError:
            sent = 0
        except OSError:
            pass  # it hung up
        if sent < len(said):
            self._unsent[client] = said[sent:]
        else:
            self._drop(client)

    def _drop(self, client: socket.socket) -> None:
        del self._clients[client]
        self._unsent.pop(client, None)
        client.close()


def _answered(line: bytes, carry_out: Callable[[dict[str, Any]], Answer]) -> Answer:
    try:
        request = json.loads(line)
    except (ValueError, RecursionError):
        return {"ok": False, "error": "a request is one line of JSON"}
    if not isinstance(request, dict) or not isinstance(request.get("do"), str):
        return {"ok": False, "error": 'a request is an object with a text "do"'}
    try:
        return carry_out(request)
    except Exception as error:  # noqa: BLE001 - an order must not end the trainer
        logger.exception("the order %r failed", request["do"])
        return {
            "ok": False,
            "error": f"it failed ({type(error).__name__}); see the log",
        }


def trainer_sockets(run_dir: Path) -> list[Path]:
    """Sockets in a run directory; of live trainers and of killed ones."""
    return sorted(run_dir.glob(f"{_PREFIX}*{_SUFFIX}"))


def send(path: Path, request: dict[str, Any], timeout_s: float) -> Answer | None:
    """Ask one trainer.

    Args:
        timeout_s: Longest wait for the answer (s): a trainer looks between two steps.

    Returns:
        Its answer; None if it was killed and only its socket is left.

    Raises:
        TransportError: It does not answer, or not in our language.
    """
    with socket.socket(socket.AF_UNIX) as client, _reachable(path) as name:
        client.settimeout(timeout_s)
        try:
            client.connect(name)
            client.sendall(json.dumps(request).encode() + b"\n")
            said = client.makefile("rb").readline()
            if not said.endswith(b"\n"):
                raise TransportError(f"{path.name} hung up without an answer")
            # NaN, and what no float holds, would be no JSON where it is passed on.
            answer = json.loads(said, parse_float=_finite, parse_constant=_finite)
        except (ConnectionRefusedError, FileNotFoundError):
            return None
        except TimeoutError:
            raise TransportError(
                f"{path.name} has not answered in {timeout_s:g} s; is its trainer "
                "stopped? Give --timeout more seconds if its steps are long"
            ) from None
        except OSError as error:
            raise TransportError(f"{path}: {error.strerror}") from None
        except (ValueError, RecursionError):
            raise TransportError(f"{path.name} answered with no JSON") from None
    if not isinstance(answer, dict):
        raise TransportError(f"{path.name} answered with no object")
    return answer


def _finite(text: str) -> float | None:
    number = float(text)
    return number if math.isfinite(number) else None


def ask_all(
    run_dir: Path, request: dict[str, Any], timeout_s: float
) -> dict[str, Answer]:
    """Ask every live trainer of a run directory.

    Returns:
        Answers by trainer (``trainer <pid>``, or ``trainer <pid>-<8 hex>`` where two
        have the same pid); one that cannot be asked answers with an error.

    Raises:
        NoTrainer: None is there.
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
    found = {}
    for number, answer in answers.items():
        pid = number.partition("-")[0]
        found[f"trainer {pid if pids[pid] == 1 else number}"] = answer
    if not found:
        raise NoTrainer(
            f"no trainer is running in {run_dir}: start `vllm-tide train`, or give "
            "--run-dir"
        )
    return found


def _bound(path: Path) -> socket.socket:
    """A listening socket, which gets its name only now: whoever finds it can connect.

    One that is bound and does not listen yet refuses as a dead one does.
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
    """A short name for a socket: the system takes 107 bytes at most.

    Raises:
        TransportError: If there is no such directory.
    """
    try:
        fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise TransportError(f"{path.parent}: {error.strerror}") from error
    try:
        yield f"/proc/self/fd/{fd}/{path.name}"
    finally:
        os.close(fd)


def _sweep(run_dir: Path) -> None:
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
