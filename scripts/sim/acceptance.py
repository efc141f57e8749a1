"""What the draft gets right: a process of acceptance probabilities and confidences.

The token at output position t of a request, drafted at depth j (1 = first), is
accepted, all before it accepted, with probability

    q(t, j) = sigmoid(base + request + token_t - decay (j - 1)),

`base` the regime's level in the minute the request arrives, `request` a level of its
own, `token` a moving average, so that easy and hard passages alternate. The draft's
confidence is informative and wrong: overconfident by an amount that depends on the
regime (a draft out of its domain knows it only in part), too steep, and noisy. What
a good calibration cannot get back is the noise.

That is the `family` of control's own estimator. Other truths (`TRUTHS`) are not: what
is a step of confidence, what hangs on earlier confidences and on what nobody sees, and
requests whose level no confidence tells.

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


@dataclass(frozen=True, slots=True)
class Kind:
    """How acceptance follows from confidence.

    Attributes:
        request: Standard deviation of a request's own level, logits.
        told: Whether confidence tells that level.
        plateau: Floor and ceiling of q, which is a steep step of confidence between
            them and of nothing else; None: the module's formula.
        carry: Logits that q gains per logit by which the confidences before it in its
            draft are above their regime's, on average.
        hidden: Standard deviation of a state that the tokens of one draft share, in
            logits. It is drawn for each draft and seen by nobody: survivals are means
            over it.
    """

    request: float = 0.5
    told: bool = True
    plateau: tuple[float, float] | None = None
    carry: float = 0.0
    hidden: float = 0.0


TRUTHS: dict[str, Kind] = {
    "family": Kind(),
    "plateau": Kind(plateau=(0.15, 0.95)),
    "correlated": Kind(carry=0.5, hidden=0.8),
    "different": Kind(request=1.5),
    "untold": Kind(request=1.5, told=False),
}

_MINUTE = 60.0
_DECAY = 0.12  # logits lost per draft depth: the draft feeds on its own features
_TOKEN_KERNEL = np.array([1.0, 0.6, 0.36, 0.22, 0.13])
_TOKEN_SPREAD = 1.3
_STEEPNESS = 1.25
_NOISE = 0.7
_STEP = (4.0, 1.2)  # of a plateau: its slope, and where its middle is, logits
# Three states have the moments of a normal one up to the fifth.
_STATES = np.array([-np.sqrt(3.0), 0.0, np.sqrt(3.0)])
_STATE_SHARES = np.array([1.0, 4.0, 1.0]) / 6.0


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
    trace: Trace,
    levels: tuple[Level, ...],
    top: int,
    seed: int,
    kind: Kind = TRUTHS["family"],
) -> Process:
    """The process of a trace; same arguments, same process.

    Args:
        trace: Requests; the minute of arrival picks the level.
        levels: Levels in turn, a minute each; see `REGIMES`.
        top: Deepest draft, K.
        seed: Seed of levels, passages, noise and outcomes.
        kind: How acceptance follows from confidence; see `TRUTHS`.
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
    belief = np.array([level.belief for level in levels])[minute]
    accept_logit = token + own + np.repeat(accept, length)
    above = _STEEPNESS * (token + own * kind.told)
    above += _NOISE * rng.standard_normal(rows)
    belief_logit = above + np.repeat(belief, length)
    coin = rng.random(rows)
    states, shares, drawn = np.zeros(1), np.ones(1), np.zeros(rows, np.int64)
    if kind.hidden:
        states, shares = kind.hidden * _STATES, _STATE_SHARES
        drawn = rng.choice(len(states), rows, p=shares)

    survival = np.empty((rows, top), np.float32)
    confidence = np.empty((rows, top), np.float32)
    alive = np.ones(rows, bool)
    kept = np.ones((len(states), rows))
    earlier = np.zeros(rows)  # sum over the tokens before it in its draft
    run = np.zeros(rows, np.int64)
    for depth in range(top):
        # Past the end of the last request: never drafted, any row will do.
        at = np.minimum(np.arange(depth, rows + depth), rows - 1)
        said = belief_logit[at] - _DECAY * depth
        logit = accept_logit[at] - _DECAY * depth
        logit += kind.carry * earlier / max(depth, 1)
        chance = _sigmoid(logit + states[:, None])
        if kind.plateau is not None:
            floor, ceiling = kind.plateau
            slope, middle = _STEP
            chance[:] = floor + (ceiling - floor) * _sigmoid(slope * (said - middle))
        kept *= chance
        survival[:, depth] = shares @ kept
        confidence[:, depth] = _sigmoid(said)
        alive &= coin[at] < chance[drawn, np.arange(rows)]
        run += alive
        earlier += above[at]
    return Process(start, survival, confidence, run, top)


def _sigmoid(logit: np.ndarray) -> np.ndarray:
    return np.asarray(1.0 / (1.0 + np.exp(-logit)))
