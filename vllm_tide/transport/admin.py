"""Commands to trainers and relays, through Unix sockets of mode 0600.

Request and response are one line of JSON each: ``{"do": "pause"}`` and
``{"ok": true, ...}`` or ``{"ok": false, "error": message}``. The server polls its
sockets between two steps and never waits for a client. Every process that can open a
socket can send commands: the modes of folder (0700) and file exclude other users.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from vllm_tide.transport.rendezvous import (
    make_private,
    prepare_run_dir,
    remove_abandoned,
)
from vllm_tide.transport.shm import TransportError

logger = logging.getLogger("vllm_tide.admin")

MAX_LINE = 4096
"""Maximum length of a request (bytes)."""
MAX_CLIENTS = 32
"""Maximum concurrent clients; the oldest of so many is disconnected."""
CHECK_PERIOD_S = 1.0
"""Seconds between checks that the socket files exist; /tmp cleaners remove them."""
# Age (s) at which a socket that refuses clients is removed: it might not listen yet.
_DEAD_S = 60.0

Kind = Literal["trainer", "relay"]
Answer = dict[str, Any]
Execute = Callable[[dict[str, Any]], Answer | None]


class AdminSocket:
    """The server's side. No method raises after construction, or waits.

    Args:
        folders: Folders that clients search; each gets a socket of the same name. If
            one cannot be created, the reason is logged, and it is created later.
    """

    def __init__(self, kind: Kind, *folders: Path) -> None:
        # The pid is not unique: containers that share a folder may have the same pid.
        self.name = f"{kind}-{os.getpid()}-{secrets.token_hex(4)}.sock"
        self._listeners: dict[Path, socket.socket | None] = {}
        self._clients: dict[socket.socket, Iterator[None]] = {}
        self._next_check, self._errors = 0.0, set[str]()
        self.listen_in(*folders)

    def listen_in(self, *folders: Path) -> None:
        """Add folders; those that it has stay."""
        for folder in folders:
            self._listeners.setdefault(folder, None)
        self._bind()

    def _bind(self) -> None:
        """Create the sockets that are missing."""
        self._next_check = time.monotonic() + CHECK_PERIOD_S
        for folder, listener in self._listeners.items():
            path = folder / self.name
            if listener is not None and os.path.lexists(path):
                continue
            try:
                make_private(folder)
                _remove_dead(prepare_run_dir(folder))
                self._listeners[folder] = _listen(path)
            except (OSError, TransportError) as error:
                if str(error) not in self._errors:
                    logger.warning("no admin socket at %s: %s", path, error)
                self._errors.add(str(error))
                continue
            if listener is not None:
                listener.close()

    def poll(self, execute: Execute) -> None:
        """Accept clients and answer the requests that have arrived.

        Args:
            execute: Executes a command. If it returns None, the command is repeated in
                the next poll.
        """
        if time.monotonic() >= self._next_check:
            self._bind()
        for listener in filter(None, self._listeners.values()):
            with contextlib.suppress(OSError):  # no further client
                while len(self._clients) < MAX_CLIENTS:  # others stay in the backlog
                    client, _ = listener.accept()
                    client.setblocking(False)
                    self._clients[client] = _serve(client, execute)
        for client, steps in list(self._clients.items()):
            try:
                next(steps)
            except (StopIteration, OSError):  # answered, or disconnected
                self._drop(client)
        if len(self._clients) == MAX_CLIENTS:
            self._drop(next(iter(self._clients)))

    def close(self) -> None:
        """Stop listening and remove the files. Idempotent."""
        for client in list(self._clients):
            self._drop(client)
        for folder, listener in self._listeners.items():
            if listener is not None:
                listener.close()
                with contextlib.suppress(OSError):
                    (folder / self.name).unlink()
        self._listeners.clear()

    def _drop(self, client: socket.socket) -> None:
        del self._clients[client]
        client.close()


def _serve(client: socket.socket, execute: Execute) -> Iterator[None]:
    """Serve one client; yield whenever this would block."""
    line = b""
    while b"\n" not in line and len(line) <= MAX_LINE:
        try:
            part = client.recv(MAX_LINE)
        except BlockingIOError:
            yield
            continue
        if not part:
            return
        line += part
    while (answer := _answer(line, execute)) is None:
        yield
    unsent = json.dumps(answer).encode() + b"\n"
    while unsent:
        try:
            unsent = unsent[client.send(unsent) :]
        except BlockingIOError:
            yield


def _answer(line: bytes, execute: Execute) -> Answer | None:
    if b"\n" not in line:
        error = f"a request must be one line of at most {MAX_LINE} bytes"
        return {"ok": False, "error": error}
    try:
        request = json.loads(line.partition(b"\n")[0])
    except (ValueError, RecursionError):
        return {"ok": False, "error": "a request must be one line of JSON"}
    if not isinstance(request, dict) or not isinstance(request.get("do"), str):
        return {"ok": False, "error": 'a request must be an object with a string "do"'}
    try:
        return execute(request)
    except TransportError as error:
        return {"ok": False, "error": str(error)}
    except Exception as error:  # noqa: BLE001 - a command must not stop the server
        logger.exception("the command %r failed", request["do"])
        kind = type(error).__name__
        return {"ok": False, "error": f"the command failed ({kind}); see the log"}


def sockets(folders: Sequence[Path], *kinds: Kind) -> dict[str, Path]:
    """Return the socket files in folders by name, also those of dead processes."""
    return {
        path.name: path
        for folder in reversed(folders)
        for kind in kinds
        for path in sorted(folder.glob(f"{kind}-*.sock"))
    }


def is_served(path: Path) -> bool:
    """Return whether the process of a socket file is alive; it may hang."""
    try:
        with socket.socket(socket.AF_UNIX) as client:
            _connect(client, path)
    except (ConnectionRefusedError, FileNotFoundError):
        return False
    except OSError:
        return True
    return True


def send_to_all(
    paths: Mapping[str, Path], request: Mapping[str, Any], timeout_s: float
) -> dict[str, Answer]:
    """Send a command to the processes of socket files at the same time.

    Args:
        timeout_s: Maximum wait (s): a trainer polls between two steps.

    Returns:
        Answers by the name of the file. If a process does not answer, its answer is the
        error. Dead processes are left out.
    """
    deadline = time.monotonic() + timeout_s
    answers: dict[str, Answer] = {}
    with contextlib.ExitStack() as stack:
        clients = {}
        for name, path in paths.items():
            client = stack.enter_context(socket.socket(socket.AF_UNIX))
            try:
                _connect(client, path)
                client.sendall(json.dumps(request).encode() + b"\n")
                clients[name] = client
            except (ConnectionRefusedError, FileNotFoundError):
                continue
            except OSError as error:
                answers[name] = {"ok": False, "error": f"no connection: {error}"}
        for name, client in clients.items():
            client.settimeout(max(deadline - time.monotonic(), 0.01))
            try:
                answer = json.loads(client.makefile("rb").readline())
                answers[name] = answer | {}  # an object
            except TimeoutError:
                text = f"has not answered in {timeout_s:.1f} s: its process is "
                text += "stopped, its steps are long, or all cores are busy (it has a "
                text += "low priority, tide.train.nice); increase --timeout"
                answers[name] = {"ok": False, "error": text}
            except (OSError, RecursionError, TypeError, ValueError) as fault:
                why = getattr(fault, "strerror", None) or fault
                answers[name] = {"ok": False, "error": f"no valid answer: {why}"}
    return answers


def display_names(names: Iterable[str]) -> dict[str, str]:
    """Return names to display: "trainer <pid>", with 8 digits more for equal pids."""
    full = {name: name.removesuffix(".sock").replace("-", " ", 1) for name in names}
    short = {name: text.partition("-")[0] for name, text in full.items()}
    pids = Counter(short.values())
    return {n: text if pids[text] == 1 else full[n] for n, text in short.items()}


def _connect(client: socket.socket, path: Path) -> None:
    client.settimeout(1.0)
    with _reachable(path) as name:
        client.connect(name)


@contextlib.contextmanager
def _reachable(path: Path) -> Iterator[str]:
    """Yield a short path to a socket: the kernel limits it to 107 bytes."""
    fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{path.name}"
    finally:
        os.close(fd)


def _listen(path: Path) -> socket.socket:
    """Create a socket; its file appears when it accepts clients."""
    listener = socket.socket(socket.AF_UNIX)
    unready = path.with_name(f".{path.name}")
    try:
        with _reachable(unready) as name:
            listener.bind(name)
        unready.chmod(0o600)
        listener.listen()
        listener.setblocking(False)
        unready.rename(path)
    except BaseException:
        listener.close()
        unready.unlink(missing_ok=True)
        raise
    return listener


def _remove_dead(folder: Path) -> None:
    """Remove the files that killed processes left in a folder."""
    remove_abandoned(folder)
    for path in folder.glob("*.sock"):
        with contextlib.suppress(OSError):
            if time.time() - path.lstat().st_mtime > _DEAD_S and not is_served(path):
                path.unlink()
