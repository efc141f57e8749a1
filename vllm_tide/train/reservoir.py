"""Training buffer and held-out reservoir, both bounded in tokens, newest kept.

A request goes wholly to one side, decided by its key: a window of a held-out request
never leaks into training.
"""

from __future__ import annotations

import random
from collections import Counter, deque

from vllm_tide.config import TrainConfig
from vllm_tide.train.sample import Sample, split_windows

_MASK = (1 << 64) - 1


def is_held_out(key: int, share: float, seed: int = 0) -> bool:
    """Whether the request of this key is held out (SplitMix64 of key and seed)."""
    z = (key + (seed + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return (z ^ (z >> 31)) < share * (_MASK + 1)


class SampleBuffer:
    """Both sides.

    Args:
        config: Sizes, shares and seed.
    """

    def __init__(self, config: TrainConfig) -> None:
        """Start empty."""
        self.config = config
        self.window = min(config.max_sample_tokens, config.batch_tokens)
        self.train: deque[Sample] = deque()
        self.holdout: deque[Sample] = deque()
        self.train_tokens = self.holdout_tokens = 0
        self.new_tokens = self.num_samples = 0
        self.evicted: Counter[str] = Counter()
        self._fresh: list[Sample] = []
        self._random = random.Random(config.seed)  # noqa: S311 - shuffling only

    def add(self, sample: Sample) -> None:
        """Store a document, cut into windows."""
        share, seed = self.config.holdout_share, self.config.seed
        held_out = is_held_out(sample.key, share, seed)
        for window in split_windows(sample, self.window):
            self.num_samples += 1
            if held_out:
                self.holdout.append(window)
                self.holdout_tokens += window.num_tokens
            else:
                self.train.append(window)
                self._fresh.append(window)
                self.train_tokens += window.num_tokens
                self.new_tokens += window.num_tokens
        while self.train_tokens > self.config.buffer_tokens and len(self.train) > 1:
            gone = self.train.popleft()
            self.train_tokens -= gone.num_tokens
            self.evicted["train"] += gone.num_tokens
            if self._fresh and self._fresh[0] is gone:
                self._fresh.pop(0)
        while (
            self.holdout_tokens > self.config.holdout_tokens and len(self.holdout) > 1
        ):
            gone = self.holdout.popleft()
            self.holdout_tokens -= gone.num_tokens
            self.evicted["holdout"] += gone.num_tokens

    def shuffled(self) -> deque[Sample]:
        """One pass over the buffer in random order, samples new since last first."""
        fresh = {id(s) for s in self._fresh}
        new, old = self._fresh, [s for s in self.train if id(s) not in fresh]
        self._random.shuffle(new)
        self._random.shuffle(old)
        self._fresh = []
        return deque([*new, *old])
