"""Goes back to the draft before when a new one serves worse.

Held-out acceptance is teacher-forced and optimistic; what is served has the last word.
Requests begun after the swap (older ones have draft KV of old weights) are compared
with the window before it (`comparison.py`), ended or not; the decision is sequential:
as early as the interval allows, and when the first `canary_requests` of them have ended
at the latest. A better draft may supersede one under canary: the window before and the
draft to go back to stay, and the requests of all of them together are compared too, so
that harm which adds up is found. Pure: no clock, no torch.
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
PATIENCE = 4
"""Times `canary_requests` that are waited for when few can be compared."""
MIN_DRAFTED = 0.25
"""Share of the requests compared that were drafted for, without which a draft is not
kept: it may cost when control comes to use it."""
LAST_SIGMAS = 2.0
"""Standard errors beyond the tolerance that the last look takes for a loss."""
TOLERANCE = 0.02
"""Relative fall of served speed over plain decoding that is let pass."""
BACKOFF_CYCLES = 2
"""Cycles that publish nothing after a rollback; doubled at each further one."""
_MAX_BACKOFF = 1024  # cycles


@dataclass(frozen=True, slots=True)
class Verdict:
    """End of one trial; `comparison` is None where nothing could be compared."""

    decision: Decision
    version: int
    reason: str
    requests: int
    comparison: Comparison | None = None


class Canary:
    """Trials of new drafts, one after another, on one or many engines.

    Versions are the trainer's numbers, the same for all engines (`feeds.py`).
    """

    def __init__(self, config: DeployConfig) -> None:
        self.config = config
        self.rollbacks = self.backoff = 0
        self.comparison: Comparison | None = None
        self._chain: Comparison | None = None
        self._in_a_row = 0
        self._size = max(64, 4 * config.canary_requests)
        self._before: deque[ServedRequest] = deque()
        self._let_go = -1  # newest beginning of a request that the window let go
        self._oldest = 0  # version that the window before is not older than
        self._window: Window | None = None  # of the trial
        self._after: deque[ServedRequest] = deque(maxlen=2 * self._size)
        self._version = 0  # under canary, at the engines
        self._engines: set[str] = set()
        self._first = 0  # version that the window before is older than
        self._bad: set[int] = set()
        self._verdict: Verdict | None = None

    @property
    def undecided(self) -> bool:
        return bool(self._engines)

    @property
    def may_publish(self) -> bool:
        """True if a better draft may be published now.

        Also during a trial that shows no harm so far, of the newest draft or of all
        that it superseded: waiting for a verdict on each would hold adaptation up.
        """
        if self.backoff or not self.undecided:
            return not self.backoff
        return not (self._harmful(self.comparison) or self._harmful(self._chain))

    def _harmful(self, found: Comparison | None) -> bool:
        if found is None or found.requests < MIN_COMPARED:
            return False
        return found.change + found.error < -TOLERANCE

    def begin(self, engine: str, version: int) -> None:
        """An engine reports a new draft as installed.

        Engines that install the same draft during its trial join it. A newer version
        supersedes the one under canary, against the same window; an engine that only
        now installs an older one is on its way to the newer. Not to be called for a
        draft that was put back.
        """
        if not self.config.canary or version in self._bad:
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
        self._window = None  # it may have requests of this engine that are new to it

    def observe(self, request: ServedRequest) -> None:
        """Take an ended request, also between trials: they are the window before."""
        first = request.first_version
        if first in self._bad or not request.whole:
            return
        if self.undecided and first >= self._first:
            self._after.append(request)
        elif first >= self._oldest and request.cells:  # else it says nothing
            self._take_before(request)

    def _take_before(self, request: ServedRequest) -> None:
        self._before.append(request)
        while len(self._before) > self._size:
            self._let_go = max(self._let_go, self._before.popleft().began)

    def look(self, others: Iterable[ServedRequest] = ()) -> None:
        """Decide if that can be done; `others`: requests that have not ended."""
        if not self.undecided:
            return
        others = [r for r in others if r.whole and r.first_version not in self._bad]
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
        if self.comparison is not None and not _used(self.comparison):
            # Hardly anything was drafted in the first ones: perhaps in the last.
            self.comparison = compare(self._window, newest[-cap:], cap=cap)
        self._chain = None
        if len(newest) < len(chain):
            self._chain = compare(self._window, chain, cap=cap)
        self._decide(len(newest) >= PATIENCE * cap)

    def _is_before(self, request: ServedRequest) -> bool:
        """True if the window before holds every request that began since this one."""
        first = request.first_version
        return self._oldest <= first < self._first and request.began > self._let_go

    def cycle_done(self) -> None:
        """A training cycle ended: one less to wait after a rollback."""
        self.backoff = max(0, self.backoff - 1)

    def poll(self) -> Verdict | None:
        verdict, self._verdict = self._verdict, None
        return verdict

    def forget(self, engine: str) -> None:
        """An engine is gone, or has an older draft: the last ends the trial."""
        self._engines.discard(engine)
        if not self._engines:
            self._after.clear()

    def overruled(self, version: int) -> None:
        """A draft was rolled back by command: as if a trial had found it worse."""
        self.rollbacks += 1
        self.backoff = max(self.backoff, BACKOFF_CYCLES)
        first = self._first if self.undecided else version
        self._bad.update(range(first, version + 1))
        self._break_off()

    def restart(self) -> None:
        """Forget the window before and any trial: another draft was put in place."""
        self._before.clear()
        self._break_off()

    def _break_off(self) -> None:
        self._engines, self._verdict = set(), None
        self._after.clear()

    def _decide(self, last: bool) -> None:
        """Decide on the newest draft by its own requests, or those of the chain."""
        found = self.comparison
        if found is None or found.requests < MIN_COMPARED:
            if last:
                self._end("keep", "no request is like those before the swap")
            return
        allowed = -TOLERANCE
        last |= found.requests >= self.config.canary_requests and found.settled
        chain = self._chain
        if found.change + found.bound < allowed:
            self._end("rollback", _said(found))
        elif not _used(found):
            return  # control does not draft with it: nothing is known for or against
        elif found.change - found.bound > allowed:
            self._end("keep", _said(found))
        elif last:
            # The held-out gate spoke for the new draft: the doubt is its benefit.
            worse = found.change + LAST_SIGMAS * found.error < allowed
            self._end("rollback" if worse else "keep", _said(found))
        elif (
            chain is not None
            and chain.change + chain.bound < allowed
            and found.change < allowed
        ):
            superseded = "with the drafts that it superseded: "
            self._end("rollback", superseded + _said(chain))

    def _end(self, decision: Decision, reason: str) -> None:
        found = self.comparison
        requests = 0 if found is None else found.requests
        self._verdict = Verdict(decision, self._version, reason, requests, found)
        if decision == "keep":
            self._in_a_row = 0
            own = [
                r for r in self._after if r.first_version == self._version and r.cells
            ]
            self._bad.update(range(self._first, self._version))
            # The next window is this draft's own, unless it is too short to be one.
            if len(own) >= self.config.canary_requests:
                self._oldest, self._before = self._version, deque()
            for request in own:
                self._take_before(request)
        else:
            self.rollbacks += 1
            self.backoff = min(BACKOFF_CYCLES << min(self._in_a_row, 16), _MAX_BACKOFF)
            self._in_a_row += 1
            self._bad.update(range(self._first, self._version + 1))
        self._engines = set()
        self._after.clear()


def _used(found: Comparison) -> bool:
    """True if control drafted in enough of the requests compared."""
    return found.drafted >= max(MIN_COMPARED, MIN_DRAFTED * found.requests)


def _said(found: Comparison) -> str:
    return (
        f"served speed over plain {found.before:.3f} -> {found.after:.3f} "
        f"({found.change:+.1%} +- {found.error:.1%}, {found.requests} requests)"
    )
