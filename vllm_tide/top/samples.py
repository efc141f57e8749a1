"""Takes samples, and keeps those of the last seconds: a rate needs two."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

from vllm_tide.top.metrics_page import Address, Page, PageError, fetch
from vllm_tide.top.run_files import (
    EngineLook,
    TrainerLook,
    look_at_engines,
    look_at_trainers,
)

WINDOW_S = 10.0
"""Rates are means over this time (s), or over one interval where that is longer."""

PATIENCE_S = 4.0
"""A page that takes longer (s) is not waited for."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What was seen at one moment.

    Attributes:
        t_s: Monotonic clock.
        pages: By URL: the page, or why there is none.
    """

    t_s: float
    unix_s: float
    pages: dict[str, Page | str]
    engines: list[EngineLook]
    trainers: list[TrainerLook]


class Sampler:
    """Looks at everything and remembers.

    Args:
        run_dir: Run directory; need not exist, now or later.
        servers: Where pages are.

    Attributes:
        history: Samples of the last seconds, oldest first.
    """

    def __init__(self, run_dir: Path, servers: Sequence[Address]) -> None:
        self.run_dir = run_dir
        self.servers = tuple(servers)
        self.history: deque[Sample] = deque()
        self._asking: dict[str, Thread] = {}

    def take(self) -> Sample:
        """Look now. Never raises for what the watched do."""
        pages = self._pages()
        sample = Sample(
            time.monotonic(),
            time.time(),
            pages,
            look_at_engines(self.run_dir),
            look_at_trainers(self.run_dir),
        )
        self.history.append(sample)
        # The oldest stays until the next is old enough to stand for the window.
        while len(self.history) > 2 and sample.t_s - self.history[1].t_s >= WINDOW_S:
            self.history.popleft()
        return sample

    def _pages(self) -> dict[str, Page | str]:
        """Ask all servers at once; one that is slow is left to its thread."""
        pages: dict[str, Page | str] = {}
        for address in self.servers:
            before = self._asking.get(address.url)
            if before is None or not before.is_alive():
                # A daemon: a server that hangs must not keep the command from ending.
                asking = Thread(target=_ask, args=(address, pages), daemon=True)
                asking.start()
                self._asking[address.url] = asking
        deadline = time.monotonic() + PATIENCE_S
        for asking in self._asking.values():
            asking.join(max(0.0, deadline - time.monotonic()))
        late = "does not answer (too slow)"
        return {a.url: pages.get(a.url, late) for a in self.servers}


def _ask(address: Address, pages: dict[str, Page | str]) -> None:
    try:
        pages[address.url] = fetch(address)
    except PageError as error:
        pages[address.url] = str(error)
