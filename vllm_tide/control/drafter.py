"""Adaptive drafter: predict, execute, correct (AdaSpec section 5.1), past the stairs.

After s draft steps the tokens so far have known survivals; for every longer length the
expected survivals come from history. Each length is worth its best verified set, so the
drafter and the verifier want the same thing. AdaSpec stops at the first length that
looks worse; with a staircase cost the best length may lie behind one, so all of them
are compared.

Survivals are counted in bins of -log(survival) (see `history`), which makes the best
set of every length one cumulative sum. Both questions are a call of C++ each
(`csrc/control.h`): tokens wait for the answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import nan

import numpy as np

from vllm_tide._shm import draft_on, forecast
from vllm_tide.control.costs import CLIENT_SHARE, RoundCosts
from vllm_tide.control.history import CHANCE, GRID, GRID_STEP, History


@dataclass(frozen=True, slots=True)
class Forecast:
    """The best round with at least one draft step, before any confidence is known.

    Attributes:
        steps: Its draft steps; 0 if the limit allows none.
        seconds: Its seconds, the spread price of coming on included.
        free: `tokens / seconds` of the best round if there were no limit.
    """

    steps: int
    tokens: float
    seconds: float
    free: float


class Drafter:
    """Decides, step by step, whether another draft step pays.

    Args:
        history: What to expect of tokens not drafted yet.
        verify: The verified set will be chosen by value; False: everything drafted is
            verified.
    """

    def __init__(self, history: History, verify: bool = True) -> None:
        self._history = history
        self._verify = verify
        self._drafted = np.zeros((2, GRID))  # tokens and expected survivors per bin
        self._depth = np.empty(0)  # -log(survival) of each request's last token
        # The two classes of each request, and how far it belongs to them.
        self._both = np.empty(0, np.int64)
        self._share = np.empty(0)

    def begin(self, slots: np.ndarray, room: np.ndarray, costs: RoundCosts) -> Forecast:
        """Predict the round; clients' limits that cost too much are dropped of `costs`.

        Args:
            slots: int64 [n].
            room: int64 [n], most draft tokens of each request.
        """
        n, history = len(slots), self._history
        place, mean, keep = history.levels()
        self._drafted.fill(0.0)
        self._depth = np.zeros(n)
        self._both, self._share = np.empty(2 * n, np.int64), np.empty(2 * n)
        steps, tokens, seconds, free, loosened = forecast(
            costs.target,
            costs.draft,
            costs.extra,
            costs.limit,
            costs.loose,
            CHANCE,
            self._both,
            self._share,
            slots,
            place,
            mean,
            keep,
            room,
            history.sets,
            history.k_max,
            not self._verify,
            CLIENT_SHARE,
        )
        if loosened:
            costs.limit = costs.loose
        return Forecast(steps, tokens, seconds, free)

    def go_on(
        self,
        step: int,
        values: np.ndarray,
        survival: np.ndarray,
        room: np.ndarray,
        wanted: np.ndarray,
        costs: RoundCosts,
        bar: float | None,
    ) -> bool:
        """Take the tokens of one draft step; whether to draft another step.

        Called once for each step of the round, from 1 on.

        Args:
            values: float64 [3, most, n], the last of the three the probability that a
                token is accepted if all before it are.
            survival: float32 [most, n]; row `step - 1` is written, `ABSENT` where a
                request has no room for such a token.
            room: int64 [n], most draft tokens of each request.
            wanted: int64 [n], the same, less where others are better (a memory's).
            bar: Tokens per second that time is worth; None: judge by tokens per second
                of this round.
        """
        history = self._history
        return draft_on(
            costs.target,
            costs.draft,
            costs.limit,
            CHANCE,
            self._both,
            self._share,
            step,
            values,
            self._depth,
            survival,
            room,
            wanted,
            self._drafted,
            history.gained[min(step, history.k_max - 1)],
            history.k_max,
            1.0 / GRID_STEP,
            nan if bar is None else bar,
            not self._verify,
        )
