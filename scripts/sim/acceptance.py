"""What the draft gets right: a process of acceptance probabilities and confidences.

The token at output position t of a request, drafted at depth j (1 = first), is
accepted, all before it accepted, with probability

    q(t, j) = sigmoid(base + request + token_t - decay (j - 1)),

`base` the regime's level in the minute the request arrives, `request` a level of its
own, `token` a moving average, so that easy and hard passages alternate. The draft's
confidence is informative and wrong: overconfident by an amount that depends on the
regime (a draft out of its domain knows it only in part), too steep, and noisy. What
a good calibration cannot get back is the noise.

One uniform number per output position decides acceptance, whatever the policy, so
arms differ by what they do and not by luck. A position's number is looked at once: the
token after a rejected one is the target's own.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np

from sim.arrivals import Trace


@dataclass(frozen=True, slots=True)
class Level:
    """A domain: how well the draft does and what it believes of itself, in logits."""

    accept: float
    belief: float


LOW = Level(accept=-0.6, belief=0.3)
HIGH = Level(accept=1.6, belief=2.3)

REGIMES: dict[str, tuple[Level, ...]] = {
    "low": (LOW,),
    "high": (HIGH,),
    "shifting": (HIGH, LOW),
}

_MINUTE = 60.0
_DECAY = 0.12  # logits lost per draft depth: the draft feeds on its own features
_REQUEST_SPREAD = 0.5
_TOKEN_KERNEL = np.array([1.0, 0.6, 0.36, 0.22, 0.13])
_TOKEN_SPREAD = 1.3
_STEEPNESS = 1.25
_NOISE = 0.7


@dataclass(frozen=True, eq=False)
class Process:
    """Acceptance of every token that could be drafted for a trace.

    Attributes:
        start: [R] int64, row of a request's output position 0.
        survival: [P, K] float32: probability that drafts 1..j+1 from this position
            are all accepted.
        confidence: [P, K] float32: what the draft says of each, as a probability.
        run: [P] int64: number of drafts from this position that are accepted in a row.
        top: K, the deepest draft.
    """

    start: np.ndarray
    survival: np.ndarray
    confidence: np.ndarray
    run: np.ndarray
    top: int

    def mean_survival(self) -> np.ndarray:
        """[K] float64: mean over positions of drafts 1..j+1 being all accepted."""
        return np.asarray(self.survival.mean(axis=0, dtype=np.float64))


def make_process(
    trace: Trace, levels: tuple[Level, ...], top: int, seed: int
) -> Process:
    """The process of a trace; same arguments, same process.

    Args:
        trace: Requests; the minute of arrival picks the level.
        levels: Levels in turn, a minute each; see `REGIMES`.
        top: Deepest draft, K.
        seed: Seed of levels, passages, noise and outcomes.
    """
    rng = np.random.default_rng([seed, zlib.crc32(trace.name.encode())])
    minute = (trace.arrival // _MINUTE).astype(np.int64) % len(levels)
    length = trace.output + top
    start = np.cumsum(length) - length
    rows = int(length.sum())

    white = rng.standard_normal(rows + len(_TOKEN_KERNEL) - 1)
    token = np.convolve(white, _TOKEN_KERNEL, mode="valid")
    token *= _TOKEN_SPREAD / np.sqrt((_TOKEN_KERNEL**2).sum())
    own = _REQUEST_SPREAD * rng.standard_normal(len(trace))
    varying = token + np.repeat(own, length)
    accept = np.array([level.accept for level in levels])[minute]
    belief = np.array([level.belief for level in levels])[minute]
    accept_logit = varying + np.repeat(accept, length)
    belief_logit = _STEEPNESS * varying + np.repeat(belief, length)
    belief_logit += _NOISE * rng.standard_normal(rows)
    coin = rng.random(rows)

    survival = np.empty((rows, top), np.float32)
    confidence = np.empty((rows, top), np.float32)
    alive = np.ones(rows, bool)
    kept = np.ones(rows)
    run = np.zeros(rows, np.int64)
    for depth in range(top):
        # Past the end of the last request: never drafted, any row will do.
        at = np.minimum(np.arange(depth, rows + depth), rows - 1)
        chance = _sigmoid(accept_logit[at] - _DECAY * depth)
        kept *= chance
        survival[:, depth] = kept
        confidence[:, depth] = _sigmoid(belief_logit[at] - _DECAY * depth)
        alive &= coin[at] < chance
        run += alive
    return Process(start, survival, confidence, run, top)


def _sigmoid(logit: np.ndarray) -> np.ndarray:
    return np.asarray(1.0 / (1.0 + np.exp(-logit)))
