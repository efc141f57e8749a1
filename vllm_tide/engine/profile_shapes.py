"""Which steps a profile is measured on: batch sizes, contexts, lengths, prefill.

A group is a batch of requests around one context length; its steps differ in what is
verified, drafted and prefilled beside. Every round of groups has all batch sizes, so
that a measurement that runs out of time lacks contexts rather than sizes; sizes ascend
within it, because the cost of large ones is linear in their tokens anyway.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True, slots=True)
class Limits:
    """What the engine allows.

    Attributes:
        requests: Most requests of a step.
        rows: Most tokens of a step.
        length: Most tokens of a request, with room for drafts.
        cached: Most tokens of all requests together in the KV cache.
        steps: num_speculative_tokens.
        group: Most steps of a group: each lengthens its requests by some tokens.
    """

    requests: int
    rows: int
    length: int
    cached: int
    steps: int
    group: int


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a group.

    Attributes:
        verified: Draft tokens verified, over all requests.
        steps: Draft steps run after it.
        prefill: Prompt tokens of one more request, all computed in this step; 0: none.
    """

    verified: int
    steps: int
    prefill: int = 0


@dataclass(frozen=True, slots=True)
class Group:
    """Requests of one context length.

    Attributes:
        requests: How many.
        context: Mean of the tokens each has in the KV cache when its first step begins.
        steps: Steps, in the order they are run.
    """

    requests: int
    context: int
    steps: tuple[Step, ...]

    @property
    def rows(self) -> int:
        """Rows of all steps together."""
        return sum(self.requests + step.verified + step.prefill for step in self.steps)

    def thinned(self) -> Group:
        """The group with a third of its steps, the first and the last among them."""
        kept = sorted({*range(0, len(self.steps), 4), len(self.steps) - 1})
        return replace(self, steps=tuple(self.steps[i] for i in kept))


# (share of the longest length verified per request, share drafted, prefill rows)
_QUICK = (
    (0.0, 0.0, 0),
    (0.15, 0.15, 0),
    (0.4, 0.5, 0),
    (1.0, 1.0, 0),
    (0.15, 0.3, 96),
)
_FULL = (
    (0.0, 0.0, 0),
    (0.0, 1.0, 0),
    (0.08, 0.3, 0),
    (0.15, 0.15, 0),
    (0.3, 0.3, 0),
    (0.45, 0.7, 0),
    (0.6, 0.5, 0),
    (0.8, 1.0, 0),
    (1.0, 1.0, 0),
    (0.0, 0.3, 40),
    (0.15, 0.0, 150),
    (0.5, 0.5, 330),
)
_QUICK_CONTEXTS = (700, 60, 250)
_FULL_CONTEXTS = (600, 60, 1400, 200, 3800)


def groups(limits: Limits, *, quick: bool) -> Iterator[Group]:
    """Groups, the most telling first; for `quick` fewer of everything.

    Args:
        limits: What the engine allows.
        quick: Whether a start-up waits for it.
    """
    sizes = batch_sizes(limits.requests)
    contexts = _QUICK_CONTEXTS if quick else _FULL_CONTEXTS
    seen = set()
    for turn in range(1 if quick else len(contexts)):
        for i, requests in enumerate(sizes):
            most = min(limits.length, limits.cached // requests)
            context = min(contexts[(i + turn) % len(contexts)], most)
            steps = _steps(requests, limits, _QUICK if quick else _FULL)
            if context >= 1 and steps and (requests, context) not in seen:
                seen.add((requests, context))
                yield Group(requests, context, steps)


def batch_sizes(most: int) -> list[int]:
    """1, 2, 4, ... and the largest."""
    sizes = [1 << i for i in range(most.bit_length()) if 1 << i < most]
    return [*sizes, most]


def _steps(
    requests: int, limits: Limits, table: tuple[tuple[float, float, int], ...]
) -> tuple[Step, ...]:
    found = []
    for verified, drafted, prefill in table:
        tokens = round(verified * limits.steps * requests)
        steps = min(max(round(drafted * limits.steps), drafted > 0.0), limits.steps)
        if prefill and requests + 1 > limits.requests:
            continue
        prefill = min(prefill, limits.length, limits.rows - requests - tokens)
        if prefill >= 0 and requests + tokens + prefill <= limits.rows:
            found.append(Step(tokens, steps, prefill))
    found = list(dict.fromkeys(found))
    if len(found) > limits.group:
        chosen = np.linspace(0, len(found) - 1, limits.group).round().astype(int)
        found = [found[i] for i in chosen]
    return tuple(found)
