"""Regret by cause: what a policy lost, in the very states it was in.

For every n-th round the true expected tokens and seconds of what the policy did are
set against the best of the same state. A round that yields E tokens in T seconds where
the best rate is r lost `T - E / r` seconds. The loss goes to one cause:

* ``off``: nothing was drafted where drafting pays;
* ``on``: something was drafted where it does not;
* ``length``: too many or too few draft steps, with the best set of each;
* ``selection``: the wrong drafts verified, of those drafted;
* ``catchup``: the draft's missed tokens had to be fed to it.
"""

from __future__ import annotations

import numpy as np

from sim.clairvoyant import judge
from vllm_tide.control.batch import Batch
from vllm_tide.control.time_model import TimeModel

CAUSES = ("off", "on", "length", "selection", "catchup")


class Audit:
    """Adds up losses of sampled rounds.

    Args:
        model: The true time model.
        every: One round in so many is looked at.
    """

    def __init__(self, model: TimeModel, every: int = 16) -> None:
        self._model = model
        self._every = every
        self._count = 0
        self._seconds = 0.0
        self._lost = dict.fromkeys(CAUSES, 0.0)
        self._best_steps = 0.0
        self._steps = 0.0
        self._looked = 0

    def due(self) -> bool:
        """Whether the coming round is looked at."""
        self._count += 1
        return self._count % self._every == 0

    def look(
        self,
        batch: Batch,
        survival: np.ndarray,
        emitting: int,
        steps: int,
        lengths: np.ndarray,
        catchup_s: float,
    ) -> None:
        """Judge one round.

        Args:
            batch: What the policy was shown.
            survival: [n, K] true probabilities, 0 where there is no room.
            emitting: Requests that emit a token whatever is drafted.
            steps: Draft steps that were run.
            lengths: [n] drafts of each request that will be verified.
            catchup_s: Seconds spent on missed tokens.
        """
        if emitting == 0:
            return
        found = judge(survival, emitting, self._model, batch)
        best = int(found.rate.argmax())
        taken = np.arange(survival.shape[1]) < lengths[:, None]
        expected = emitting + float(survival[taken].sum(dtype=np.float64))
        seconds = found.seconds(steps, int(lengths.sum()))
        self._looked += 1
        self._steps += steps
        self._best_steps += best
        self._seconds += seconds + catchup_s
        self._lost["catchup"] += catchup_s
        ideal = expected / found.rate[best]
        if steps == 0 or best == 0:
            cause = "off" if steps == 0 else "on"
            self._lost[cause] += seconds - ideal
            return
        same_length = expected / found.rate[steps]
        self._lost["length"] += same_length - ideal
        self._lost["selection"] += seconds - same_length

    def report(self) -> dict[str, float]:
        """Share of the time lost by each cause, and mean lengths run and best."""
        total = max(self._seconds, 1e-12)
        looked = max(self._looked, 1)
        shares = {cause: float(lost) / total for cause, lost in self._lost.items()}
        return shares | {
            "mean_steps": self._steps / looked,
            "best_steps": self._best_steps / looked,
        }
