"""Process of acceptance probabilities and confidences of the draft tokens.

The token at output position t of a request, drafted at depth j (1 = first), is
accepted, given that all earlier tokens of the draft are accepted, with probability

    q(t, j) = sigmoid(base + request + token_t - decay (j - 1)).

`base` is the regime's level in the minute of the request's arrival, `request` a level
per request, and `token` a moving average, so that easy and hard passages alternate. The
draft's confidence is informative but biased: it is overconfident by an amount that
depends on the regime (it shows a domain shift only in part), too steep, and noisy.
Calibration can correct all of this except for the noise.

This is the model `family` of the controller's estimator. The other truths (`TRUTHS`)
violate its assumptions: acceptance as a step function of confidence, acceptance that
depends on earlier confidences and a hidden state, and request levels that are not in
the confidence.

One uniform number per output position decides acceptance for every policy, so arms
differ by their decisions and not by chance. A position's number is used once: the token
after a rejected one comes from the target.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np

from sim.arrivals import Trace


@dataclass(frozen=True, slots=True)
class Level:
    """Mean acceptance and mean confidence of the draft in a domain, in logits."""

    accept: float
    confidence: float


LOW = Level(accept=-0.6, confidence=0.3)
HIGH = Level(accept=1.6, confidence=2.3)

REGIMES: dict[str, tuple[Level, ...]] = {
    "low": (LOW,),
    "high": (HIGH,),
    "shifting": (HIGH, LOW),
}


@dataclass(frozen=True, slots=True)
class Kind:
    """Dependence of acceptance on confidence.

    Attributes:
        request: Standard deviation of the level per request, in logits.
        level_in_confidence: Whether the confidence includes that level.
        plateau: Floor and ceiling of q, which is a steep step function of confidence
            alone; None: the module's formula.
        carry: Increase of q in logits per logit by which earlier confidences of the
            draft exceed their regime's mean.
        hidden: Standard deviation of a state shared by the tokens of one draft, in
            logits. It is drawn per draft and not observable: survivals are means over
            it.
    """

    request: float = 0.5
    level_in_confidence: bool = True
    plateau: tuple[float, float] | None = None
    carry: float = 0.0
    hidden: float = 0.0


TRUTHS: dict[str, Kind] = {
    "family": Kind(),
    "plateau": Kind(plateau=(0.15, 0.95)),
    "correlated": Kind(carry=0.5, hidden=0.8),
    "different": Kind(request=1.5),
    "untold": Kind(request=1.5, level_in_confidence=False),
}

_MINUTE = 60.0
_DECAY = 0.12  # logits lost per draft depth, as the draft uses its own features
_TOKEN_KERNEL = np.array([1.0, 0.6, 0.36, 0.22, 0.13])
_TOKEN_SPREAD = 1.3
_STEEPNESS = 1.25
_NOISE = 0.7
_STEP = (4.0, 1.2)  # slope of a plateau's step, and its middle, in logits
# Three states with the moments of a normal distribution up to the fifth.
_STATES = np.array([-np.sqrt(3.0), 0.0, np.sqrt(3.0)])
_STATE_SHARES = np.array([1.0, 4.0, 1.0]) / 6.0


@dataclass(frozen=True, eq=False)
class Process:
    """Acceptance of every possible draft token of a trace.

    Attributes:
        start: [R] int64: row of a request's output position 0.
        survival: [P, K] float32: probability that drafts 1..j+1 from this position
            are all accepted.
        confidence: [P, K] float32: the draft's confidence in each, as a probability.
        run: [P] int64: number of accepted drafts in a row from this position.
        top: K, the deepest draft.
    """

    start: np.ndarray
    survival: np.ndarray
    confidence: np.ndarray
    run: np.ndarray
    top: int

    def mean_survival(self) -> np.ndarray:
        """Return the mean survival over positions, [K] float64."""
        return np.asarray(self.survival.mean(axis=0, dtype=np.float64))


def make_process(
    trace: Trace,
    levels: tuple[Level, ...],
    top: int,
    seed: int,
    kind: Kind = TRUTHS["family"],
) -> Process:
    """Build the process of a trace; it is determined by the arguments.

    Args:
        trace: Requests; the minute of arrival selects the level.
        levels: Cycle of levels, a minute each; see `REGIMES`.
        top: Deepest draft, K.
        seed: Seed of levels, passages, noise and outcomes.
        kind: Dependence of acceptance on confidence; see `TRUTHS`.
    """
    rng = np.random.default_rng([seed, zlib.crc32(trace.name.encode())])
    minute = (trace.arrival // _MINUTE).astype(np.int64) % len(levels)
    length = trace.output + top
    start = np.cumsum(length) - length
    rows = int(length.sum())

    white = rng.standard_normal(rows + len(_TOKEN_KERNEL) - 1)
    token = np.convolve(white, _TOKEN_KERNEL, mode="valid")
    token *= _TOKEN_SPREAD / np.sqrt((_TOKEN_KERNEL**2).sum())
    own = np.repeat(kind.request * rng.standard_normal(len(trace)), length)
    accept = np.array([level.accept for level in levels])[minute]
    mean = np.array([level.confidence for level in levels])[minute]
    accept_logit = token + own + np.repeat(accept, length)
    above = _STEEPNESS * (token + own * kind.level_in_confidence)
    above += _NOISE * rng.standard_normal(rows)
    confidence_logit = above + np.repeat(mean, length)
    coin = rng.random(rows)
    states, shares, drawn = np.zeros(1), np.ones(1), np.zeros(rows, np.int64)
    if kind.hidden:
        states, shares = kind.hidden * _STATES, _STATE_SHARES
        drawn = rng.choice(len(states), rows, p=shares)

    survival = np.empty((rows, top), np.float32)
    confidence = np.empty((rows, top), np.float32)
    alive = np.ones(rows, bool)
    passed = np.ones((len(states), rows))
    earlier = np.zeros(rows)  # sum over the earlier tokens of the draft
    run = np.zeros(rows, np.int64)
    for depth in range(top):
        # Rows past the end of the last request are never drafted, so clip the index.
        at = np.minimum(np.arange(depth, rows + depth), rows - 1)
        shown = confidence_logit[at] - _DECAY * depth
        logit = accept_logit[at] - _DECAY * depth
        logit += kind.carry * earlier / max(depth, 1)
        chance = _sigmoid(logit + states[:, None])
        if kind.plateau is not None:
            floor, ceiling = kind.plateau
            slope, middle = _STEP
            chance[:] = floor + (ceiling - floor) * _sigmoid(slope * (shown - middle))
        passed *= chance
        survival[:, depth] = shares @ passed
        confidence[:, depth] = _sigmoid(shown)
        alive &= coin[at] < chance[drawn, np.arange(rows)]
        run += alive
        earlier += above[at]
    return Process(start, survival, confidence, run, top)


def _sigmoid(logit: np.ndarray) -> np.ndarray:
    return np.asarray(1.0 / (1.0 + np.exp(-logit)))
