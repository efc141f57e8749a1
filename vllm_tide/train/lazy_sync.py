"""How far apart publications should be (Aurora section 4.2, figure 5, made a rule).

A swap costs c seconds of serving. Waiting costs too: training goes on, and every
request is served by a draft worse than the one at hand. Say the draft at hand saves g
seconds per request after n requests of waiting, growing evenly, r = g / n. With a
publication every N requests, the loss per request is::

    f(N) = c / N + r N / 2        f'(N) = 0  =>  N* = sqrt(2 c / r) = sqrt(2 c n / g)

the economic order quantity (Harris 1913). At N* the gain lost so far, r N*^2 / 2, is
just c: so waiting ends when it has cost as much as a swap. r is measured anew at every
evaluation: a shift, after which training gains fast, shortens the wait at once, and a
saturated draft lengthens it. Pure: the caller's clock, no torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from vllm_tide.config import DeployConfig

MAX_REQUESTS = 10_000
"""Longest chosen wait: with no gain in sight there is none to be had by waiting."""
_NEWEST = 0.3  # share of the newest swap in the cost of one
_RATE_REQUESTS = 64.0  # requests over which the seconds per request are averaged


@dataclass(frozen=True, slots=True)
class Spacing:
    """Least distance from the last publication.

    Attributes:
        requests: Requests.
        seconds: Seconds.
        reason: Where the numbers come from.
    """

    requests: float
    seconds: float
    reason: str


def best_spacing(swap_seconds: float, gain_seconds: float, after: float) -> float:
    """N*, the spacing in requests at which swaps and waiting cost least.

    Args:
        swap_seconds: Seconds of serving that one swap costs, c.
        gain_seconds: Seconds the new draft saves per request, g.
        after: Requests of waiting in which that gain arose, n.
    """
    if swap_seconds <= 0.0:
        return 0.0
    if gain_seconds <= 0.0:
        return float(MAX_REQUESTS)
    return min(math.sqrt(2.0 * swap_seconds * after / gain_seconds), MAX_REQUESTS)


def loss_per_request(
    spacing: float, swap_seconds: float, gain_seconds: float, after: float
) -> float:
    """f(N): seconds per request lost to swaps and to waiting; see the module."""
    return swap_seconds / spacing + gain_seconds / after * spacing / 2.0


class LazySync:
    """Keeps publications apart.

    Args:
        config: `tide.deploy`; where `min_requests` or `min_seconds` is null it is
            chosen from what was measured.

    Attributes:
        requests: Requests since the last publication.
        swap_seconds: Cost of a swap, newest weighing most; 0 until measured.
        request_seconds: Serving time per request; 0 until measured.
        gain_seconds: Saved per request by the candidate at the last evaluation.
    """

    def __init__(self, config: DeployConfig) -> None:
        self.config = config
        self.requests = 0
        self.swap_seconds = self.request_seconds = self.gain_seconds = 0.0
        self._gain_after = 0.0
        self._published: float | None = None
        self._last: float | None = None
        self._measured = False

    def request_done(self, now: float, busy_seconds: float | None = None) -> None:
        """A request was finished.

        Args:
            now: Monotonic clock (seconds).
            busy_seconds: Serving time it took of all engines together; None takes the
                time since the request before, which is that of a busy server and too
                much for an idle one.
        """
        self.requests += 1
        seconds = busy_seconds
        if seconds is None and self._last is not None:
            seconds = now - self._last
        self._last = now
        if seconds is None or seconds < 0.0:
            return
        share = 1.0 / _RATE_REQUESTS if self.request_seconds else 1.0
        self.request_seconds += share * (seconds - self.request_seconds)

    def swap_measured(self, seconds: float) -> None:
        """An installation held serving up this long (seconds), on one engine."""
        share = _NEWEST if self._measured else 1.0
        self.swap_seconds += share * (seconds - self.swap_seconds)
        self._measured = True

    def gain_measured(self, live_length: float, new_length: float) -> None:
        """The candidate was evaluated.

        A request of m tokens takes m / length rounds, so the better draft saves the
        share 1 - live / new of its time.

        Args:
            live_length: Acceptance length of the draft served now (tokens).
            new_length: Acceptance length of the candidate (tokens).
        """
        share = 1.0 - live_length / new_length if new_length > 0.0 else 0.0
        if not math.isfinite(share):
            return
        self.gain_seconds = max(0.0, share) * self.request_seconds
        self._gain_after = float(max(1, self.requests))

    def published(self, now: float) -> None:
        """A draft was published at `now`: waiting begins."""
        self.requests = 0
        self._published = now

    def spacing(self) -> Spacing:
        """Least distance between the last publication and the next."""
        fixed_requests, fixed_seconds = (
            self.config.min_requests,
            self.config.min_seconds,
        )
        if fixed_requests is not None and fixed_seconds is not None:
            return Spacing(fixed_requests, fixed_seconds, "as configured")
        if not self._measured or not self._gain_after:
            chosen, reason = 0.0, "nothing measured yet"
        else:
            chosen = best_spacing(
                self.swap_seconds, self.gain_seconds, self._gain_after
            )
            reason = (
                f"a swap costs {1e3 * self.swap_seconds:.1f} ms, the candidate saves "
                f"{1e3 * self.gain_seconds:.2f} ms per request after "
                f"{self._gain_after:.0f} requests"
            )
        seconds = chosen * self.request_seconds
        return Spacing(
            chosen if fixed_requests is None else fixed_requests,
            seconds if fixed_seconds is None else fixed_seconds,
            reason,
        )

    def ready(self, now: float) -> bool:
        """Whether the next publication is far enough from the last one."""
        if self._published is None:
            return True
        spacing = self.spacing()
        waited = now - self._published
        return self.requests >= spacing.requests and waited >= spacing.seconds
