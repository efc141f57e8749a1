"""From a better candidate to a live draft, and back when serving says otherwise.

Keeps the master weights of every version that is served or on its way, so that a draft
refused by an engine, or beaten by the one before, costs nothing but itself. Order of
events for one version: `offer` publishes it, engines install it, the canary compares
served speed, the version is kept (and stored on disk), taken back or superseded.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from vllm_tide.config import TideConfig
from vllm_tide.deploy.canary import Canary, Verdict
from vllm_tide.deploy.served import ServedRequest, ServedRequests
from vllm_tide.deploy.store import DraftStore, StoredDraft
from vllm_tide.draft.checkpoint import canonical_name
from vllm_tide.draft.config import DraftError
from vllm_tide.train.evaluate import Evaluation
from vllm_tide.train.judgement import CycleResult
from vllm_tide.train.trainer import Trainer
from vllm_tide.transport.feeds import EngineVersions, Feeds
from vllm_tide.transport.publication import Publication
from vllm_tide.transport.shm import TransportError

logger = logging.getLogger("vllm_tide.train")

RETRY_S = 5.0
"""A draft that could not be taken back is tried to be again after this (s)."""
LOOK_SHARE = 0.003
"""Share of the trainer's time, at most, that looking at a canary takes..."""
MOST_PAUSE_S = 5.0
"""... unless looks would be further apart than this (s)."""

Master = dict[str, Tensor]
AddEvent = Callable[..., None]
"""Reports an event: its name, and facts by keyword."""


class Deployment:
    """Decides which draft the engines serve.

    Args:
        trainer: Its live draft is the one deployed last and not rolled back.
        store: Keeps good drafts over a restart; None keeps none.

    Attributes:
        published: Newest version published; 0 if none was.
        good: The version that a rollback goes back to.
    """

    def __init__(
        self,
        feeds: Feeds,
        trainer: Trainer,
        config: TideConfig,
        store: DraftStore | None,
        add_event: AddEvent,
        served: ServedRequests,
    ) -> None:
        self._feeds, self._trainer, self._add_event = feeds, trainer, add_event
        self._store, self._served = store, served
        self.canary, self._config = Canary(config.deploy), config.deploy
        self._next_look = 0.0  # monotonic (s)
        self._requests = 0  # since the last publication, like the next
        self._published_at = -math.inf  # monotonic (s)
        self.published = self.installed = 0
        self.publications = self.refusals = 0
        self.last_publish_unix: float | None = None
        self._masters: dict[int, Master] = {0: trainer.snapshot()}
        self._figures: dict[int, dict[str, Any]] = {}
        self.good = 0  # the version to go back to: the last one kept and installed
        self._superseded: tuple[int, Master] | None = None  # good before the good one
        self._put_back: set[int] = set()
        self._stored: dict[int, StoredDraft] = {}
        self._seen: dict[str, EngineVersions] = {}
        self._refused: set[int] = set()
        self._undone: Verdict | None = None  # a rollback that no engine could be sent
        self._retry_at = 0.0

    def adopt(self) -> None:
        """After a restart: go on from what the engines hold, else from the store.

        Where an engine serves a version whose weights are nowhere, the last stored one
        is put in its place, or the checkpoint's: what is served has to be known.
        """
        newest = self._feeds.latest()
        serving = max((v.installed for v in self._feeds.versions().values()), default=0)
        if newest is not None:
            self._take_over(newest.version, master_of(newest))
            return
        stored = None if self._store is None else self._store.newest()
        if stored is None and not serving and not self._feeds.found_fast:
            return
        if serving and (stored is None or stored.version != serving):
            logger.warning("the weights of version %d are lost", serving)
        tensors, number = self._masters[0], 0
        if stored is not None:
            tensors, number = stored.master, stored.version
        try:
            version = self.put_back(tensors, {"restored": number})
        except TransportError as error:
            self._add_event("unpublished", restored=number, reason=str(error))
            return
        if stored is not None:
            self._stored[version] = stored
        self._add_event("restored", version=version, stored=number)

    def put_back(self, master: Master, facts: dict[str, Any]) -> int:
        """Publish weights that have been tried before, and go on from them.

        Raises:
            TransportError: No engine could be sent them; nothing is changed.
        """
        version = self._publish(facts, master=master)
        self._put_back.add(version)
        return version

    def observe(self, request: ServedRequest) -> None:
        self._requests += 1
        self.canary.observe(request)

    def tick(self) -> None:
        """Read what the engines did; carry out the canary's verdict."""
        versions = self._feeds.versions()
        for engine, told in versions.items():
            before = self._seen.get(engine)
            self._seen[engine] = told
            if before is None or told.installed != before.installed:
                self._installed(engine, told, first=before is None)
        for engine in [e for e in self._seen if e not in versions]:
            del self._seen[engine]
            self.canary.forget(engine)
        self._read_refusals(versions)
        if self._undone is not None:
            if time.monotonic() >= self._retry_at:
                self._roll_back(self._undone)
            return
        self._look()
        verdict = self.canary.poll()
        if verdict is not None and verdict.decision == "rollback":
            self._roll_back(verdict)
        elif verdict is not None:
            self._keep(verdict.version, verdict.reason)

    def _look(self) -> None:
        """Let the canary decide, also on requests that have not ended."""
        if self.canary.undecided and time.monotonic() >= self._next_look:
            began = time.thread_time()
            self.canary.look(self._served.open_requests())
            spent = time.thread_time() - began
            pause = min(spent / LOOK_SHARE, MOST_PAUSE_S)
            self._next_look = time.monotonic() + pause

    def offer(self, result: CycleResult, now: float) -> None:
        """A cycle was judged: publish its candidate if everything allows it.

        A candidate that has to wait, or that no engine could be sent, is not lost:
        training goes on from it. `now` is monotonic (s).
        """
        self.canary.cycle_done()
        if not (result.publish and self.canary.may_publish and self._apart(now)):
            return
        if self._undone is not None:
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

    def go_back(self, reason: str) -> dict[str, int]:
        """An operator's command: serve the draft before the newest one again.

        One under canary gives way to the one that was kept before it; a kept one to the
        one before that, as far as it is known or stored. What is gone back from is not
        offered at the next start either, and publishing waits as after any rollback.

        Returns:
            `version` gone back from, `to` it went, and the number it is `served_as`.

        Raises:
            TransportError: There is nothing to go back to, or no engine could be sent
                it: what serves is not changed, but it is stored no longer.
        """
        bad, live = self.published, self._trainer.live_tensors()
        to, master = self._before(bad, live)
        if self._store is not None:
            # By what they hold: numbers begin anew with every server. And first: who is
            # killed after the other has the next server begin with them.
            for stored in list(self._store.drafts()):
                if stored.holds(live):
                    self._store.drop(stored)
        served_as = self.put_back(
            master, {"rollback_of": bad, "to": to, "reason": reason}
        )
        self._undone = self._superseded = None
        self._masters.pop(bad, None)
        self.good = served_as
        self.canary.overruled(bad)
        self._add_event("rollback", version=bad, to=to, requests=0, reason=reason)
        return {"version": bad, "to": to, "served_as": served_as}

    def _before(self, version: int, live: Mapping[str, Tensor]) -> tuple[int, Master]:
        """The draft that a version took the place of.

        Raises:
            TransportError: It is not known.
        """
        if self.good != version and self.good in self._masters:
            return self.good, self._masters[self.good]
        if self._superseded is not None:
            return self._superseded
        for stored in () if self._store is None else self._store.drafts():
            if not stored.holds(live):
                return stored.version, stored.master
        raise TransportError(
            f"no draft from before version {version} is known: nothing was rolled back"
            if version
            else "no draft has been published: there is nothing to go back to"
        )

    @property
    def waiting_for(self) -> str:
        """Why a better draft would not be published now; empty if it would."""
        if self._undone is not None:
            return "a rollback that no engine could be sent"
        if self.canary.backoff:
            return f"{self.canary.backoff} cycles after a rollback"
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
        found = self.canary.comparison
        return {
            "canary": {
                "undecided": self.canary.undecided,
                "rollbacks": self.canary.rollbacks,
                "backoff_cycles": self.canary.backoff,
                "requests": getattr(found, "requests", 0),
                "speed_before": getattr(found, "before", None),
                "speed_after": getattr(found, "after", None),
                "change": getattr(found, "change", None),
                "error": getattr(found, "error", None),
            },
            "engines": {engine: asdict(told) for engine, told in self._seen.items()},
        }

    def _take_over(self, version: int, master: Master) -> None:
        self._trainer.restore(master)
        self._masters[version] = self._trainer.snapshot()
        self.published = self.installed = self.good = version
        self._put_back.add(version)

    def _publish(self, facts: dict[str, Any], master: Master | None = None) -> int:
        """Send the candidate, or other weights; they are the trainer's live draft then.

        Raises:
            TransportError: No engine could be sent them; nothing is changed.
        """
        trainer = self._trainer
        version = self._feeds.publish(
            as_wire(trainer.candidate_tensors(master)),
            parent_version=self.published if master is None else self.good,
            meta=facts,
        )
        if master is None:
            trainer.published()
        else:
            trainer.restore(master)
        self._masters[version] = trainer.snapshot()
        # A draft is fp32 here: of what was published only these can be gone back to.
        kept = {self.good, self.installed, version}
        self._masters = {v: m for v, m in self._masters.items() if v in kept}
        self._figures = {v: f for v, f in self._figures.items() if v in kept}
        self._figures[version] = facts
        self.published = version
        self.publications += 1
        self.last_publish_unix = time.time()
        self._requests, self._published_at = 0, time.monotonic()
        self._add_event("publish", version=version, **facts)
        return version

    def _installed(self, engine: str, told: EngineVersions, *, first: bool) -> None:
        version = told.installed
        if version not in self._masters:
            return
        self.installed = max(self.installed, version)
        if version in self._put_back:
            self.good = version
            # No request will begin with a draft that was under canary here.
            self.canary.forget(engine)
        if version == 0 or first or version in self._put_back:
            return
        if self._config.canary:
            self.canary.begin(engine, version)
        else:
            self._keep(version, "")

    def _keep(self, version: int, reason: str) -> None:
        if version not in self._masters:  # refused by another engine, or superseded
            return
        if self.good != version and self.good in self._masters:
            self._superseded = self.good, self._masters[self.good]
        self.good = version
        for old in [v for v in self._masters if v < version]:
            del self._masters[old]
        self._add_event("keep", version=version, reason=reason)
        # A newer one may be on its way: then that one is stored, if it is kept.
        if self._store is None or version != self.published:
            return
        try:
            self._store.put(
                self._trainer.live_tensors(),
                version,
                held_out=self._figures.get(version),
                served={"reason": reason},
            )
        except (OSError, DraftError) as error:
            logger.error("the draft was not stored: %s", error)

    def _roll_back(self, verdict: Verdict) -> None:
        facts = {"rollback_of": verdict.version, "to": self.good}
        good = self._masters.get(self.good)
        if good is None:
            why = "the weights to go back to are not known to this process"
            self._add_event("unpublished", **facts, reason=why)
            return
        try:
            self.put_back(good, facts | {"reason": verdict.reason})
        except TransportError as error:
            if self._undone is None:
                self._add_event("unpublished", **facts, reason=str(error))
            self._undone, self._retry_at = verdict, time.monotonic() + RETRY_S
            return
        self._undone = None
        self._masters.pop(verdict.version, None)
        self._add_event(
            "rollback",
            version=verdict.version,
            to=self.good,
            requests=verdict.requests,
            reason=verdict.reason,
        )

    def _read_refusals(self, versions: dict[str, EngineVersions]) -> None:
        """A version that no engine took is not a draft to go on from."""
        newest = self.published
        if not newest or newest in self._refused or newest not in self._masters:
            return
        told = [v for v in versions.values() if v.published >= newest]
        if not told or any(v.refused != newest for v in told):
            return
        self._refused.add(newest)
        self.refusals += 1
        self._masters.pop(newest, None)
        serving = max((v.installed for v in told), default=0)
        back = serving if serving in self._masters else self.good
        self._add_event(
            "refused", version=newest, reason=told[0].refused_reason, back_to=back
        )
        if self.good == newest:
            self.good = back
        if back in self._masters:
            self._trainer.restore(self._masters[back])
            self.published = back
        stored = self._stored.pop(newest, None)
        if stored is not None and self._store is not None:
            self._store.drop(stored)


def _figure(evaluation: Evaluation | None) -> float | None:
    found = math.nan if evaluation is None else evaluation.acceptance()
    return found if math.isfinite(found) else None


def master_of(publication: Publication) -> Master:
    """Tensors of a publication under EAGLE-3 names."""
    tensors = {}
    for name, item in publication.tensors.items():
        raw = torch.from_numpy(item.data.copy())
        dtype = getattr(torch, item.dtype)
        tensors[canonical_name(name)] = raw.view(dtype).view(item.shape)
    return tensors


def as_wire(tensors: Master) -> dict[str, tuple[str, tuple[int, ...], Any]]:
    """Tensors as `Feeds.publish` takes them: dtype, shape, bytes."""
    return {
        name: (
            str(value.dtype).removeprefix("torch."),
            tuple(value.shape),
            value.contiguous().flatten().view(torch.uint8).numpy(),
        )
        for name, value in tensors.items()
    }
