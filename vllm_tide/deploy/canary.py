"""The canary: decides on served speed whether a new draft is kept or rolled back.

Held-out acceptance is teacher-forced and optimistic, so served speed decides. Requests
that begin after the swap, finished or not, are compared with the window before it
(`comparison.py`); older requests have draft KV of the old weights. The decision is
sequential: as early as the interval allows, at the latest when the first
`canary_requests` of them have finished. A better draft may supersede one under canary.
Baseline window and rollback draft then stay, and the requests of all superseded drafts
are compared together too, to detect accumulated harm. Pure: no clock, no torch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from vllm_tide.config import DeployConfig
from vllm_tide.deploy.comparison import Comparison, Window, compare
from vllm_tide.deploy.served import ServedRequest

Decision = Literal["keep", "rollback"]

MIN_COMPARED = 3
"""Requests before the first decision."""
MAX_WAIT = 4
"""Multiple of `canary_requests` to wait for if few requests can be compared."""
MIN_DRAFTED = 0.25
"""Minimum share of the compared requests with drafts, needed to keep a draft: an unused
draft may be slower once control uses it."""
LAST_SIGMAS = 2.0
"""Standard errors beyond the tolerance that mean a loss in the last evaluation."""
TOLERANCE = 0.02
"""Tolerated relative decrease of served speed over plain decoding."""
BACKOFF_CYCLES = 2
"""Cycles without publication after a rollback; doubled at each further one."""
_MAX_BACKOFF = 1024  # cycles
_UNCLEAR = f"; rolled back only if {TOLERANCE:.0%} and two standard errors slower"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of one trial; `comparison` is None if no request was comparable."""

    decision: Decision
    version: int
    reason: str
    requests: int
    comparison: Comparison | None = None


class Canary:
    """Sequential trials of new drafts on one or many engines.

    Versions are the trainer's, the same for all engines (`feeds.py`).
    """

    def __init__(self, config: DeployConfig) -> None:
        self.config = config
        self.rollbacks = self.ordered_rollbacks = self.backoff = 0
        self.comparison: Comparison | None = None
        self._chain: Comparison | None = None
        self._rollbacks_in_a_row = 0
        self._size = max(64, 4 * config.canary_requests)
        self._before: deque[ServedRequest] = deque()
        self._newest_evicted_start = -1  # of the requests dropped from `_before`
        self._oldest = 0  # oldest version in the baseline window
        self._window: Window | None = None  # baseline of the trial
        self._after: deque[ServedRequest] = deque(maxlen=2 * self._size)
        self._version = 0  # under canary, at the engines
        self._engines: set[str] = set()
        self._first = 0  # first version after the baseline window
        self._rejected: set[int] = set()
        self._verdict: Verdict | None = None

    @property
    def all_rollbacks(self) -> int:
        """Rollbacks after a trial or by command."""
        return self.rollbacks + self.ordered_rollbacks

    @property
    def undecided(self) -> bool:
        return bool(self._engines)

    @property
    def may_publish(self) -> bool:
        """True if a better draft may be published now.

        Also during a trial without harm so far, of the newest draft and of all that it
        superseded: waiting for each verdict would delay adaptation.
        """
        if self.backoff or not self.undecided:
            return not self.backoff
        return not (self._harmful(self.comparison) or self._harmful(self._chain))

    def _harmful(self, comparison: Comparison | None) -> bool:
        if comparison is None or comparison.requests < MIN_COMPARED:
            return False
        return comparison.change + comparison.error < -TOLERANCE

    def begin(self, engine: str, version: int) -> None:
        """Begin or extend a trial: an engine has installed a new draft.

        Engines that install the same draft during its trial join it. A newer version
        supersedes the one under canary, against the same window; an older one is
        ignored, as the engine will install the newer. Do not call it for a republished
        draft.
        """
        if not self.config.canary or version in self._rejected:
            return
        if self.undecided and version < self._version:
            return
        if not self.undecided:
            self._first = version
            self._after.clear()
            self._chain = None
        if version != self._version or not self.undecided:
            self._version, self._engines, self.comparison = version, set(), None
        self._engines.add(engine)
        self._window = None  # the window then includes requests of this engine

    def observe(self, request: ServedRequest) -> None:
        """Add a finished request; between trials they form the baseline window."""
        first = request.first_version
        if first in self._rejected or not request.whole:
            return
        if self.undecided and first >= self._first:
            self._after.append(request)
        elif first >= self._oldest and request.cells:  # else not comparable
            self._take_before(request)

    def _take_before(self, request: ServedRequest) -> None:
        self._before.append(request)
        while len(self._before) > self._size:
            evicted = self._before.popleft().began
            self._newest_evicted_start = max(self._newest_evicted_start, evicted)

    def evaluate(self, others: Iterable[ServedRequest] = ()) -> None:
        """Compare and decide if possible; `others`: unfinished requests."""
        if not self.undecided:
            return
        others = [
            r for r in others if r.whole and r.first_version not in self._rejected
        ]
        chain = [*self._after, *(r for r in others if r.first_version >= self._first)]
        newest = [r for r in chain if r.first_version == self._version]
        if not newest:
            return
        if self._window is None:
            every = (*self._before, *others)
            self._window = Window([r for r in every if self._is_before(r)])
        cap = self.config.canary_requests
        newest.sort(key=lambda request: request.began)
        self.comparison = compare(self._window, newest, cap=cap, limit=cap)
        if self.comparison is not None and not _has_drafts(self.comparison):
            # The first requests have few drafts: try the last.
            self.comparison = compare(self._window, newest[-cap:], cap=cap)
        self._chain = None
        if len(newest) < len(chain):
            self._chain = compare(self._window, chain, cap=cap)
        self._decide(len(newest) >= MAX_WAIT * cap)

    def _is_before(self, request: ServedRequest) -> bool:
        """Return whether no request since this one was dropped from the window."""
        in_window = self._oldest <= request.first_version < self._first
        return in_window and request.began > self._newest_evicted_start

    def cycle_done(self) -> None:
        """Count down the cycles to wait after a rollback."""
        self.backoff = max(0, self.backoff - 1)

    def poll(self) -> Verdict | None:
        verdict, self._verdict = self._verdict, None
        return verdict

    def forget(self, engine: str) -> None:
        """Remove an engine that left or has an older draft; the last ends the trial."""
        self._engines.discard(engine)
        if not self._engines:
            self._after.clear()

    def reject(self, version: int) -> None:
        """Record a rollback by command, like one after a trial."""
        self.ordered_rollbacks += 1
        self.backoff = max(self.backoff, BACKOFF_CYCLES)
        first = self._first if self.undecided else version
        self._rejected.update(range(first, version + 1))
        self.comparison = self._verdict = None
        self._engines = set()
        self._after.clear()

    def restore(self, version: int, same: int | None = None) -> None:
        """Begin the baseline window anew: another draft is served, from `version` on.

        Args:
            same: An earlier version with the same weights; its requests stay.
        """
        self._before = deque(r for r in self._before if r.first_version == same)
        self._oldest = version if same is None else same

    def _decide(self, last: bool) -> None:
        """Decide on the newest draft by its requests, or those of all superseded."""
        result = self.comparison
        if result is None or result.requests < MIN_COMPARED:
            if last:
                self._end("keep", "no request is comparable with those before the swap")
            return
        allowed = -TOLERANCE
        last |= result.requests >= self.config.canary_requests and result.settled
        chain = self._chain
        if result.change + result.bound < allowed:
            self._end("rollback", _describe(result))
        elif not _has_drafts(result):
            return  # too few drafts: no evidence for or against
        elif result.change - result.bound > allowed:
            self._end("keep", _describe(result))
        elif last:
            # The gate preferred the new draft, so it is kept unless clearly worse.
            worse = result.change + LAST_SIGMAS * result.error < allowed
            unclear = not worse and result.change < allowed
            reason = _describe(result) + (_UNCLEAR if unclear else "")
            self._end("rollback" if worse else "keep", reason)
        elif (
            chain is not None
            and chain.change + chain.bound < allowed
            and result.change < allowed
        ):
            prefix = "with the superseded drafts: "
            self._end("rollback", prefix + _describe(chain))

    def _end(self, decision: Decision, reason: str) -> None:
        result = self.comparison
        requests = 0 if result is None else result.requests
        self._verdict = Verdict(decision, self._version, reason, requests, result)
        if decision == "keep":
            self._rollbacks_in_a_row = 0
            own = [r for r in self._after if r.first_version == self._version]
            own = [r for r in own if r.cells]
            self._rejected.update(range(self._first, self._version))
            # The next window has this draft's requests only, if there are enough.
            if len(own) >= self.config.canary_requests:
                self._oldest, self._before = self._version, deque()
            for request in own:
                self._take_before(request)
        else:
            self.rollbacks += 1
            self.backoff = min(
                BACKOFF_CYCLES << min(self._rollbacks_in_a_row, 16), _MAX_BACKOFF
            )
            self._rollbacks_in_a_row += 1
            self._rejected.update(range(self._first, self._version + 1))
        self._engines = set()
        self._after.clear()


def _has_drafts(result: Comparison) -> bool:
    """Return whether enough of the compared requests have drafts."""
    return result.drafted >= max(MIN_COMPARED, MIN_DRAFTED * result.requests)


def _describe(result: Comparison) -> str:
    return (
        f"served speed over plain {result.before:.3f} -> {result.after:.3f} "
        f"({result.change:+.1%} +- {result.error:.1%}, {result.requests} requests)"
    )
