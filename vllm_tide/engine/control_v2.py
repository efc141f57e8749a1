"""Control of the speculative length on Model Runner V2.

On V2 the host launches a step before the results of the last one arrive, so the length
is predicted. When a step has landed, its acceptances and confidences give the depth of
the step after the one in flight (`depth`, which the scheduler broadcasts), and, with
synchronous scheduling, the prefix of each request's drafts that is verified. With
vLLM's adaptive verification the device decides that prefix (`verification.py`), from
the `step_costs` of this object. Nothing blocks, and no draft pass is interrupted.

The policies are those of V1. If the policy would have continued after the last draft
pass, the next step gets one pass more, otherwise the passes that the policy used. With
asynchronous scheduling, confidences do not predict those of the later step, so the
policy's expected depth before drafting is used. With depth 0 upstream still runs the
draft's first pass, so the draft's KV cache has no holes.

A landed step shows where the n-gram memory (`memory_v2.py`) replaced the draft's
tokens. The policy observes tokens of the draft only: a request with the memory's drafts
counts as having none.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_tide.capture.step import Step
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
    """Predicted draft depth and verified tokens of each step on Model Runner V2.

    Args:
        longest: Most tokens of any request (`max_model_len`).
        trims: Whether `choose` is called: with synchronous scheduling.
        clock: Timer of the steps; the host's clock if None.

    Attributes:
        depth: Draft depth of the next scheduled steps.
        cut_on_device: Whether adaptive verification replaces `choose`.
        lengths: Depths with CUDA graphs, ascending; empty: all.
        memory: The n-gram memory; None if it is off.
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
        # Prompt length and parameters of every request, preempted ones included.
        self._request_info: dict[str, tuple[int, Any]] = {}
        self._preempted: set[str] = set()
        self._lengths: dict[str, int] = {}
        self._of_step: Sequence[str] | None = None
        self._cycle_step = 0
        # Counts of all steps, also of those that the policy did not observe.
        self._by_depth: np.ndarray = np.zeros(most + 1, np.int64)
        self._drafted = self._verified = self._accepted = self._trimmed = 0
        self._off: Counter[str] = Counter()  # steps by reason for not drafting
        self._reason = ""
        self.clock: StepClock = clock or HostClock()
        self._drafted_by = 1, 0  # draft passes and rows of the step before
        self._shape = (0, 0, 0, 0)
        self.memory: MemoryV2 | None = None

    def begin(self, scheduler_output: Any) -> None:
        """Begin a step: add its new requests, start the timer."""
        self._contain("", self.admit, scheduler_output)
        cached, new = (
            scheduler_output.scheduled_cached_reqs,
            scheduler_output.scheduled_new_reqs,
        )
        # A request that continues means that the engine was not idle in between.
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
        """Tokens in the KV cache before the current step, summed over its requests."""
        return self._shape[1]

    def cut(self, verified: int) -> None:
        """Set the number of drafted tokens that the current step verifies."""
        requests, context, _, prefill = self._shape
        self._shape = (requests, context, verified, prefill)

    @property
    def limited(self) -> bool:
        """True if a TPOT limit applies to the next decode steps."""
        return bool(self._limit < np.inf)

    def step_costs(self) -> StepCosts | None:
        """Return the costs of verification, for all ranks.

        Returns:
            Limit of the step time (s), and the corrections of the time model; None
            without a time model.
        """
        if self.policy is None or self.times is None:
            return None
        return self._limit, self.times.learnt()

    def step_ends(self, steps: int) -> Reading | None:
        """End a step that has been launched completely; see `Step.reading`."""
        reading = self.clock.end(steps)
        return reading if self._continues else None

    def admit(self, scheduler_output: Any) -> None:
        """Assign a slot to every request of a step.

        A preempted request keeps its slot while there are enough. Otherwise a preempted
        request, or one that this step does not run, loses its slot and gets another
        when it runs again.
        """
        running = scheduler_output.num_scheduled_tokens.keys()
        for new in scheduler_output.scheduled_new_reqs:
            self._request_info[new.req_id] = (new.prompt_len, new.sampling_params)
        self._preempted |= scheduler_output.preempted_req_ids or set()
        if self._preempted:
            self._preempted &= self._request_info.keys() - running
        for req_id in self._requests.without_slot(running):
            slotted = self._requests.slot_of.keys()
            waiting = self._preempted & slotted
            staying = slotted - waiting if waiting else running
            self._admit(req_id, staying, *self._request_info[req_id])

    def end(self, req_ids: Sequence[str]) -> None:
        self._contain("", self._forget, req_ids)

    def _forget(self, req_ids: Sequence[str]) -> None:
        for req_id in req_ids:
            self._request_info.pop(req_id, None)
            self.remembered.discard(req_id)
        super()._forget(req_ids)

    def learn(self, step: Step) -> None:
        """Observe a landed step, and choose the length of the next one."""
        if self.memory is not None:
            self._contain("memory", self._attribute, step)
        self._contain("", self._decide, step)
        if self.policy is None and self.start is not None:
            step.cost = 0.0  # suspended after a fault; see `Record`

    def choose(
        self, req_ids: Sequence[str], draft_token_ids: list[list[int]]
    ) -> list[list[int]]:
        """Return the prefix of each request's drafts that is verified.

        Args:
            draft_token_ids: Drafts by request; on V2 placeholders, only lengths count.
        """
        self.explored = {}
        # The list's identity stands for the step: one that has not landed is not cut.
        if self.policy is None or not self.trims or self._of_step is not req_ids:
            return draft_token_ids
        lengths, self.explored = self._lengths, self._explored
        return [
            tokens[: lengths.get(req_id, len(tokens))]
            for req_id, tokens in zip(req_ids, draft_token_ids, strict=True)
        ]

    def stop(self) -> None:
        """Draft nothing until control restarts."""
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
            "missing_draft_kv_tokens": 0,
        }

    def _attribute(self, step: Step) -> None:
        """Set `step.memory`, and the requests with next drafts from the memory."""
        assert self.memory is not None  # noqa: S101 (checked by `learn`)
        names, before = step.req_ids, self.remembered
        drafts = step.drafts - step.padding
        # After a lost step the source of its drafts is unknown: count them as memory.
        memory = [step.after_gap or name in before for name in names]
        step.memory = np.array(memory, bool) & (drafts > 0)
        if not step.after_gap:
            accepted = np.minimum(np.asarray(step.emitted) - 1, drafts)[step.memory]
            self._memory_count += (len(accepted), accepted.sum())
        newest = self.memory.from_memory(step) & (np.asarray(step.emitted) > 0)
        self.remembered = before.difference(names)
        for i in np.flatnonzero(newest):
            if names[i] in self._request_info:  # else it has ended
                self.remembered.add(names[i])

    def _decide(self, step: Step) -> None:
        now = time.monotonic()
        if self.policy is None:
            self._start_again(now)
        policy = self.policy
        if policy is None:
            return
        rows = np.diff(step.bounds) - step.drafts
        known = np.array(self._requests.known(step.req_ids), np.int64)
        slots = self._requests.slots([step.req_ids[i] for i in known])
        emitted = np.asarray(step.emitted, np.int64)[known]
        self._slo.advance(slots, emitted, now)
        # An accepted placeholder is in `emitted`, but it is not a draft.
        drafts = step.real_drafts[known].astype(np.int64)
        if not self.trims:
            # Asynchronous scheduling: a grammar's mask covers only the first tokens of
            # a draft, and vLLM rejects the others without verification. That is not
            # evidence about the draft. With synchronous scheduling the grammar cuts
            # drafts before they are verified.
            drafts *= ~self._requests.constrained[slots]
        accepted = np.minimum(np.maximum(emitted - 1, 0), drafts)
        self._count(step, rows == 1, drafts, accepted)
        plans, observes = self._plans_and_observes(slots)
        if observes and step.reading is not None and not step.after_gap:
            # After idle time the outcome of the last step and its time are invalid.
            sample = step.reading()
            policy.observe(Outcome(slots, drafts, accepted, emitted, now, sample))
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
        if plan.reason == "no_room":  # not valid for other requests
            depth = self.depth
        self.depth = min(depth, self.num_speculative_tokens)
        if self.trims:
            drafted = np.where(emitted > 0, step.steps, 0)
            self._trimmed += int(np.maximum(drafted - lengths, 0).sum())
            names = [step.req_ids[i] for i in known]
            self._lengths = dict(zip(names, lengths.tolist(), strict=True))
            self._explored = explored(policy, names) if plan.passes else {}
            if plan.passes and not self.limited:
                # The lengths follow the draft's confidences, not the memory's.
                for name in self.remembered:
                    self._lengths.pop(name, None)
                    self._explored.pop(name, None)
            self._of_step = step.req_ids

    def _plans_and_observes(self, slots: np.ndarray) -> tuple[bool, bool]:
        """Return whether the policy plans after this step, and whether it observes it.

        A large batch gives as many labels in one step as a small one in many, and host
        time delays all its requests. Therefore the policy plans after one step,
        observes the next and skips some, unless drafts are trimmed or a limit binds.
        """
        every = 1 if self.trims or self._slo.binds(slots) else len(slots) // 64 + 1
        if every == 1:
            self._cycle_step = 0
            return True, True
        self._cycle_step = (self._cycle_step + 1) % every
        return self._cycle_step == 0, self._cycle_step == 1

    def _count(
        self, step: Step, decoding: np.ndarray, drafts: np.ndarray, accepted: np.ndarray
    ) -> None:
        """Add a step to the totals and set its cost.

        Args:
            decoding: bool, requests beyond their prompts.
            drafts, accepted: int64, draft tokens of the requests.
        """
        if self.times is not None:
            read = int(np.asarray(step.start)[decoding].sum())
            requests = int(np.count_nonzero(decoding))
            verified = int(step.real_drafts.sum())
            # Upstream runs the draft's first pass in every step.
            passes = max(step.steps, 1), len(step.req_ids) + verified
            before = passes if step.after_gap else self._drafted_by
            step.cost = step_cost(self.times, requests, read, verified, before)
            self._drafted_by = passes
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
        """Pass the confidences of a landed step to the policy.

        Args:
            confidence: float32 [n, K].
            foreseen: Depth that is returned independently of the confidences; 0: they
                decide. It is set if the depth is not for the next step, and all drafted
                tokens are verified.

        Returns:
            Draft depth of a later step; int64 [n], tokens to verify now.
        """
        if not planned:
            return 0, np.zeros(len(confidence), np.int64)
        step, more = 0, True
        while (more or foreseen) and step < min(planned, drafted):
            step += 1
            more = policy.go_on(step, confidence[:, step - 1])
        depth = foreseen or step + (more and step < planned)
        return depth, policy.choose()


def _limit(batch: Batch, model: Times) -> float:
    """Return the longest step time (s) that meets the TPOT limits of the requests."""
    if np.isinf(batch.limit).all():
        return np.inf
    n = len(batch)
    plain = float(model.target_curve(n, int(batch.context.sum()), 0)[0])
    return step_limit(batch.limit, plain)[0]
