"""Every kill point of a protocol: begun, stopped at one operation, and continued."""

from __future__ import annotations

import logging
import os
import pickle
import shutil
import signal
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.kill_points.watch import FAULTS, KILLED, Watch
from vllm_tide.draft.config import DraftError
from vllm_tide.transport.shm import TransportError

LIMIT_S = 60


class Protocol:
    """State that outlives processes, and one action on it.

    The first `act` runs in a fork, which is stopped, all else in the test's process. A
    protocol is used for one point. Files lie in `folder`, which is empty at first;
    `notes` is a file that no operation is counted of.

    Args:
        fault: Fault of an operation of the first `act`.

    Attributes:
        errors: What `act` may raise: the caller makes one sentence of it.
    """

    errors: tuple[type[Exception], ...] = (OSError, TransportError, DraftError)

    def __init__(self, folder: Path, fault: str = "") -> None:
        self.folder, self.fault = folder, fault
        self.notes = folder.with_name(f"{folder.name}.notes")

    def begin(self) -> None:
        """Make the old state."""

    def act(self) -> bool:
        """Make the new state; return True if it reports that this was done."""
        raise NotImplementedError

    def again(self) -> bool:
        """Continue in the process in which an operation has failed."""
        return self.act()

    def check(self, done: bool) -> None:
        """Assert the new state, or, if not `done`, the old one."""
        raise NotImplementedError

    def tidy(self) -> None:
        """Clean up an hour later: remove files of stopped processes."""
        self.act()

    def close(self) -> None:
        """Release the resources of `begin`."""


class Point(NamedTuple):
    """An operation and its fault."""

    at: int
    fault: str


def points_of(kind: type[Protocol], folder: Path) -> list[Point]:
    """Return all points of a protocol, in the order of its operations."""

    def count(protocol: Protocol) -> list[str]:
        watch = Watch(protocol.folder)
        watch.install()
        assert protocol.act(), f"{kind.__name__} is not done without a fault"
        return watch.operations

    with _begun(kind, folder) as protocol:
        operations = _forked(count, protocol)
    return [Point(at, how) for at, op in enumerate(operations) for how in FAULTS[op]]


def violation(kind: type[Protocol], folder: Path, point: Point) -> str:
    """Stop at a point, continue, and return the error, empty if none."""
    ends = (True,) if point.fault in ("kill", "torn") else (True, False)
    for end in ends:
        try:
            with _begun(kind, folder, point.fault) as protocol:
                done = _forked(_stopped, protocol, point, end)
                _go_on(protocol, bool(done))
        except Violation as error:
            where = f"{kind.__name__}: {point.fault} at operation {point.at}"
            return f"{where}, {'then it ends' if end else 'goes on'}: {error}"
    return ""


class Violation(AssertionError):
    """A process ended with an unexpected error."""


class _begun:  # noqa: N801 - a context manager
    def __init__(self, kind: type[Protocol], folder: Path, fault: str = "") -> None:
        self._protocol = kind(folder, fault)

    def __enter__(self) -> Protocol:
        self._protocol.folder.mkdir(mode=0o700)
        self._protocol.begin()
        return self._protocol

    def __exit__(self, *_: object) -> None:
        self._protocol.close()
        shutil.rmtree(self._protocol.folder)
        self._protocol.notes.unlink(missing_ok=True)


def _stopped(protocol: Protocol, point: Point, end: bool) -> bool:
    """Act up to a point, then end or continue; return True if it was done."""
    watch = Watch(protocol.folder, point.fault, point.at)
    watch.install()
    try:
        done = protocol.act()
    except protocol.errors as error:
        assert str(error), "an error without a sentence"
        done = False
    watch.disarm()
    if not (done or end):
        done = protocol.again()
        assert done, "the process itself cannot go on"
    return done


def _go_on(protocol: Protocol, done: bool) -> None:
    try:
        _recover(protocol, done)
    except Exception as error:
        raise Violation(traceback.format_exc()) from error


def _recover(protocol: Protocol, done: bool) -> None:
    protocol.check(done)
    assert protocol.act(), "a new process cannot go on"
    protocol.check(True)
    for path in hidden(protocol.folder):
        os.utime(path, (0, 0))
    protocol.tidy()
    protocol.check(True)
    left = [str(path.relative_to(protocol.folder)) for path in hidden(protocol.folder)]
    assert not left, f"left behind: {left}"


def hidden(folder: Path) -> Iterator[Path]:
    """Return files and folders in the making, also those of ended processes."""
    return (path for path in list(folder.rglob("*")) if path.name.startswith("."))


def _forked(work: Callable[..., Any], *arguments: Any) -> Any:
    """Call it in a fork, which cleans up nothing; return None if it was killed."""
    reader, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        code, value = 0, None
        signal.alarm(LIMIT_S)
        logging.disable()
        try:
            value = work(*arguments)
        except BaseException:  # noqa: BLE001 - the test's process reports it
            code, value = 1, traceback.format_exc()
        try:
            with open(tell, "wb") as file:
                pickle.dump(value, file)
        finally:
            os._exit(code)
    os.close(tell)
    with open(reader, "rb") as file:
        raw = file.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code == KILLED:
        return None
    value = pickle.loads(raw) if raw else f"it ended with {code}"
    if code:
        raise Violation(value)
    return value
