"""Adaptive drafter: predict, execute, correct (AdaSpec section 5.1), past the stairs.

After s draft steps the tokens so far have known survivals; for every longer length the
expected survivals come from history. Each length is worth its best verified set, so the
drafter and the verifier want the same thing. AdaSpec stops at the first length that
looks worse; with a staircase cost the best length may lie behind one, so all of them
are compared.

Survivals are counted in bins of -log(survival) (see `history`), which makes the best
set of every length one cumulative sum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from vllm_tide._shm import next_pays
from vllm_tide.control.costs import RoundCosts
from vllm_tide.control.history import CENTRES, CHANCE, GRID, GRID_STEP, History

_LENGTH = 2 * GRID
_UNCLEAR = 2  # of `next_pays`
_REUSE_ROUNDS = 8  # rounds that a forecast far from the threshold serves


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


def _bins(price: float) -> float:
    """Where a price lies on the grid of -log(survival); 0 and below: at its end."""
    return -math.log(price) / GRID_STEP if price > 0.0 else 2.0 * GRID


class Drafter:
    """Decides, step by step, whether another draft step pays.

    Args:
        history: What to expect of tokens not drafted yet.
        verify: The verified set will be chosen by value; False: everything drafted is
            verified.
    """

    def __init__(self, k_max: int, history: History, verify: bool = True) -> None:
        self._history = history
        self._verify = verify
        self._drafted = np.zeros((2, GRID))  # tokens and expected survivors per bin
        self._both = np.empty(0, np.intp)
        self._share = np.empty(0)
        self._last = (0, 0.0, 0.0)  # forecast: steps, tokens / n, seconds / plain
        self._reused = _REUSE_ROUNDS
        self._sets_space = np.zeros((2, k_max + 1, GRID))

    def begin(
        self,
        slots: np.ndarray,
        room: np.ndarray,
        costs: RoundCosts,
        enough: float = np.inf,
    ) -> Forecast:
        """Predict the round.

        Args:
            slots: int64 [n].
            room: int64 [n], most draft tokens of each request.
            enough: Gain over plain decoding beyond which an older forecast will do,
                if one verified step alone is seen to yield that gain.
        """
        most, n = costs.most, len(slots)
        self._both, self._share = self._history.classes(slots)
        self._drafted.fill(0.0)
        classes = np.bincount(self._both, self._share, len(CENTRES))
        if costs.limit == np.inf and self._reused < _REUSE_ROUNDS:
            able = int(np.count_nonzero(room))
            first = n + float(classes @ self._history.gains[0][:, 0]) * able / n
            spent = float(costs.target[able] + costs.draft[1]) + costs.extra
            steps, before, lasted = self._last
            if min(first / spent * costs.plain / n, before / lasted) >= enough:
                self._reused += 1
                before, lasted = before * n, lasted * costs.plain
                return Forecast(steps, before, lasted, before / lasted)
        sets = (classes @ self._history.sets).reshape(2, -1, GRID)[:, :most]
        if room.min() < most:  # Who stops early is taken to be like the rest.
            counts = np.bincount(room, minlength=most + 1)[:0:-1].cumsum()[::-1]
            sets *= (counts[:most] * (1.0 / n))[:, None]
        np.add.accumulate(sets, axis=1, out=sets)
        verified, expect = sets if self._verify else sets[:, :, -1:]
        time = costs.seconds(verified)
        time += costs.draft[1:, None] + costs.extra
        ratio = expect + costs.requests
        ratio /= time
        free = float(ratio.max())
        if costs.limit < np.inf:
            time -= costs.extra
            ratio[time > costs.loose] = 0.0
            if costs.limit < costs.loose:
                kept = np.where(time > costs.limit, 0.0, ratio)
                plain = n / costs.plain
                if costs.fair(max(kept.max(), plain), max(ratio.max(), plain)):
                    ratio = kept
            time += costs.extra
        best = int(ratio.argmax())
        steps, at = divmod(best, ratio.shape[1])
        if ratio[steps, at] <= 0.0:
            return Forecast(0, float(costs.requests), costs.plain, free)
        total, spent = float(expect[steps, at]) + n, float(time[steps, at])
        self._last = (steps + 1, total / n, spent / costs.plain)
        self._reused = 0
        return Forecast(steps + 1, total, spent, free)

    def go_on(
        self,
        step: int,
        depth: np.ndarray,
        survival: np.ndarray,
        room: np.ndarray,
        costs: RoundCosts,
        bar: float | None,
    ) -> bool:
        """Take the tokens of one draft step; whether to draft another step.

        Called once for each step of the round, from 1 on.

        Args:
            depth: float64 [n], -log(survival) of this step's tokens.
            survival: float64 [n], probability that the token is accepted.
            room: int64 [n], most draft tokens of each request.
            bar: Tokens per second that time is worth; None: judge by tokens per second
                of this round.
        """
        most, n = costs.most, len(depth)
        place = depth * (1.0 / GRID_STEP)
        bins = (place + 0.5).astype(np.intp)
        np.minimum(bins, GRID - 1, out=bins)
        least = int(room.min())
        kept = survival if least >= step else survival * (room >= step)
        self._drafted[0] += np.bincount(
            bins, None if kept is survival else room >= step, GRID
        )
        self._drafted[1] += np.bincount(bins, kept, GRID)
        if step >= most:
            return False
        share, able = self._share, n
        if least <= step:
            more = room > step
            able, kept = int(np.count_nonzero(more)), survival * more
            share = (share.reshape(2, n) * more).ravel()
        if not able:
            return False
        if bar is not None and costs.limit == np.inf:
            reach = step * n + able
            sure = self._shortcut(step, reach, place, share, kept, costs, bar)
            if sure is not None:
                return sure
        ahead = self._ahead(step, most, bins, share, kept)
        sets = self._sets_space[:, : most - step + 1]
        sets[:, 0] = self._drafted
        sets[:, 1:] = ahead
        np.add.accumulate(sets, axis=1, out=sets)
        np.add.accumulate(sets, axis=2, out=sets)
        # Each set ends at a bin, most likely tokens first.
        verified, tokens = sets if self._verify else sets[:, :, -1:]
        seconds = costs.seconds(verified)
        seconds += costs.draft[step : most + 1, None]
        tokens += n
        value = tokens / seconds if bar is None else tokens - bar * seconds
        if costs.limit < np.inf:
            value[seconds > costs.limit] = -np.inf
        # Stopping may also mean verifying nothing.
        stop = costs.plain + float(costs.draft[step])
        nothing = n / stop if bar is None else n - bar * stop
        return bool(value[1:].max() > max(float(value[0].max()), nothing))

    def _shortcut(
        self,
        step: int,
        reach: int,
        depth: np.ndarray,
        share: np.ndarray,
        kept: np.ndarray,
        costs: RoundCosts,
        bar: float,
    ) -> bool | None:
        """The same decision from bounds, where they are clear: most of the time.

        A token of survival s adds s - c to the value of a set, c the price of verifying
        it. At the lowest price on the cost curve the tokens worth it add at least what
        any set can gain: stop if no length pays for its drafting even so. At the
        highest they add at most that: go on if the next step pays still. Where the
        curve is a line both are the exact answer.

        Args:
            reach: Tokens verified after another step, at most.
            depth: float64 [n], -log(survival) of the last tokens in units of bins.
            share: float64 [2n], class shares of requests that can go on; 0 for others.
            kept: float64 [n], survival of their last token; 0 for others.
            bar: Tokens per second that time is worth.
        """
        table = self._history.excess[step]
        drafting = costs.draft[step + 1 : costs.most + 1] - costs.draft[step]
        drafting *= bar
        slope = costs.slope[:-1]
        cheap = _bins(bar * float(slope.min()))
        dear = _bins(bar * float(slope[:reach].max()))
        who = depth, kept, share, self._both
        pays = next_pays(*who, table, drafting, table.shape[1], GRID, cheap, dear)
        if pays == _UNCLEAR or (pays and not self._verify):
            return None
        return bool(pays)

    def _ahead(
        self,
        step: int,
        most: int,
        bins: np.ndarray,
        share: np.ndarray,
        kept: np.ndarray,
    ) -> np.ndarray:
        """Expected tokens of the steps to come and survivors among them.

        Args:
            bins: intp [n], bin of each request's last token.
            share: float64 [2n], class shares; 0 for requests that cannot go on.
            kept: float64 [n], survival of the last token; 0 for those.

        Returns:
            float64 [2, most - step, GRID].
        """
        n = len(bins)
        cells = self._both * GRID
        cells[:n] += bins
        cells[n:] += bins
        here = np.bincount(cells, share, len(CENTRES) * GRID)
        here = here.reshape(len(CENTRES), GRID)
        product = np.fft.rfft(here, _LENGTH)[:, None] * self._history.spectra[step]
        total = np.add.reduce(product, axis=0)
        ahead = np.empty((2, most - step, GRID))
        ahead[0] = np.fft.irfft(total, _LENGTH)[: most - step, :GRID]
        # Bins are coarse: what follows is scaled to the exact survivals.
        binned = float(np.add.reduce(here, axis=0) @ CHANCE)
        exact = float(np.add.reduce(kept)) / binned
        np.multiply(ahead[0], CHANCE * exact, out=ahead[1])
        return ahead
