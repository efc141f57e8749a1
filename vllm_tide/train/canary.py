"""Goes back to the draft before when a new one serves worse.

Held-out acceptance is teacher-forced and optimistic; the served one has the last word.
Requests begun after the swap (older ones have draft KV of old weights) are compared
with the window before it (`comparison.py`); the decision is sequential: as early as
the interval allows, and at `canary_requests` at the latest. Pure: no clock, no torch.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal

from vllm_tide.config import DeployConfig
from vllm_tide.train.comparison import Comparison, compare
from vllm_tide.train.served import ServedRequest

Decision = Literal["keep", "rollback"]

MIN_COMPARED = 3
"""Requests before the first decision."""
MAX_OUTDONE = 2
"""Times in a row that a trial may go on with a newer draft: then one is decided on."""
PATIENCE = 4
"""Times `canary_requests` that are waited for when few can be compared."""
_MAX_BACKOFF = 1024  # cycles


@dataclass(frozen=True, slots=True)
class Verdict:
    """End of one trial.

    Attributes:
        decision: Keep the new draft, or go back to the one before.
        version: Of the new draft.
        reason: Why, in words.
        requests: Requests begun after the swap that had finished by then.
        comparison: What it rests on; None where nothing could be compared.
    """

    decision: Decision
    version: int
    reason: str
    requests: int
    comparison: Comparison | None = None


class Canary:
    """Trials of new drafts, one after another, on one or many engines.

    Versions are the trainer's numbers, the same for all engines (`feeds.py`).

    Args:
        config: `tide.deploy`.

    Attributes:
        rollbacks: Rollbacks ordered so far.
        backoff: Cycles left that publish nothing.
        comparison: Latest comparison of the trial under way or the last one.
    """

    def __init__(self, config: DeployConfig) -> None:
        self.config = config
        self.rollbacks = self.backoff = 0
        self.comparison: Comparison | None = None
        self._in_a_row = 0
        self._size = max(64, 4 * config.canary_requests)
        self._before: deque[ServedRequest] = deque(maxlen=self._size)
        self._after: list[ServedRequest] = []
        self._version = 0  # on trial, at the engines
        self._engines: set[str] = set()
        self._first = 0  # version that the window before is older than
        self._outdone = 0
        self._bad: set[int] = set()
        self._verdict: Verdict | None = None

    @property
    def undecided(self) -> bool:
        """Whether a trial is under way."""
        return bool(self._engines)

    @property
    def may_publish(self) -> bool:
        """Whether a better draft may be published now.

        Also during a trial that shows no harm so far, or that has had its requests and
        can say nothing (few are like those before): it then goes on with the newer
        draft against the same window. After a shift every draft is soon outdone, and
        waiting for a verdict on each would hold adaptation up. With none ever decided
        there would be nothing to go back to, so `MAX_OUTDONE` times in a row.
        """
        if self.backoff or not self.undecided:
            return not self.backoff
        if self._outdone >= MAX_OUTDONE:
            return False
        found = self.comparison
        if found is None or found.requests < MIN_COMPARED:
            return len(self._after) >= self.config.canary_requests
        return found.change + found.error >= -self.config.canary_tolerance

    def begin(self, engine: str, version: int) -> None:
        """An engine reports a new draft as installed.

        Engines that install the same draft during its trial join it. A newer version
        begins the trial anew, against the same window; an engine that only now installs
        an older one is on its way to the newer. Not to be called for a draft that was
        put back.
        """
        if not self.config.canary or version in self._bad:
            return
        if self.undecided and version < self._version:
            return
        if not self.undecided:
            self._first, self._outdone = version, 0
        elif version > self._version:
            self._outdone += 1
        if version != self._version or not self.undecided:
            self._version, self._engines = version, set()
            self._after, self.comparison = [], None
        self._engines.add(engine)
        if not any(r.rounds for r in self._before):
            self._end("keep", "nothing was drafted before, so nothing can have fallen")

    def observe(self, request: ServedRequest) -> None:
        """Take a finished request, also between trials: they are the window before."""
        if self._bad.intersection(request.versions):
            return
        if not self.undecided or request.last_version < self._first:
            self._before.append(request)
        elif request.first_version == self._version and request.whole:
            self._after.append(request)
            self._decide()

    def cycle_done(self) -> None:
        """A training cycle ended: one less to wait after a rollback."""
        self.backoff = max(0, self.backoff - 1)

    def poll(self) -> Verdict | None:
        """The verdict of a trial that has ended, once."""
        verdict, self._verdict = self._verdict, None
        return verdict

    def forget(self, engine: str) -> None:
        """An engine is gone, or serves an older head again.

        The last one ends the trial without a verdict.
        """
        self._engines.discard(engine)
        if not self._engines:
            self._after = []

    def overruled(self, version: int) -> None:
        """A draft was taken back by order: as if a trial had found it worse."""
        self.rollbacks += 1
        self.backoff = max(self.backoff, self.config.backoff_cycles)
        self._bad.add(version)
        self._break_off()

    def restart(self) -> None:
        """Forget the window before and any trial: another draft was put in place."""
        self._before.clear()
        self._break_off()

    def _break_off(self) -> None:
        """End the trial under way, if any, without a verdict."""
        self._engines, self._after, self._verdict = set(), [], None

    def _decide(self) -> None:
        cap, seen = self.config.canary_requests, len(self._after)
        self.comparison = found = compare(self._before, self._after, cap=cap)
        last = seen >= PATIENCE * cap
        if found is None:
            if last:
                self._end(*self._without_comparison())
            return
        if found.requests < MIN_COMPARED and not last:
            return
        allowed = -self.config.canary_tolerance
        said = (
            f"served acceptance length {found.before:.3f} -> {found.after:.3f} "
            f"({found.change:+.1%} +- {found.error:.1%}, {found.requests} requests)"
        )
        if found.change + found.bound < allowed:
            self._end("rollback", said)
        elif found.change - found.bound > allowed:
            self._end("keep", said)
        elif found.requests >= cap or last:
            # The held-out gate spoke for the new draft: the doubt is its benefit.
            worse = found.change + found.error < allowed
            self._end("rollback" if worse else "keep", said)

    def _without_comparison(self) -> tuple[Decision, str]:
        drafting = sum(1 for r in self._before if r.rounds)
        if any(r.rounds for r in self._after) or 2 * drafting < len(self._before):
            return "keep", "no request is like those before the swap"
        # It was worth drafting before and never is now: the controller gave it up.
        return "rollback", "drafting stopped with the new draft"

    def _end(self, decision: Decision, reason: str) -> None:
        verdict = Verdict(
            decision, self._version, reason, len(self._after), self.comparison
        )
        if decision == "keep":
            self._in_a_row = 0
            if self._after:
                # The next window is this draft's own, unless it is too short to be one.
                enough = len(self._after) >= self.config.canary_requests
                kept = [] if enough else [*self._before][-self._size // 2 :]
                self._before = deque([*kept, *self._after], maxlen=self._size)
        else:
            self.rollbacks += 1
            self.backoff = min(
                self.config.backoff_cycles << min(self._in_a_row, 16), _MAX_BACKOFF
            )
            self._in_a_row += 1
            self._bad.add(self._version)
        self._engines, self._after = set(), []
        self._verdict = verdict
