"""What a fitted curve gets wrong at some sizes of a step, learnt while serving.

A factor on the whole curve cannot bend it: with rounds of 16 rows it learns what 16
rows cost, and a plain step of 4 stays as wrong as the profile had it. So every size
keeps what its own rounds took beside the refined prediction. A size that is not seen
any more is slowly forgotten.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

# Sizes that remember; between them it is linear. Kernels change theirs as coarsely.
KNOTS = tuple(sorted({b << s for b in (2, 3) for s in range(13)} | {1}))
_KNOTS = np.array(KNOTS, float)
_FADE_KEEP = 0.5 ** (1 / 256)  # of every weight, per round
_MOST = 32.0  # rounds that a size remembers
_PRIOR = 2.0  # rounds of agreement that it starts with
_SURPRISE = 0.05  # of a size's first rounds, natural logarithm
_LEAST_SURPRISE = 0.005
_CLIP = 2.0  # usual surprises; one round is not believed beyond
_SMALL, _LAG = 512, 8  # a larger table is made anew only after so many changes
_CENTRE = 0.05  # of what all sizes have in common goes to the curve's own factors


class CurveShape:
    """Factors on a curve by size.

    Attributes:
        level: Per knot, natural logarithm of measured over predicted time.
        weight: Per knot, rounds that say so.
        usual: Per knot, mean size of a round's surprise.
        believed: Per knot, natural logarithm of its factor: `level` as far as its
            `weight` goes.
    """

    def __init__(self) -> None:
        self.level = np.zeros(len(KNOTS))
        self.weight = np.zeros(len(KNOTS))
        self.usual = np.full(len(KNOTS), _SURPRISE)
        self.believed = np.zeros(len(KNOTS))
        self._table = np.ones(0)
        self._unread = 0  # times that `believed` changed since the table was made

    def factors(self, start: int, count: int) -> np.ndarray:
        """Factors at `start`, `start + 1`, ... rows: float64 [count], a view."""
        late = self._unread >= (_LAG if len(self._table) > _SMALL else 1)
        if late or start + count > len(self._table):
            size = max(start + count, len(self._table))
            self._table = np.interp(np.arange(size), _KNOTS, np.exp(self.believed))
            self._unread = 0
        return self._table[start : start + count]

    def factor(self, rows: int) -> float:
        """The factor at `rows`."""
        return float(self.factors(rows, 1)[0])

    def take(self, believed: Sequence[float] | np.ndarray) -> None:
        """Believe what another process does, or what was just learnt."""
        self.believed = np.asarray(believed, float)
        self._unread += 1

    def learn(self, rows: int, ratio: float) -> None:
        """Take a step's measured time over its prediction without these factors.

        Args:
            rows: Rows of the step, at least 1.
            ratio: Seconds over seconds, above 0.
        """
        above = min(max(bisect_right(KNOTS, rows), 1), len(KNOTS) - 1)
        low, high = KNOTS[above - 1], KNOTS[above]
        share = min(max((rows - low) / (high - low), 0.0), 1.0)
        level, weight = self.level, self.weight
        known = level[above - 1] * (1.0 - share) + level[above] * share
        usual = self.usual
        limit = _CLIP * (usual[above - 1] * (1.0 - share) + usual[above] * share)
        surprise = min(max(math.log(ratio) - known, -limit), limit)
        weight *= _FADE_KEEP
        for knot, part in ((above - 1, 1.0 - share), (above, share)):
            weight[knot] = min(weight[knot] + part, _MOST)
            level[knot] += surprise * part / max(weight[knot], 1.0)
            usual[knot] += 0.1 * part * (abs(surprise) - usual[knot])
            usual[knot] = max(usual[knot], _LEAST_SURPRISE)
        level -= _CENTRE * float(level @ weight) / max(float(weight.sum()), 1.0)
        self.take(level * weight / (weight + _PRIOR))
