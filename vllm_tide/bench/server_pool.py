"""Keeps the servers of several arms alive at once, one of them running.

Arms that take turns on one machine see the same drifts of it.  Servers that wait are
stopped with SIGSTOP: an idle vLLM polls its queues and would take some percent of a
core from the one being measured.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import psutil  # type: ignore[import-untyped]  # no stubs needed for this

from .control_arms import Arm
from .server import ServerOptions, VllmServer

MIB = 1 << 20
# Left for the client, the page cache and whatever else runs.
RESERVE_MIB = 1500


def available_mib() -> float:
    """Return the memory that can be had without swapping."""
    return float(psutil.virtual_memory().available) / MIB


@dataclass
class ServerPool:
    """Servers by arm.  Use as a context manager.

    Attributes:
        options_of: How to start an arm's server.
        on_ready: Called with a server that has just become ready.
        say: Progress, one line.
        expected_mib: Memory a server is expected to take, until one was seen.
        most: Most servers alive at once; None: as many as memory permits.
    """

    options_of: Callable[[Arm], ServerOptions]
    on_ready: Callable[[VllmServer], None]
    say: Callable[[str], None]
    expected_mib: float
    most: int | None = None
    startup_s: dict[str, float] = field(default_factory=dict)
    memory_mib: dict[str, float] = field(default_factory=dict)
    _servers: dict[str, VllmServer] = field(default_factory=dict)  # oldest use first

    def __enter__(self) -> ServerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop_all()

    @property
    def need_mib(self) -> float:
        """Memory the next server is expected to take."""
        seen = max(self.memory_mib.values(), default=0.0)
        # A server grows while it serves: by a quarter was seen at batch 48.
        return 1.3 * seen if seen else self.expected_mib

    def fits(self, count: int) -> bool:
        """Return whether ``count`` servers in all can be alive at once."""
        if self.most is not None:
            return count <= self.most
        more = count - len(self._servers)
        return more * self.need_mib <= available_mib() - RESERVE_MIB

    def seconds_to_start(self, arms: Sequence[Arm]) -> float:
        """Return about how long the servers still to be started will take.

        Args:
            arms: Of the visits ahead, in order.
        """
        if not self.startup_s:
            return 0.0
        up = list(self._servers)
        starts = 0
        for key in (arm.server_key for arm in arms):
            if key not in up:
                starts += 1
                # Without room for all, the one just left makes room.
                up = [*up, key] if self.fits(len(up) + 1) else [key]
        return starts * sum(self.startup_s.values()) / len(self.startup_s)

    def get(self, arm: Arm) -> VllmServer:
        """Return the arm's server, running, with every other one stopped.

        Raises:
            ServerError: It did not start.
        """
        key = arm.server_key
        if key in self._servers and not self._servers[key].alive():
            self.drop(arm)
        for other, server in self._servers.items():
            if other != key:
                _signal(server, stop=True)
        if key not in self._servers:
            self._make_room()
            self._start(arm)
        server = self._servers.pop(key)
        self._servers[key] = server  # latest use last
        _signal(server, stop=False)
        return server

    def drop(self, arm: Arm) -> None:
        """Stop the arm's server."""
        server = self._servers.pop(arm.server_key, None)
        if server is not None:
            _stop(server)

    def stop_all(self) -> None:
        """Stop every server."""
        while self._servers:
            _, server = self._servers.popitem()
            _stop(server)

    def _make_room(self) -> None:
        def is_full() -> bool:
            if self.most is not None:
                return len(self._servers) >= self.most
            return available_mib() - RESERVE_MIB < self.need_mib

        while self._servers and is_full():
            oldest = next(iter(self._servers))
            _stop(self._servers.pop(oldest))

    def _start(self, arm: Arm) -> None:
        self.say(f"starting the server of {arm.name}")
        before = available_mib()
        server = VllmServer(self.options_of(arm))
        try:
            server.__enter__()
            server.wait_ready(lambda _: None)
            self.on_ready(server)
        except BaseException:
            server.stop()
            raise
        self._servers[arm.server_key] = server
        self.startup_s[arm.name] = round(server.startup_s, 1)
        rss = sum(part["VmRSS"] for part in server.memory_mib().values())
        # Resident sizes count shared libraries once per server, the difference in
        # available memory counts what others did meanwhile: the truth is between.
        taken = max(0.0, before - available_mib())
        self.memory_mib[arm.name] = round(min(rss, max(taken, 0.6 * rss)), 1)
        self.say(
            f"{arm.name}: ready after {server.startup_s:.0f} s, "
            f"{self.memory_mib[arm.name] / 1024:.1f} GiB"
        )


def _signal(server: VllmServer, *, stop: bool) -> None:
    for processes in server.processes().values():
        for process in processes:
            with contextlib.suppress(psutil.Error):
                if stop:
                    process.suspend()
                elif process.status() == psutil.STATUS_STOPPED:
                    process.resume()


def _stop(server: VllmServer) -> None:
    _signal(server, stop=False)
    server.stop()
