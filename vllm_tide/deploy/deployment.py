"""Publication of candidates, and rollback after a negative canary verdict.

Stores the master weights of every version that is served or being installed, so that a
draft that is refused by an engine or rolled back can be replaced. Order of events for
one version: `offer` publishes it, engines install it, the canary compares served speed,
and the version is kept (and stored on disk), rolled back or superseded. A version here
is the number of a draft (`transport/versions.py`).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import Tensor

from vllm_tide.config import TideConfig
from vllm_tide.deploy.canary import Canary, Verdict
from vllm_tide.deploy.served import ServedRequest, ServedRequests
from vllm_tide.deploy.store import DraftStore, StoredDraft, has_weights
from vllm_tide.draft.config import DraftError
from vllm_tide.draft.kind import canonical
from vllm_tide.draft.tensor_bytes import from_bytes, to_bytes
from vllm_tide.train.evaluate import Evaluation
from vllm_tide.train.judgement import CycleResult
from vllm_tide.train.trainer import Trainer
from vllm_tide.transport.feeds import EngineVersions, Feeds
from vllm_tide.transport.shm import TransportError
from vllm_tide.transport.versions import number_of

logger = logging.getLogger("vllm_tide.train")

RETRY_S = 5.0
"""Time after which a failed publication of the base or rollback is retried (s)."""
CANARY_TIME_SHARE = 0.003
"""Maximum share of the trainer's time for canary evaluations, unless the interval
between them would exceed `MAX_CANARY_INTERVAL_S`."""
MAX_CANARY_INTERVAL_S = 5.0

INITIAL = {"initial": True}
"""Figures of the draft that the servers started with."""
_FACTS = ("rollback_of", "to", "reason", "restored")  # of a publication, not a draft

Master = dict[str, Tensor]
AddEvent = Callable[..., None]
"""Reports an event by name, with fields as keywords."""


@dataclass
class DraftState:
    """A draft that is served, being installed, or may be restored.

    Attributes:
        master: Its master weights.
        figures: Measurements at its first publication.
        republished: Its weights were served before, so no canary is needed.
        stored: The stored draft that it was restored from.
        first: Its first version, if it was published again; 0 is the initial draft.
        untried: It comes from the store and was not served since the restart.
    """

    master: Master
    figures: dict[str, Any] = field(default_factory=dict)
    republished: bool = False
    stored: StoredDraft | None = None
    first: int | None = None
    untried: bool = False


class Deployment:
    """Controls which draft the engines serve.

    Args:
        trainer: Its live draft is the last one deployed and not rolled back.
        store: Stores kept drafts for a restart; None: no store.
        initial: Reads the draft that the servers started with.

    Attributes:
        published: Newest published version; 0 without one.
        publications: Number of trained drafts published, without repeated ones.
        good: The version that a rollback restores: the last one kept and installed.
    """

    def __init__(
        self,
        feeds: Feeds,
        trainer: Trainer,
        config: TideConfig,
        store: DraftStore | None,
        add_event: AddEvent,
        served: ServedRequests,
        initial: Callable[[], Master],
    ) -> None:
        self._initial = initial
        self._feeds, self._trainer, self._add_event = feeds, trainer, add_event
        self._store, self._served = store, served
        self.canary, self._config = Canary(config.deploy), config.deploy
        self._next_evaluation = 0.0  # monotonic (s)
        self._requests = 0  # since the last publication
        self._published_at = -math.inf  # monotonic (s)
        self.published = self.installed = 0
        self.publications = self.refusals = 0
        self.last_publish_unix: float | None = None
        self._drafts = {0: DraftState(trainer.snapshot(), dict(INITIAL))}
        self.good = 0
        self._superseded: tuple[int, DraftState] | None = None  # `good` before it
        self._seen: dict[str, EngineVersions] = {}
        self._pending: Verdict | None = None  # rollback not yet sent to any engine
        self._retry_at = 0.0

    def adopt(self) -> None:
        """Resume after a restart from the engines' draft, else from the store.

        If an engine serves a version with unknown weights, the last stored draft or the
        checkpoint's is published in its place.
        """
        newest = self._feeds.latest()
        serving = max((v.installed for v in self._feeds.versions().values()), default=0)
        if newest is not None:
            version = number_of(newest.version)
            self._trainer.restore(canonical(from_bytes(newest.tensors)))
            master = self._trainer.snapshot()
            figures = {k: v for k, v in newest.meta.items() if k not in _FACTS}
            first = 0 if figures.get("initial") else None
            self._drafts[version] = DraftState(master, figures, True, first=first)
            self.published = self.installed = self.good = version
            return
        stored = None if self._store is None else self._store.newest()
        if stored is None and not serving and not self._feeds.has_fast_draft:
            return
        if serving and (stored is None or stored.version != serving):
            logger.warning("no weights of served version %d are available", serving)
        draft, number = self._drafts[0], 0
        if stored is not None:
            draft, number = _from_store(stored), stored.version
        try:
            version = self.republish(draft, {"restored": number})
        except TransportError as error:
            self._add_event("unpublished", restored=number, reason=str(error))
            return
        self._drafts[version].untried = stored is not None
        self.canary.restore(version)
        self._add_event("restored", version=version, stored=number)

    def republish(self, draft: DraftState, facts: dict[str, Any]) -> int:
        """Publish an earlier draft again and continue training from it.

        Raises:
            TransportError: It was sent to no engine; nothing is changed.
        """
        version = self._publish(facts, draft)
        self._drafts[version].republished = True
        self._drafts[version].stored = draft.stored
        again = facts.get("to", facts.get("restored"))
        self._drafts[version].first = again if draft.first is None else draft.first
        return version

    def renumber(self) -> None:
        """Publish the deployed draft under a new number, if no other draft is expected.

        Needed if an engine has a higher number, or no step is left for a fast draft.
        """
        now = time.monotonic()
        swapping = self._pending is not None or self.installed != self.published
        if swapping or self.canary.undecided or now < self._retry_at:
            return
        self._retry_at = now + RETRY_S
        try:
            known = self._drafts.get(self.published, DraftState({}))
            draft = replace(known, master=self._trainer.snapshot())
            self.republish(draft, {"restored": self.published})
        except TransportError as error:
            self._add_event("unpublished", restored=self.published, reason=str(error))

    @property
    def origin(self) -> str:
        """Name of the published draft if it was restored, else ""."""
        draft = self._drafts.get(self.published)
        if draft is None:
            return ""
        if draft.stored is not None:
            return f"stored as version {draft.stored.version}"
        if draft.first == 0:
            return "the initial draft"
        return f"first version {draft.first}" if draft.first else ""

    def observe(self, request: ServedRequest) -> None:
        self._requests += 1
        self.canary.observe(request)

    def tick(self) -> None:
        """Read the engines' versions; execute the canary's verdict."""
        versions = self._feeds.versions()
        for engine, state in versions.items():
            before = self._seen.get(engine)
            self._seen[engine] = state
            if before is None or state.installed != before.installed:
                self._on_install(engine, state, first=before is None)
        for engine in [e for e in self._seen if e not in versions]:
            del self._seen[engine]
            self.canary.forget(engine)
        self._read_refusals(versions)
        if self._feeds.needs_new_number:
            self.renumber()
        if self._pending is not None:
            if time.monotonic() >= self._retry_at:
                self._roll_back(self._pending)
            return
        self._evaluate_canary()
        verdict = self.canary.poll()
        if verdict is not None and verdict.decision == "rollback":
            self._roll_back(verdict)
        elif verdict is not None:
            self._keep(verdict.version, verdict.reason)

    def _evaluate_canary(self) -> None:
        """Evaluate the canary, including unfinished requests."""
        if self.canary.undecided and time.monotonic() >= self._next_evaluation:
            began = time.thread_time()
            self.canary.evaluate(self._served.open_requests())
            spent = time.thread_time() - began
            interval = min(spent / CANARY_TIME_SHARE, MAX_CANARY_INTERVAL_S)
            self._next_evaluation = time.monotonic() + interval

    def offer(self, result: CycleResult, now: float) -> None:
        """Publish the candidate of a judged cycle if gate, canary and spacing allow it.

        Otherwise, or if it was sent to no engine, training continues from it. `now` is
        monotonic (s).
        """
        self.canary.cycle_done()
        if not (result.publish and self.canary.may_publish and self._apart(now)):
            return
        if self._pending is not None:
            return
        facts = {
            "holdout_acceptance_new": _figure(result.new),
            "holdout_acceptance_live": _figure(result.live),
            "gain": result.gain,
            "gain_error": result.gain_error,
            "holdout_requests": len(result.new.requests) if result.new else 0,
            "fresh_requests": result.fresh_requests,
            "steps": self._trainer.steps,
            "loss": result.loss,
        }
        try:
            self._publish(facts)
        except TransportError as error:
            self._add_event("unpublished", reason=str(error))

    def rollback(self, reason: str) -> dict[str, int]:
        """Publish the draft before the newest one again (command of an operator).

        A draft under canary is replaced by the one kept before it, a kept one by the
        one kept before that, if known or stored. The rejected draft is removed from the
        store, and publication waits as after any rollback.

        Returns:
            Rolled-back `version`, restored version `to`, its new number `served_as`,
            and the version as which it is stored (`stored`; 0: not known to be).

        Raises:
            TransportError: There is no earlier draft, or it was sent to no engine. The
                served draft is not changed, but it is removed from the store.
        """
        bad, live = self.published, self._trainer.live_tensors()
        to, draft = self._before(bad, live)
        if self._store is not None:
            # Compare weights, as version numbers restart with every server. First, so
            # that a kill in between leaves no rejected draft for the next server.
            for stored in list(self._store.drafts()):
                if has_weights(stored.master, live):
                    self._store.drop(stored)
        facts = {"rollback_of": bad, "to": to, "reason": reason}
        served_as = self.republish(draft, facts)
        self._pending = self._superseded = None
        self._drafts.pop(bad, None)
        self.good = served_as
        self.canary.reject(bad)
        self.canary.restore(served_as, None if draft.stored else to or None)
        self._add_event("rollback", version=bad, to=to, reason=reason)
        number = draft.stored.version if draft.stored else 0
        return {"version": bad, "to": to, "served_as": served_as, "stored": number}

    def _before(
        self, version: int, live: Mapping[str, Tensor]
    ) -> tuple[int, DraftState]:
        """Return the draft that a version replaced.

        Raises:
            TransportError: It is not known.
        """
        if self.good != version and self.good in self._drafts:
            return self.good, self._drafts[self.good]
        if self._superseded is not None:
            return self._superseded
        for stored in () if self._store is None else self._store.drafts():
            if not has_weights(stored.master, live):
                return stored.version, _from_store(stored)
        if version:
            initial = self._initial()
            if not has_weights(initial, {n: live[n] for n in initial if n in live}):
                return 0, DraftState(initial, dict(INITIAL))
        raise TransportError(
            f"version {version} is the initial draft: nothing was rolled back"
            if version
            else "no draft has been published: there is nothing to roll back"
        )

    @property
    def waiting_for(self) -> str:
        """Reason why no draft can be published now; empty if one can."""
        if self._pending is not None:
            return "a rollback that no engine has received yet"
        if self.canary.backoff:
            some = (
                "one cycle"
                if self.canary.backoff == 1
                else f"{self.canary.backoff} cycles"
            )
            return f"{some} after a rollback"
        if not self.canary.may_publish:
            return "the canary of the last publication"
        if not self._apart(time.monotonic()):
            return "the spacing of publications"
        return ""

    def _apart(self, now: float) -> bool:
        c = self._config
        waited = now - self._published_at
        return waited == math.inf or (
            self._requests >= c.min_requests and waited >= c.min_seconds
        )

    def snapshot(self) -> dict[str, Any]:
        result = self.canary.comparison
        return {
            "canary": {
                "undecided": self.canary.undecided,
                "rollbacks": self.canary.rollbacks,
                "backoff_cycles": self.canary.backoff,
                "requests": getattr(result, "requests", 0),
                "speed_before": getattr(result, "before", None),
                "speed_after": getattr(result, "after", None),
                "change": getattr(result, "change", None),
                "error": getattr(result, "error", None),
            },
            "engines": {engine: asdict(state) for engine, state in self._seen.items()},
        }

    def _publish(self, facts: dict[str, Any], earlier: DraftState | None = None) -> int:
        """Publish the candidate or an earlier draft; it becomes the trainer's live one.

        Raises:
            TransportError: It was sent to no engine; nothing is changed.
        """
        trainer = self._trainer
        master, figures = None, facts
        if earlier is not None:
            master, figures = earlier.master, earlier.figures
        version = self._feeds.publish(
            to_bytes(trainer.candidate_tensors(master)), figures | facts
        )
        if master is None:
            trainer.published()
            self.publications += 1
        else:
            trainer.restore(master)
        self._drafts[version] = DraftState(trainer.snapshot(), figures)
        # Masters are fp32: keep only versions that may be restored.
        needed = {self.good, self.installed, version}
        self._drafts = {v: d for v, d in self._drafts.items() if v in needed}
        self.published = version
        self.last_publish_unix = time.time()
        self._requests, self._published_at = 0, time.monotonic()
        self._add_event("publish", version=version, **facts)
        return version

    def _on_install(self, engine: str, state: EngineVersions, *, first: bool) -> None:
        version = state.installed
        draft = self._drafts.get(version)
        if draft is None:
            return
        self.installed = max(self.installed, version)
        draft.untried = False
        if draft.republished:
            self.good = version
            # No further request begins with a draft under canary on this engine.
            self.canary.forget(engine)
        elif version == 0 or first:
            return
        elif self._config.canary:
            self.canary.begin(engine, version)
        else:
            self._keep(version, "")

    def _keep(self, version: int, reason: str) -> None:
        draft = self._drafts.get(version)
        if draft is None:  # refused by another engine, or superseded
            return
        if self.good != version and self.good in self._drafts:
            self._superseded = self.good, self._drafts[self.good]
        self.good = version
        self._drafts = {v: d for v, d in self._drafts.items() if v >= version}
        self._add_event("keep", version=version, reason=reason)
        # If a newer one is published already, that one is stored when it is kept.
        if self._store is None or version != self.published:
            return
        try:
            self._store.put(
                self._trainer.live_tensors(),
                version,
                holdout=draft.figures,
                served={"reason": reason},
            )
        except (OSError, DraftError) as error:
            logger.error("draft version %d was not stored: %s", version, error)

    def _roll_back(self, verdict: Verdict) -> None:
        facts = {"rollback_of": verdict.version, "to": self.good}
        good = self._drafts.get(self.good)
        if good is None:
            why = "this process has no weights of the version to restore"
            self._add_event("unpublished", **facts, reason=why)
            return
        try:
            self.republish(good, facts | {"reason": verdict.reason})
        except TransportError as error:
            if self._pending is None:
                self._add_event("unpublished", **facts, reason=str(error))
            self._pending, self._retry_at = verdict, time.monotonic() + RETRY_S
            return
        self._pending = None
        self._drafts.pop(verdict.version, None)
        self._add_event(
            "rollback",
            version=verdict.version,
            to=self.good,
            requests=verdict.requests,
            reason=verdict.reason,
        )

    def _read_refusals(self, versions: dict[str, EngineVersions]) -> None:
        """Return to an earlier draft if all engines refused the newest version."""
        newest = self.published
        if not newest or newest not in self._drafts:
            return
        states = [v for v in versions.values() if v.published >= newest]
        if not states or any(v.refused != newest for v in states):
            return
        self.refusals += 1
        draft = self._drafts.pop(newest)
        serving = max((v.installed for v in states), default=0)
        back = serving if serving in self._drafts else self.good
        self._add_event(
            "refused", version=newest, reason=states[0].refused_reason, back_to=back
        )
        if self.good == newest:
            self.good = back
        if back in self._drafts:
            self._trainer.restore(self._drafts[back].master)
            self.published = back
        if draft.untried and draft.stored is not None and self._store is not None:
            self._store.drop(draft.stored)


def _from_store(stored: StoredDraft) -> DraftState:
    entry = replace(stored, tensors={})  # the master weights are stored once
    return DraftState(stored.master, dict(stored.holdout), stored=entry)


def _figure(evaluation: Evaluation | None) -> float | None:
    value = math.nan if evaluation is None else evaluation.acceptance()
    return value if math.isfinite(value) else None
