"""Control of the speculative length on Model Runner V2.

On V2 the host launches a step before it knows what the last one decided, so the length
is predicted: when a step has landed, its verdicts and its confidences say how deep the
step after the one under way drafts (`depth`, which the scheduler broadcasts), and, with
synchronous scheduling, which prefix of each request's drafts is verified. With vLLM's
adaptive verification that is decided on the device instead (`verification.py`), at
`prices` that this object gives. Nothing is waited for, and no draft step is stopped
half-way.

The policies are V1's. A policy that would have drafted on gets one more step in the
next round; one that would have stopped gets as many as it wanted. With depth 0 upstream
still runs the draft's first pass, which keeps its KV cache without holes.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from vllm_tide.capture.guard import Suspension
from vllm_tide.config import ControlConfig
from vllm_tide.control.batch import Batch, Outcome
from vllm_tide.control.costs import TimeSource, round_limit
from vllm_tide.control.kept_pass import KeptPass
from vllm_tide.control.online_time import Learnt, OnlineTime, RoundSample, step_cost
from vllm_tide.control.policies import Policy
from vllm_tide.engine.control_v1 import explored
from vllm_tide.engine.event_timer import HostClock, Reading, StepClock
from vllm_tide.engine.request_book import RequestBook
from vllm_tide.engine.step_log import Step, Timing

logger = logging.getLogger("vllm.tide")

Prices = tuple[float, Learnt]


class ControlV2:
    """Predicts how far the draft runs and chooses which of its tokens are verified.

    Args:
        capacity: Most requests of one step.
        longest: Most tokens of any request (`max_model_len`).
        config: `tide.control`.
        most: num_speculative_tokens, the longest length.
        trims: Whether `choose` is asked: with synchronous scheduling.
        clock: Times the steps; the host's clock if None.

    Attributes:
        trims: As given.
        policy: Who decides; None before it is given (the length is static) and after a
            fault (the depth is 0, for a while).
        start: Gives a new policy and its times, at first and after a fault; None
            where nobody decides.
        suspension: How long a fault keeps the depth at 0.
        explored: Chance, by request, of the newest drafts that only exploration sends
            to verification.
        depth: Draft steps of steps that are scheduled from now on.
        cut_on_device: Whether adaptive verification chooses what `choose` would.
        times: What the policy predicts times with, if it does.
        reading: Times of the newest step, once it has landed.
        on_round: Called with each measured round.
        faults: Contained faults by place.
    """

    def __init__(
        self,
        capacity: int,
        longest: int,
        config: ControlConfig,
        most: int,
        trims: bool,
        clock: StepClock | None = None,
    ) -> None:
        self.capacity = capacity
        self.num_speculative_tokens = most
        self.policy: Policy | None = None
        self.start: Callable[[], None] | None = None
        self.suspension = Suspension()
        self.explored: dict[str, float] = {}
        self._explored: dict[str, float] = {}
        self.depth = most
        self.faults: Counter[str] = Counter()
        self.trims = trims
        self.cut_on_device = False
        self.times: OnlineTime | None = None
        self._limit = np.inf
        self._book = RequestBook(capacity, longest, config)
        # Prompt length and parameters of every live request, preempted ones included.
        self._facts: dict[str, tuple[int, Any]] = {}
        self._preempted: set[str] = set()
        self._lengths: dict[str, int] = {}
        self._of_step: Sequence[str] | None = None
        # Drafted in vain by the last step: slots, confidences, first tokens.
        self._probed: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None
        self._told = (0, 0)
        # What ran, which may be more than the policy looked at.
        self._by_depth: np.ndarray = np.zeros(most + 1, np.int64)
        self._drafted = self._trimmed = 0
        self.clock: StepClock = clock or HostClock()
        self.reading: Reading = lambda: None
        self.on_round: list[Callable[[RoundSample], None]] = []
        self._shape = (0, 0, 0, 0)
        self._continues = False

    def begin(self, scheduler_output: Any) -> None:
        """A step begins: take its new requests, start the clock."""
        try:
            self.admit(scheduler_output)
        except Exception as error:  # noqa: BLE001 - the serving boundary
            self._lose(error)
        cached, new = (
            scheduler_output.scheduled_cached_reqs,
            scheduler_output.scheduled_new_reqs,
        )
        # With a request that goes on, the engine had work all the time since.
        self._continues = bool(cached.req_ids)
        spec = scheduler_output.scheduled_spec_decode_tokens
        requests = len(scheduler_output.num_scheduled_tokens)
        verified = sum(map(len, spec.values()))
        rows = scheduler_output.total_num_scheduled_tokens
        context = sum(cached.num_computed_tokens)
        context += sum(request.num_computed_tokens for request in new)
        self._shape = (requests, context, verified, rows - requests - verified)
        self.clock.begin(self._continues)

    def target_ran(self) -> None:
        """The target's logits exist."""
        self.clock.planned(*self._shape)

    @property
    def context(self) -> int:
        """Tokens in the KV cache before the step that began, over its requests."""
        return self._shape[1]

    def cut(self, verified: int) -> None:
        """So many drafted tokens of the step that began are verified after all."""
        requests, context, _, prefill = self._shape
        self._shape = (requests, context, verified, prefill)

    @property
    def limited(self) -> bool:
        """True if a TPOT limit holds for the next decode steps."""
        return bool(self._limit < np.inf)

    def prices(self) -> Prices | None:
        """What verifying costs, for the ranks that decide about it.

        Returns:
            Seconds that a round may take, and what refines the time model; None where
            times are not predicted.
        """
        if self.policy is None or self.times is None:
            return None
        return self._limit, self.times.model.learnt()

    def draft_ran(self) -> None:
        """A draft pass has its logits; the first one runs in every step."""
        self.clock.drafted()

    def step_ends(self, steps: int) -> Timing:
        """Everything of the step was launched.

        Args:
            steps: Draft steps of it.

        Returns:
            To be given to `learn` with the step.
        """
        self.reading = self.clock.end(steps)
        return Timing(self._continues, self.reading)

    def admit(self, scheduler_output: Any) -> None:
        """Give every request of a step a slot; a preempted one keeps its own.

        Unless there are more of them than slots: then a preempted one gives its slot
        up, or one that this step leaves out, and gets another when it runs again.
        """
        table, running = self._book.table, set(scheduler_output.num_scheduled_tokens)
        for new in scheduler_output.scheduled_new_reqs:
            self._facts[new.req_id] = (new.prompt_len, new.sampling_params)
        self._preempted |= scheduler_output.preempted_req_ids or set()
        self._preempted &= self._facts.keys() - running
        for req_id in scheduler_output.num_scheduled_tokens:
            if req_id in table.slot_of:
                continue
            waiting = self._preempted & table.slot_of.keys()
            staying = table.slot_of.keys() - waiting if waiting else running
            slot, given_up = table.begin(req_id, set(staying))
            if given_up is not None:
                self._end(given_up)
            self._book.admit(slot, *self._facts[req_id])
            if self.policy is not None:
                sampled = bool(table.sampled[slot])
                self.policy.add(slot, sampled, time.monotonic())

    def end(self, req_ids: Sequence[str]) -> None:
        """Requests ended."""
        try:
            for req_id in req_ids:
                self._facts.pop(req_id, None)
                slot = self._book.table.end(req_id)
                if slot is not None:
                    self._end(slot)
        except Exception as error:  # noqa: BLE001 - the serving boundary
            self._lose(error)

    def learn(self, step: Step) -> None:
        """A step has landed: observe it, and decide what follows.

        Args:
            step: The step, in order.
        """
        if self.on_round and step.timing is not None:
            sample = step.timing.read()
            if sample is not None:
                for listener in self.on_round:
                    listener(sample)
        try:
            now = time.monotonic()
            if self.policy is None:
                self._start_again(now)
            if self.policy is not None:
                self._decide(self.policy, step, now)
        except Exception as error:  # noqa: BLE001 - the serving boundary
            self._lose(error)
        if self.policy is None and self.start is not None:
            step.cost = 0.0  # after a fault; see `Record`

    def choose(
        self, req_ids: Sequence[str], draft_token_ids: list[list[int]]
    ) -> list[list[int]]:
        """The prefix of each request's drafts that is verified.

        Args:
            req_ids: Requests of the step that drafted.
            draft_token_ids: Its drafts; V2 gives placeholders, only lengths count.
        """
        self.explored = {}
        # The list itself names the step: one that has not landed is not cut.
        if self.policy is None or not self.trims or self._of_step is not req_ids:
            return draft_token_ids
        lengths, self.explored = self._lengths, self._explored
        return [
            tokens[: lengths.get(req_id, len(tokens))]
            for req_id, tokens in zip(req_ids, draft_token_ids, strict=True)
        ]

    def stop(self) -> None:
        """Draft nothing until steps are learnt from again and no suspension is left."""
        if self.policy is not None:
            self.policy = self.times = self._probed = None
            self.depth = 0

    def draft_swapped(self) -> None:
        """Another draft is live: what was learnt of the old one counts less."""
        self._probed = None
        if self.policy is not None:
            self.policy.draft_swapped()

    def stats(self) -> dict[str, Any]:
        """Totals and values for the metrics (`vllm_tide.metrics`)."""
        suspended = {"control_suspended_s": self.suspension.left}
        if self.policy is None:
            return suspended
        stats = self.policy.stats() | suspended
        by_depth = self._by_depth
        rounds, steps = int(by_depth.sum()), int(by_depth @ np.arange(len(by_depth)))
        new_rounds, new_steps = rounds - self._told[0], steps - self._told[1]
        self._told = (rounds, steps)
        slo = self._book.slo
        return stats | {
            "draft_length": new_steps / new_rounds if new_rounds else None,
            "rounds": rounds,
            "draft_steps": steps,
            "drafted_tokens": self._drafted,
            "trimmed_tokens": self._trimmed,
            "rounds_by_length": dict(enumerate(by_depth.tolist())),
            "hole_tokens": 0,
            "malformed_slo": self._book.malformed_slo,
            "slo_requests": {"met": slo.met, "missed": slo.missed},
        }

    def _decide(self, policy: Policy, step: Step, now: float) -> None:
        known = np.array(self._book.known(step.req_ids), np.int64)
        slots = self._book.table.slots([step.req_ids[i] for i in known])
        emitted = np.asarray(step.emitted, np.int64)[known]
        drafts = np.where(step.padded, 0, step.drafts)[known].astype(np.int64)
        accepted = np.minimum(np.maximum(emitted - 1, 0), drafts)
        # A placeholder may be accepted by chance: it counts here, as no draft.
        rows = np.diff(step.bounds)[known] - step.drafts[known]
        decoding = rows == 1
        if self.times is not None:
            read = int(np.asarray(step.start)[known][decoding].sum())
            decodes = int(np.count_nonzero(decoding))
            # Upstream runs the draft's first pass in every step.
            shape = (decodes, read, int(drafts.sum()), max(step.steps, 1))
            step.cost = step_cost(self.times.model, *shape)
        rows = rows + np.maximum(emitted - 1, 0)
        context = np.asarray(step.start)[known] + rows
        newest = np.asarray(step.sampled)[known, 0]
        self._book.slo.advance(slots, emitted, now)
        probe = self._probe_result(slots, emitted, newest)
        if not self.trims:
            # Asynchronous: a grammar's mask does not reach past the first tokens of a
            # draft, and vLLM rejects the rest unseen. That is no verdict of the draft.
            # With synchronous scheduling the grammar cuts drafts before they are
            # verified.
            told = ~self._book.table.constrained[slots]
            drafts_told, accepted_told = drafts * told, accepted * told
        else:
            drafts_told, accepted_told = drafts, accepted
        timing = step.timing
        if timing is not None and timing.continues and not step.after_gap:
            # After idling nothing of the last round is left to learn from, and the
            # time since is not its time.
            policy.observe(
                Outcome(
                    slots=slots,
                    verified=drafts_told,
                    accepted=accepted_told,
                    emitted=emitted,
                    now=now,
                    sample=timing.read(),
                    probe=probe,
                )
            )
        room = self._book.room(slots, context, self.num_speculative_tokens)
        room[emitted == 0] = 0
        batch = Batch(
            slots=slots,
            context=context,
            room=room,
            sampled=self._book.table.sampled[slots],
            limit=self._book.slo.limits(slots, now),
            asked=self._book.slo.asked(slots, now),
            first_rows=step.rows,
        )
        plan = policy.plan(batch, now)
        if self.times is not None:
            self._limit = _limit(batch, KeptPass(self.times.model))
        confidence = np.asarray(step.confidence)[known]
        depth, lengths = self._follow(policy, plan.steps, step.steps, confidence)
        if not plan.steps:
            if plan.reason == "no_room":  # says nothing about the requests to come
                depth = self.depth
            elif plan.probe:
                depth = 1
            if step.steps:
                first = np.asarray(step.drafted)[known]
                able = emitted > 0
                self._probed = (slots[able], confidence[able, 0], first[able])
        self.depth = min(depth, self.num_speculative_tokens)
        drafted = np.where(emitted > 0, step.steps, 0)
        self._by_depth[step.steps] += 1
        self._drafted += int(drafted.sum())
        if self.trims:
            self._trimmed += int(np.maximum(drafted - lengths, 0).sum())
        elif step.trimmed is not None:
            self._trimmed += int((step.trimmed * ~step.padded).sum())
        names = [step.req_ids[i] for i in known]
        self._lengths = dict(zip(names, lengths.tolist(), strict=True))
        self._explored = explored(policy, names) if plan.steps and self.trims else {}
        self._of_step = step.req_ids

    @staticmethod
    def _follow(
        policy: Policy, planned: int, drafted: int, confidence: np.ndarray
    ) -> tuple[int, np.ndarray]:
        """Show the policy the steps that were drafted.

        Args:
            policy: The policy, after its plan.
            planned: Most steps of its plan.
            drafted: Steps that ran.
            confidence: float32 [n, K].

        Returns:
            Steps to draft in the next round; int64 [n] tokens to verify now.
        """
        if not planned:
            return 0, np.zeros(len(confidence), np.int64)
        step, more = 0, True
        while more and step < min(planned, drafted):
            step += 1
            more = policy.go_on(step, confidence[:, step - 1])
        return step + (more and step < planned), policy.choose()

    def _probe_result(
        self, slots: np.ndarray, emitted: np.ndarray, newest: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """What the target sampled where the last step drafted in vain."""
        if self._probed is None:
            return None
        probed, confidence, token = self._probed
        self._probed = None
        place = {int(slot): i for i, slot in enumerate(slots) if emitted[i]}
        found = [i for i, slot in enumerate(probed) if int(slot) in place]
        here = [place[int(probed[i])] for i in found]
        return probed[found], confidence[found], token[found] == newest[here]

    def _end(self, slot: int) -> None:
        self._book.slo.finish(slot)
        if self._probed is not None and slot in self._probed[0]:
            self._probed = None  # the slot's next request is another
        if self.policy is not None:
            self.policy.drop(slot)

    def _start_again(self, now: float) -> None:
        """A new policy in the place of one that failed, unless it is too soon."""
        if self.start is None or self.suspension.left:
            return
        self.start()
        if self.policy is not None:
            self._told = (0, 0)
            table = self._book.table
            for slot in table.slot_of.values():
                self.policy.add(slot, bool(table.sampled[slot]), now)

    def _lose(self, error: Exception) -> None:
        """A fault of the policy's: nothing is drafted until it is tried again."""
        self.faults["control"] += 1
        self.stop()
        if self.suspension.left:
            return
        # The type, not the message: a message may quote content.
        logger.error(
            "vllm_tide: control failed (%s); the speculative length is 0 for the next "
            "%d s, then control begins anew.",
            type(error).__name__,
            self.suspension.begin(),
            exc_info=logger.isEnabledFor(logging.DEBUG),
        )


def _limit(batch: Batch, model: TimeSource) -> float:
    """Seconds that a round of these requests may take for their TPOT limits."""
    if np.isinf(batch.limit).all():
        return np.inf
    n = len(batch)
    plain = model.target_curve(n, int(batch.context.sum()), 0)[0] + model.overhead(n)
    return round_limit(batch.limit, float(plain))[0]
