"""Control of the speculative length on Model Runner V2.

On V2 the host launches a step before it knows what the last one decided, so the length
is predicted: when a step has landed, its verdicts and its confidences say how deep the
step after the one under way drafts (`depth`, which the scheduler broadcasts), and, with
synchronous scheduling, which prefix of each request's drafts is verified. With vLLM's
adaptive verification that is decided on the device instead (`verification.py`), at
`step_costs` that this object gives. Nothing is waited for, and no draft step is stopped
half-way.

The policies are V1's. A policy that would have drafted on gets one more step in the
next round; one that would have stopped gets as many as it wanted. With asynchronous
scheduling drafts say nothing of those some steps later: what the policy foresees before
it has seen any decides. With depth 0 upstream still runs the draft's first pass, which
keeps its KV cache without holes.

Where the memory (`memory_v2.py`) put its tokens in the place of the draft's is known
when a step has landed. The policy hears of the draft's tokens only: to it a request
that the memory drafted for had none.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_tide.capture.step import Step, Timing
from vllm_tide.config import ControlConfig
from vllm_tide.control.batch import Batch, Outcome
from vllm_tide.control.costs import FirstPassAlways, Times, step_limit
from vllm_tide.control.policies import Policy
from vllm_tide.control.step_times import Learnt, step_cost
from vllm_tide.engine.control import Control, explored
from vllm_tide.engine.timers import HostClock, Reading, StepClock

if TYPE_CHECKING:
    from vllm_tide.engine.memory_v2 import MemoryV2

StepCosts = tuple[float, Learnt]


class ControlV2(Control):
    """Predicts how far the draft runs and chooses which of its tokens are verified.

    Args:
        longest: Most tokens of any request (`max_model_len`).
        trims: Whether `choose` is asked: with synchronous scheduling.
        clock: Times the steps; the host's clock if None.

    Attributes:
        depth: Draft steps of steps that are scheduled from now on.
        cut_on_device: Whether adaptive verification chooses what `choose` would.
        lengths: Depths that there are graphs for, ascending; empty: all.
        reading: Times of the newest step, once it has landed.
        memory: Proposes drafts from the requests' own texts; None: nobody does.
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
        super().__init__(capacity, longest, config, most)
        self._explored: dict[str, float] = {}
        self.depth = most
        self.lengths: Sequence[int] = ()
        self.trims = trims
        self.cut_on_device = False
        self._limit = np.inf
        # Prompt length and parameters of every live request, preempted ones included.
        self._facts: dict[str, tuple[int, Any]] = {}
        self._preempted: set[str] = set()
        self._lengths: dict[str, int] = {}
        self._of_step: Sequence[str] | None = None
        self._turn = 0
        # What ran, which may be more than the policy looked at.
        self._by_depth: np.ndarray = np.zeros(most + 1, np.int64)
        self._drafted = self._verified = self._accepted = self._trimmed = 0
        self._off: Counter[str] = Counter()  # steps by why nothing was to be drafted
        self._reason = ""
        self.clock: StepClock = clock or HostClock()
        self.reading: Reading = lambda: None
        self._shape = (0, 0, 0, 0)
        self.memory: MemoryV2 | None = None

    def begin(self, scheduler_output: Any) -> None:
        """A step begins: take its new requests, start the clock."""
        self._contain("", self.admit, scheduler_output)
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

    def step_costs(self) -> StepCosts | None:
        """What verifying costs, for the ranks that decide about it.

        Returns:
            Seconds that a round may take, and what refines the time model; None where
            times are not predicted.
        """
        if self.policy is None or self.times is None:
            return None
        return self._limit, self.times.learnt()

    def step_ends(self, steps: int) -> Timing:
        """Everything of the step was launched."""
        self.reading = self.clock.end(steps)
        return Timing(self._continues, self.reading)

    def admit(self, scheduler_output: Any) -> None:
        """Give every request of a step a slot; a preempted one keeps its own.

        Unless there are more of them than slots: then a preempted one gives its slot
        up, or one that this step leaves out, and gets another when it runs again.
        """
        table, running = self._table, set(scheduler_output.num_scheduled_tokens)
        for new in scheduler_output.scheduled_new_reqs:
            self._facts[new.req_id] = (new.prompt_len, new.sampling_params)
        self._preempted |= scheduler_output.preempted_req_ids or set()
        self._preempted &= self._facts.keys() - running
        for req_id in scheduler_output.num_scheduled_tokens:
            if req_id in table.slot_of:
                continue
            waiting = self._preempted & table.slot_of.keys()
            staying = table.slot_of.keys() - waiting if waiting else running
            num_prompt_tokens, params = self._facts[req_id]
            self._admit(req_id, set(staying), num_prompt_tokens, params)

    def end(self, req_ids: Sequence[str]) -> None:
        self._contain("", self._forget, req_ids)

    def _forget(self, req_ids: Sequence[str]) -> None:
        for req_id in req_ids:
            self._facts.pop(req_id, None)
            self.remembered.discard(req_id)
        super()._forget(req_ids)

    def learn(self, step: Step) -> None:
        """A step has landed: observe it, and decide what follows."""
        if self.memory is not None:
            self._contain("memory", self._attribute, step)
        self._contain("", self._decide, step)
        if self.policy is None and self.start is not None:
            step.cost = 0.0  # after a fault; see `Record`

    def choose(
        self, req_ids: Sequence[str], draft_token_ids: list[list[int]]
    ) -> list[list[int]]:
        """The prefix of each request's drafts that is verified.

        Args:
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
            super().stop()
            self.depth = 0

    def draft_swapped(self) -> None:
        if self.memory is not None:
            self.memory.draft_swapped()
        super().draft_swapped()

    def _counted(self, stats: dict[str, Any]) -> dict[str, Any]:
        by_depth = self._by_depth
        return {
            "steps": int(by_depth.sum()),
            "draft_passes": int(by_depth @ np.arange(len(by_depth))),
            "drafted_tokens": self._drafted,
            "verified_tokens": self._verified,
            "accepted_tokens": self._accepted,
            "steps_without_drafts": {name: n for name, n in self._off.items() if name},
            "trimmed_tokens": self._trimmed,
            "steps_by_depth": dict(enumerate(by_depth.tolist())),
            "hole_tokens": 0,
        }

    def _attribute(self, step: Step) -> None:
        """Say whose drafts a step has verified, and whose the next ones are."""
        assert self.memory is not None  # noqa: S101 (asked by `learn`)
        names, before = step.req_ids, self.remembered
        drafts = step.drafts - step.padding
        # Of the drafts of a step that was lost nobody knows whose they were.
        kept = [step.after_gap or name in before for name in names]
        step.memory = np.array(kept, bool) & (drafts > 0)
        if not step.after_gap:
            accepted = np.minimum(np.asarray(step.emitted) - 1, drafts)[step.memory]
            self._memory_count += (len(accepted), accepted.sum())
        newest = self.memory.told(step) & (np.asarray(step.emitted) > 0)
        self.remembered = before.difference(names)
        for i in np.flatnonzero(newest):
            if names[i] in self._facts:  # it may have ended since
                self.remembered.add(names[i])

    def _decide(self, step: Step) -> None:
        now = time.monotonic()
        if self.policy is None:
            self._start_again(now)
        policy = self.policy
        if policy is None:
            return
        rows = np.diff(step.bounds) - step.drafts
        known = np.array(self._book.known(step.req_ids), np.int64)
        slots = self._table.slots([step.req_ids[i] for i in known])
        emitted = np.asarray(step.emitted, np.int64)[known]
        self._slo.advance(slots, emitted, now)
        # A placeholder may be accepted by chance: it counts here, as no draft.
        drafts = step.real_drafts[known].astype(np.int64)
        if not self.trims:
            # Asynchronous: a grammar's mask does not reach past the first tokens of a
            # draft, and vLLM rejects the rest unseen. That is no verdict of the draft.
            # With synchronous scheduling the grammar cuts drafts before they are
            # verified.
            drafts *= ~self._table.constrained[slots]
        accepted = np.minimum(np.maximum(emitted - 1, 0), drafts)
        self._count(step, rows == 1, drafts, accepted)
        plans, observes = self._turns(slots)
        if observes:
            timing = step.timing
            if timing is not None and timing.continues and not step.after_gap:
                # After idling nothing of the last round is left to learn from, and the
                # time since is not its time.
                sample = timing.read()
                seen = Outcome(slots, drafts, accepted, emitted, now, sample)
                policy.observe(seen)
        if not plans:
            return
        context = np.asarray(step.start)[known] + rows[known]
        context += np.maximum(emitted - 1, 0)
        batch = self._batch(slots, context, emitted, now, step.rows)
        plan = policy.plan(batch, now)
        self._reason = "" if plan.passes else plan.reason
        if self.times is not None:
            self._limit = _limit(batch, FirstPassAlways(self.times))
        confidence = np.asarray(step.confidence)[known]
        foreseen = 0 if self.trims else plan.foreseen
        depth, lengths = self._follow(
            policy, plan.passes, step.steps, confidence, foreseen
        )
        if plan.reason == "no_room":  # says nothing about the requests to come
            depth = self.depth
        self.depth = min(depth, self.num_speculative_tokens)
        if self.trims:
            drafted = np.where(emitted > 0, step.steps, 0)
            self._trimmed += int(np.maximum(drafted - lengths, 0).sum())
            names = [step.req_ids[i] for i in known]
            self._lengths = dict(zip(names, lengths.tolist(), strict=True))
            self._explored = explored(policy, names) if plan.passes else {}
            if plan.passes and not self.limited:
                # The lengths are by the draft's confidences, which say nothing here.
                for name in self.remembered:
                    self._lengths.pop(name, None)
                    self._explored.pop(name, None)
            self._of_step = step.req_ids

    def _turns(self, slots: np.ndarray) -> tuple[bool, bool]:
        """Whether the policy plans in this step, and whether it observes it.

        Many requests teach in one step what few do in many, and their host time is
        theirs to lose: then one step is planned after, the next one observed, and some
        pass by. Not where every step is cut or held to a limit.
        """
        every = 1 if self.trims or self._slo.binds(slots) else len(slots) // 64 + 1
        if every == 1:
            self._turn = 0
            return True, True
        self._turn = (self._turn + 1) % every
        return self._turn == 0, self._turn == 1

    def _count(
        self, step: Step, decoding: np.ndarray, drafts: np.ndarray, accepted: np.ndarray
    ) -> None:
        """Take the step's work into the totals, and what it cost.

        Args:
            decoding: bool, its requests that are past their prompts.
            drafts, accepted: int64, draft tokens of its requests.
        """
        if self.times is not None:
            read = int(np.asarray(step.start)[decoding].sum())
            verified = int(step.real_drafts.sum())
            step.cost = step_cost(
                self.times,
                requests=int(np.count_nonzero(decoding)),
                context=read,
                verified=verified,
                # Upstream runs the draft's first pass in every step.
                steps=max(step.steps, 1),
            )
        self._verified += int(drafts.sum())
        self._accepted += int(accepted.sum())
        self._by_depth[step.steps] += 1
        self._off[self._reason] += 1
        self._drafted += step.steps * int(np.count_nonzero(np.asarray(step.emitted)))
        if not self.trims and step.trimmed is not None:
            own = True if step.memory is None else ~step.memory
            self._trimmed += int(step.trimmed.sum(where=own))

    @staticmethod
    def _follow(
        policy: Policy,
        planned: int,
        drafted: int,
        confidence: np.ndarray,
        foreseen: int,
    ) -> tuple[int, np.ndarray]:
        """Show the policy the steps that were drafted.

        Args:
            confidence: float32 [n, K].
            foreseen: Steps to draft whatever these confidences say; 0: they decide.
                The step that is decided about is not the next one, and all that was
                drafted is verified.

        Returns:
            Steps to draft in a coming round; int64 [n] tokens to verify now.
        """
        if not planned:
            return 0, np.zeros(len(confidence), np.int64)
        step, more = 0, True
        while (more or foreseen) and step < min(planned, drafted):
            step += 1
            more = policy.go_on(step, confidence[:, step - 1])
        wanted = foreseen or step + (more and step < planned)
        return wanted, policy.choose()


def _limit(batch: Batch, model: Times) -> float:
    """Seconds that a round of these requests may take for their TPOT limits."""
    if np.isinf(batch.limit).all():
        return np.inf
    n = len(batch)
    plain = float(model.target_curve(n, int(batch.context.sum()), 0)[0])
    return step_limit(batch.limit, plain)[0]
