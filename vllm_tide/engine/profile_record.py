"""Which measured rounds count: the faster half of a shape's repeats.

What disturbs a round only ever lengthens it, and by much: its threads meet at barriers
many times, so one that loses its core for a scheduler's slice makes a draft pass of
half a millisecond take ten times as long. At a start-up the API server does just that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable

from vllm_tide.control.online_time import RoundSample

# A shape is settled when its fastest repeats agree.
_FASTEST = 3
_AGREE = 1.05


class Recorder:
    """Collects rounds by shape."""

    def __init__(self) -> None:
        self._rounds: dict[Hashable, list[RoundSample]] = defaultdict(list)

    def add(self, shape: Hashable, sample: RoundSample) -> None:
        """Take a round.

        Args:
            shape: What identifies its repeats.
            sample: Its times.
        """
        self._rounds[shape].append(sample)

    def settled(self, shape: Hashable) -> bool:
        """Whether repeating a shape teaches little more."""
        times = sorted(map(_seconds, self._rounds[shape]))
        return len(times) >= _FASTEST and times[_FASTEST - 1] <= _AGREE * times[0]

    def samples(self) -> list[RoundSample]:
        """The rounds that count."""
        found = []
        for rounds in self._rounds.values():
            found += sorted(rounds, key=_seconds)[: (len(rounds) + 1) // 2]
        return found


def _seconds(sample: RoundSample) -> float:
    """Time in the two models; host time before a step is not a kernel's."""
    drafted = 0.0
    if sample.steps >= 1:
        drafted += sample.draft_first_s
    if sample.steps >= 2:
        drafted += sample.draft_next_s
    return sample.target_s + drafted
