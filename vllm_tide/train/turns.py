"""What happens between two steps: the caller has its say, a shared GPU gets a rest."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from vllm_tide.train.pacing import Pacer

# Called between steps; False ends the cycle early.
Progress = Callable[[], bool]
NAP_S = 0.05
"""Longest time without asking the caller (s)."""


class Turns:
    """Times this process's work by events on its own stream.

    Also while the GPU waits for the host (at first for a compiler), so never too short.

    Args:
        share: `tide.train.gpu_share`.
    """

    def __init__(self, share: float) -> None:
        self._pacer, self._began = Pacer(share), 0.0
        self._first = torch.cuda.Event(enable_timing=True)
        self._last = torch.cuda.Event(enable_timing=True, blocking=True)

    def begin(self) -> None:
        """A turn begins."""
        self._began = time.monotonic()
        self._first.record()

    def end(self) -> None:
        """A turn ends when what was launched has run."""
        self._last.record()
        self._last.synchronize()
        self._pacer.worked(self._began, self._first.elapsed_time(self._last) / 1e3)

    def rest(self) -> float:
        """Seconds until the next one may begin."""
        return self._pacer.rest(time.monotonic())


class Watch:
    """The caller's `progress`, remembering that it said to stop; `turns` have rests."""

    def __init__(self, progress: Progress | None, turns: Turns | None = None) -> None:
        self._progress, self._turns, self.going = progress, turns, True
        if turns is not None:
            turns.begin()

    def __call__(self) -> bool:
        """Whether to go on."""
        if self._turns is None:
            return self._ask()
        self._turns.end()
        while self._ask() and (rest := self._turns.rest()):
            time.sleep(min(rest, NAP_S))
        self._turns.begin()
        return self.going

    def _ask(self) -> bool:
        if self._progress is not None and self.going:
            self.going = self._progress()
        return self.going
