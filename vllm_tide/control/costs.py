"""Seconds of each choice of one round: AdaSpec eq. 1, T = draft + target.

The time model is asked once per round; every decision of the round reads the arrays.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm_tide.control.batch import Batch
from vllm_tide.control.online_time import OnlineTime, RefinedTime, RoundSample
from vllm_tide.control.time_model import TimeModel

STAY_ROUNDS = 32
"""Rounds over which the price of coming on again (catch-up) is spread: the expected
stay. The gate's hysteresis makes shorter stays rare."""

CLIENT_SHARE = 0.93
"""Kept of the predicted tokens per second under clients' limits: 0.9 of the real."""

PROBE_REQUESTS = 4
"""Requests of one shadow probe, at most; what the probe's price is computed for."""


class RoundCosts:
    """The costs of one round.

    Attributes:
        requests: n; also the tokens that a round emits without any draft token.
        draft: float64 [most + 1], seconds of 0..most draft steps.
        target: float64 [n * most + 1], seconds of the target step and of everything
            outside the forwards when 0..n * most draft tokens are verified.
        plain: Seconds of the round without drafting.
        extra: Seconds per round that drafting costs beside `draft`: catch-up, spread.
        limit: Seconds this round may take: the tightest limit of a request that
            plain decoding can meet; inf if there is none or nothing exceeds it.
        loose: The same without the limits that clients ask for.
        missed: Some request has a limit and no length meets any of them.
    """

    __slots__ = (
        "draft",
        "extra",
        "limit",
        "loose",
        "missed",
        "most",
        "plain",
        "requests",
        "target",
    )

    def __init__(self, model: TimeSource, batch: Batch, most: int) -> None:
        n = len(batch)
        context = int(batch.context.sum())
        self.requests = n
        self.most = most
        self.draft = model.draft_curve(n, context, batch.first_rows, most)
        self.target = model.target_curve(n, context, n * most, batch.prefill)
        self.target = self.target + model.overhead(n)
        self.plain = float(self.target[0])
        self.extra = 0.0
        if batch.catchup_rows:
            self.extra = model.catchup_seconds(batch.catchup_rows) / STAY_ROUNDS
        self.limit, self.missed = round_limit(batch.limit, self.plain)
        self.loose = self.limit
        if batch.asked is not None:
            limit, self.missed = round_limit(batch.asked, self.plain)
            self.limit = min(limit, self.loose)
        if self.target[-1] + self.draft[-1] <= self.limit:
            self.limit = self.loose = np.inf

    def fair(self, limited: float, free: float) -> bool:
        """True if clients' limits cost few tokens per second; else they are dropped."""
        if limited >= CLIENT_SHARE * free:
            return True
        self.limit = self.loose
        return False


def round_limit(limits: np.ndarray, plain: float) -> tuple[float, bool]:
    """The limit that a round is held to.

    Args:
        limits: float64 [n], seconds, inf for none.

    Returns:
        The tightest limit that the shortest round meets (inf if there is none), and
        whether limits exist but none can be met.
    """
    tightest = float(limits.min()) if len(limits) else np.inf
    if tightest >= plain:
        return tightest, False
    # Infinite is no limit: one request without any does not make up for the others.
    feasible = limits[(limits >= plain) & (limits < np.inf)]
    if not len(feasible):
        return np.inf, True
    return float(feasible.min()), False


def probe_seconds(model: TimeSource, batch: Batch) -> float:
    """Seconds of one shadow probe: catch a few requests up, draft one token."""
    n = len(batch)
    few = min(n, PROBE_REQUESTS)
    context = int(batch.context.sum()) * few // n
    # The pass that catches them up is the one that drafts.
    rows = max(few, -(-batch.catchup_rows * few // n))
    return model.catchup_seconds(rows, context)


_NEVER = 1e6  # seconds of a length that is not offered
# Of the controller's own work; without a price it would look in every step.
_LOOK_SECONDS = 1e-3


class KeptPass:
    """A time source whose plain step has the draft's first pass in it.

    Model Runner V2 keeps the draft's KV cache without holes that way: the pass runs
    when nothing is drafted too, and the first drafted token costs nothing more.

    Args:
        model: Where target step and draft passes are apart.
        lengths: Draft steps that there are, ascending, the last of them the most that
            is asked about; empty: all.
    """

    def __init__(self, model: TimeSource, lengths: Sequence[int] = ()) -> None:
        self._model = model
        longest = max(lengths, default=0)
        self._missing = np.setdiff1d(np.arange(1, longest), lengths)

    def target_curve(
        self, requests: int, context: int, most: int, prefill: int = 0
    ) -> np.ndarray:
        """Seconds [most + 1] of the target step and the draft's first pass."""
        target = self._model.target_curve(requests, context, most, prefill)
        first = self._model.draft_curve(requests, context, requests + prefill, 1)
        return np.asarray(target + first[1])

    def draft_curve(
        self, requests: int, context: int, first_rows: int, most: int
    ) -> np.ndarray:
        """Cumulative seconds [most + 1] of 0..most draft steps beside the first.

        `most` itself may always be drafted: who has no room for more gets no more.
        """
        curve = self._model.draft_curve(requests, context, first_rows, max(most, 1))
        beside = curve - curve[1]
        beside[0] = 0.0
        beside[self._missing[self._missing < most]] = _NEVER
        return np.asarray(beside[: most + 1])

    def catchup_seconds(self, rows: int, context: int = 0) -> float:
        """Nothing is ever missed; a look at what was drafted costs our own work."""
        return _LOOK_SECONDS

    def overhead(self, requests: int) -> float:
        """Seconds of a round outside the forwards."""
        return self._model.overhead(requests)


class KeptPassTimes:
    """An `OnlineTime` over `KeptPass`: what is measured of a step refines its parts.

    Args:
        times: Learns from samples whose `steps` are the passes that ran, at least one.
        lengths: As of `KeptPass`.
    """

    def __init__(self, times: Times, lengths: Sequence[int] = ()) -> None:
        self._times = times
        self.model: TimeSource = KeptPass(times.model, lengths)

    @property
    def error(self) -> float:
        """Relative error of predictions; nan before the first measurement."""
        return self._times.error

    def observe(self, sample: RoundSample) -> None:
        """Learn from one measured `RoundSample`."""
        self._times.observe(sample)


TimeSource = TimeModel | RefinedTime | KeptPass
"""Step costs that decisions read: seconds of the parts of a decode step."""
Times = OnlineTime | KeptPassTimes
"""Time models that policies use: refined, with their error."""
