"""Control of the speculative length on Model Runner V1 (the CPU backend).

Translates between the runner's arrays and the policy of `vllm_tide.control`. Order of
calls in a step: `begin`, `plan` (after the target's sampling), `go_on` after each draft
pass but the last, `end`, `choose` (drafts go to the scheduler). With several ranks the
leader decides and broadcasts, so all ranks run the same collectives of the draft.

`plan` queries the n-gram memory (`tide.test_time.memory`): its proposals may replace
the draft passes. `choose` selects the source of each request's drafts. The policy
observes tokens of the draft only: a request with the memory's drafts counts as none.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from vllm_tide.capture.step import Step
from vllm_tide.config import ControlConfig
from vllm_tide.control.adaspec import AdaSpecPolicy
from vllm_tide.control.batch import Outcome, Proposals
from vllm_tide.control.policies import Policy
from vllm_tide.control.step_times import StepSample, step_cost
from vllm_tide.engine.catchup import DraftBacklog
from vllm_tide.engine.control import Control, explored
from vllm_tide.engine.timers import StepTimer
from vllm_tide.memory.ngram import Text
from vllm_tide.memory.source import Memory

CATCHUP_MIB = 64
"""Limit of the feature backlog while drafting is off; older features are dropped."""

# After so many steps in a row with the memory only, the draft is tried again.
_LEFT_OUT = 32
_NONE = np.empty(0, np.int64)


class ControlV1(Control):
    """Draft depth and verified tokens of each step on Model Runner V1.

    Args:
        runner: vLLM's `GPUModelRunner` (V1) or its CPU subclass.
        agree: Broadcasts the leader's integer to all ranks; identity for one rank.
        memory: Whether the n-gram memory is on.
        block: Whether one draft pass drafts all tokens (DFlash). Its length does not
            change; only the verified tokens do.

    Attributes:
        same: The step drafts nothing and has the same batch as the last step.
        verified_memory: Requests with drafts of the memory that this step verifies.
    """

    def __init__(
        self,
        runner: Any,
        config: ControlConfig,
        most: int,
        num_aux: int,
        hidden_size: int,
        agree: Callable[[int], int],
        leader: bool,
        memory: bool = False,
        block: bool = False,
    ) -> None:
        capacity = int(runner.max_num_reqs)
        super().__init__(capacity, int(runner.max_model_len), config, most)
        self._runner = runner
        self.agree = agree
        self.leader = leader
        self._backlog = DraftBacklog(
            runner, CATCHUP_MIB, num_aux, hidden_size, capacity
        )
        self._block = block
        self.timer = StepTimer()
        self._sample: StepSample | None = None
        self._confidence: torch.Tensor | None = None
        self._steps = self._asked = 0
        self._decoding = _NONE, _NONE, 0  # first positions, rows less drafts, drafts
        self._drafted_by = 0, 0  # draft passes and rows of the step before
        self._planned: list[str] = []
        # Skipped steps draft nothing and do not call the policy.
        self._skips_left, self._reason = 0, ""
        self._skipped = 0  # since the policy was called last
        self._skipped_by_reason: Counter[str] = Counter()
        self._skipped_ids: list[str] = []  # requests of the last skipped step
        self._skipped_rows = _NONE, _NONE, _NONE  # their slots, first rows and rows
        self.verified_memory: set[str] = set()
        longest = int(runner.max_model_len)
        self._memory = Memory(capacity, longest, most) if memory and leader else None
        # The memory's proposals for this step, and the slots of its requests.
        self._recalled: tuple[np.ndarray, Proposals] | None = None
        self._at = _NONE
        self._left_out = 0  # steps in a row with the memory and without the draft

    def begin(self, scheduler_output: Any) -> None:
        """Begin a step: remove ended requests, start the timer."""
        if finished := scheduler_output.finished_req_ids:
            self._contain("forget", self._forget, finished)
        # A request that continues means that the engine was not idle in between.
        self._continues = bool(scheduler_output.scheduled_cached_reqs.req_ids)
        self.timer.begin(self._continues)
        _, before, judged = self._decoding
        self._drafted_by = self._steps, len(before) + judged
        self._steps = self._asked = 0
        self._timed, self.same = True, False
        self._decoding = _NONE, _NONE, 0
        self._planned = []
        self._recalled = None
        if self._memory is not None:
            # A request with drafts may not be scheduled for some steps.
            here = scheduler_output.num_scheduled_tokens
            self.verified_memory = self.remembered & here.keys()
            self.remembered -= self.verified_memory
        for req_id in finished:
            self.remembered.discard(req_id)
            self.explored.pop(req_id, None)

    def plan(
        self,
        scheduler_output: Any,
        sampled_token_ids: torch.Tensor,
        aux_hidden_states: Sequence[torch.Tensor],
        attention: Any,
    ) -> int:
        """Return the maximal draft depth of this step; 0 skips the draft.

        Args:
            sampled_token_ids: [n, 1 + K], tokens of this step, -1 where rejected.
            aux_hidden_states: num_aux tensors [>= rows, H].
        """
        runner = self._runner
        req_ids = runner.input_batch.req_ids
        num = len(req_ids)
        now = time.monotonic()
        if self._skipped and self._is_same(scheduler_output, req_ids):
            # A short path: between two steps our code is evicted from the CPU caches.
            self._skips_left -= 1
            self._skipped += 1
            self._skipped_by_reason[self._reason] += 1
            self._asked_at, self._timed = now, False
            start = runner.input_batch.num_computed_tokens_cpu[:num].astype(np.int64)
            return self._keep(aux_hidden_states, start, num)
        slots = self._contain("slots", self._slots, req_ids)
        if slots is None:
            return self.agree(0)
        row, rows, start, num_rows = self._rows(num)
        if self._memory is not None:
            self._recalled = self._contain(
                "memory", self._recall, slots=slots, sampled=sampled_token_ids.numpy()
            )
        spec = scheduler_output.scheduled_spec_decode_tokens
        # A request that was not scheduled may still have drafts.
        undrafted = self._recalled is None and not spec
        if undrafted and self._can_skip_decision(slots, num_rows > num, now):
            # Time one of the skipped steps: an early one, as few may follow.
            self._timed = self._skipped <= 1 and num_rows == num
            context = int(start.sum()) if self._timed else 0
            self.timer.planned(num, context, 0, num_rows - num)
            self._skipped_ids = req_ids.copy() if num_rows == num else []
            self._skipped_rows = slots, row, rows
            return self._keep(aux_hidden_states, start, num_rows)
        drafts = np.fromiter(
            (len(spec.get(req_id, ())) for req_id in req_ids), np.int64, num
        )
        sampled = sampled_token_ids.numpy()
        emitted = self._emitted(sampled)
        accepted = np.minimum(np.maximum(emitted - 1, 0), drafts)
        count = rows - drafts + accepted
        verified = judged = int(drafts.sum())
        self.timer.planned(num, int(start.sum()), verified, num_rows - num - verified)
        own = drafts
        if self.verified_memory:
            own = self._own_drafts(req_ids, drafts, accepted)
            judged, accepted = int(own.sum()), np.minimum(accepted, own)
        self._decoding = start, rows - drafts, judged
        code = self.num_speculative_tokens if self.start is None else 0
        if self.leader:
            decided = self._contain(
                "plan",
                self._decide,
                slots=slots,
                context=start + count,
                emitted=emitted,
                drafts=own,
                accepted=accepted,
                num_rows=num_rows,
                now=now,
            )
            code = code if decided is None else decided
        code = self.agree(code)
        if code > 0:
            late = np.nonzero(self._backlog.missing[slots] > 0)[0]
            caught_up_s = 0.0
            if len(late):
                began = time.perf_counter()
                self._contain(
                    "catch_up", self._backlog.catch_up, late, slots[late], attention
                )
                caught_up_s = time.perf_counter() - began
            self._backlog.seen(slots)
            self.timer.begin_draft(caught_up_s)
            self._planned = list(req_ids)
            self._asked = code
            return code
        self._off_size, self._asked_at = num, now
        self._contain(
            "keep",
            self._backlog.keep,
            aux_hidden_states,
            slots,
            row,
            count,
            start,
            num_rows,
        )
        return 0

    def _is_same(self, scheduler_output: Any, req_ids: list[str]) -> bool:
        """Return whether a step can be skipped and repeats the last one's batch."""
        self.same = bool(
            self._skips_left
            and scheduler_output.total_num_scheduled_tokens == len(req_ids)
            and req_ids == self._skipped_ids
            and not scheduler_output.scheduled_spec_decode_tokens
            and not scheduler_output.scheduled_new_reqs
            and self._memory is None
        )
        return self.same

    def _keep(
        self, features: Sequence[torch.Tensor], start: np.ndarray, num: int
    ) -> int:
        """Store all `num` rows of a skipped step; every row is committed."""
        slots, row, rows = self._skipped_rows
        self._decoding, keep = (start, rows, 0), self._backlog.keep
        self._contain("keep", keep, features, slots, row, rows, start, num)
        return self.agree(0)

    def _can_skip_decision(self, slots: np.ndarray, prefill: bool, now: float) -> bool:
        """Return whether this step stays without drafts and without a decision.

        The policy allows a number of such steps; load must not change, no limit bind.
        """
        if not (
            self._skips_left
            and self._continues
            and 8 * abs(len(slots) - self._off_size) <= self._off_size
            and not self._slo.binds(slots)
        ):
            self._skips_left = 0
            return False
        self._skips_left -= 1
        self._skipped_by_reason[self._reason] += 1
        self._skipped += not prefill
        if prefill and isinstance(self.policy, AdaSpecPolicy):
            self.policy.leave_out(now - self._asked_at)
        self._asked_at = now
        return True

    def _rows(self, num: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
        """Return first row, rows, first position of each request; rows of the step."""
        runner = self._runner
        bounds = runner.query_start_loc.np[: num + 1].astype(np.int64)
        start = runner.input_batch.num_computed_tokens_cpu[:num].astype(np.int64)
        first = bounds[:-1]
        return first, bounds[1:] - first, start, int(bounds[-1])

    def _decide(
        self,
        slots: np.ndarray,
        context: np.ndarray,
        emitted: np.ndarray,
        drafts: np.ndarray,
        accepted: np.ndarray,
        num_rows: int,
        now: float,
    ) -> int:
        """Return the draft depth, on the leader."""
        if self.policy is None and not self._start_again(now):
            return 0 if self.start is not None else self.num_speculative_tokens
        assert self.policy is not None  # noqa: S101 (it has just been started)
        self.timer.mark_decision()
        self._slo.advance(slots, emitted, now)
        steps, self._skipped = 1 + self._skipped, 0
        if self._continues:
            # After idle time the outcome of the last step and its time are invalid.
            self.policy.observe(
                Outcome(slots, drafts, accepted, emitted, now, self._sample, steps)
            )
        self._sample = None
        waiting = int(self._backlog.missing[slots].sum())
        batch = self._batch(slots, context, emitted, now, num_rows, waiting)
        if self._recalled is not None:
            batch.memory = self._recalled[1]
            batch.memory.force = self._left_out >= _LEFT_OUT
        plan = self.policy.plan(batch, now)
        self._skips_left, self._reason = plan.unasked, plan.reason
        self._left_out = self._left_out + 1 if plan.reason == "memory" else 0
        if plan.reason == "check":  # measures a step without drafts
            self._recalled = None
        if self._block and plan.passes:
            return self.num_speculative_tokens
        return min(plan.passes, self.num_speculative_tokens)

    def on_draft_logits(self, confidence: torch.Tensor) -> None:
        """Store the confidences of a draft pass.

        Args:
            confidence: float [n], largest probability of the draft for each request;
                [n * K] for a block, request-major.
        """
        self.timer.drafted()
        self._steps += 1
        self._confidence = confidence

    def go_on(self) -> bool:
        """Return whether the draft runs once more."""
        more = self.policy is not None or self.start is None
        if self.leader and self.policy is not None:
            more = self._contain("go_on", self._pass_confidence) or False
        return bool(self.agree(int(more)))

    def end(self) -> None:
        if self._block and self._steps:
            self._contain("end", self._pass_block)
        elif self._steps == self._asked and self._steps and self.policy is not None:
            # `go_on` is not called after the last pass, but its confidence counts.
            self._contain("end", self._pass_confidence)
        sample = self.timer.end(self._timed)
        if sample is not None:
            self._sample = sample

    def choose(
        self, req_ids: list[str], draft_token_ids: list[list[int]]
    ) -> list[list[int]]:
        if self.explored:  # keep the entries of requests that were not scheduled
            others = self.explored.keys() - req_ids
            self.explored = {req_id: self.explored[req_id] for req_id in others}
        if self._planned != req_ids and self._recalled is None:
            # Nothing was drafted: drafting is off, or the input is too long.
            return []
        if self.policy is None and self.start is None:
            return draft_token_ids
        policy = self.policy
        lengths = None if policy is None else self._contain("choose", policy.choose)
        if lengths is None:  # the policy failed
            return [[] for _ in req_ids]
        self.explored |= self._contain("choose", explored, policy, req_ids) or {}
        made = draft_token_ids
        if self._memory is not None:
            replaced = self._contain(
                "memory",
                self._replace,
                policy=policy,
                req_ids=req_ids,
                lengths=lengths,
                drafts=draft_token_ids,
            )
            made = replaced or made
        return [
            tokens[:length]
            for tokens, length in zip(made, lengths.tolist(), strict=True)
        ]

    def _emitted(self, sampled: np.ndarray) -> np.ndarray:
        """Return the tokens of each request in this step, [n]; 0 inside a prompt."""
        emitted = (sampled >= 0).sum(axis=1)
        emitted[self._runner.discard_request_mask.np[: len(sampled)]] = 0
        return np.asarray(emitted)

    def _recall(
        self, slots: np.ndarray, sampled: np.ndarray
    ) -> tuple[np.ndarray, Proposals] | None:
        """Return the memory's proposals. The token table lacks this step's tokens."""
        batch, num = self._runner.input_batch, len(slots)
        emitted = self._emitted(sampled)
        known = batch.num_tokens_no_spec[:num].astype(np.int64)
        text = Text(batch.token_ids_cpu, known, sampled, emitted)
        caps = self._requests.caps(slots, text.length - 1, self.num_speculative_tokens)
        caps[emitted == 0] = 0
        self._at = slots
        assert self._memory is not None  # noqa: S101 (asked by `plan`)
        counts = not isinstance(self.policy, AdaSpecPolicy)
        return self._memory.recall(slots, text, caps, counts=counts)

    def _replace(
        self,
        policy: Policy,
        req_ids: list[str],
        lengths: np.ndarray,
        drafts: list[list[int]],
    ) -> list[list[int]]:
        """Replace drafts by the memory's proposals, for the requests that chose it."""
        assert self._memory is not None  # noqa: S101 (asked by `choose`)
        if self._planned and not isinstance(policy, AdaSpecPolicy):
            self._memory.drafted(self._at, np.array(drafts))
        memory = policy.remembered
        if self._recalled is None or memory is None:
            return drafts
        counts = memory & ((lengths > 0) | (self._left_out > 0))
        self.remembered |= (chosen := {req_ids[i] for i in np.flatnonzero(counts)})
        if chosen:
            self._skips_left = 0  # the next step verifies drafts
        tokens = self._recalled[0].tolist()
        return [tokens[i] if memory[i] else drafts[i] for i in range(len(drafts))]

    def _own_drafts(
        self, req_ids: list[str], drafts: np.ndarray, accepted: np.ndarray
    ) -> np.ndarray:
        """Return the verified tokens of the draft; count those of the memory.

        Args:
            drafts, accepted: int64 [n].
        """
        verified = self.verified_memory
        memory = np.fromiter((r in verified for r in req_ids), bool, len(req_ids))
        counts = np.count_nonzero(drafts[memory]), accepted[memory].sum()
        self._memory_count += np.array(counts)
        return np.where(memory, 0, drafts)

    def _pass_block(self) -> None:
        if self.policy is None or self._confidence is None:
            return
        confidence = self._confidence.numpy().reshape(len(self._planned), -1)
        self.policy.take_block(confidence.T)

    def _pass_confidence(self) -> bool:
        if self.policy is None or self._confidence is None:
            return True
        return self.policy.go_on(self._steps, self._confidence.numpy())

    def fill(self, step: Step) -> None:
        """Set `explored`, `memory` and `cost` of the step that ends."""
        step.explored = self.explored
        if self.verified_memory:
            memory = [req_id in self.verified_memory for req_id in step.req_ids]
            step.memory = np.array(memory, bool)
        step.cost = self._cost()

    def _cost(self) -> float:
        if self.policy is None and self.start is not None:
            return 0.0  # after a fault
        if self.times is None:
            return 1.0
        start, rows, verified = self._decoding
        decoding = start[rows == 1]
        return step_cost(
            self.times,
            requests=len(decoding),
            context=int(decoding.sum()),
            verified=verified,
            drafted_by=self._drafted_by,
        )

    def _start_again(self, now: float) -> bool:
        self._skipped_by_reason, self._sample = Counter(), None
        return super()._start_again(now)

    def stop(self) -> None:
        super().stop()
        self._skips_left = 0

    def draft_swapped(self) -> None:
        self._skips_left = 0  # the new draft may be worth running
        if self._memory is not None:
            self._memory.record.draft_swapped()
        super().draft_swapped()

    def _counted(self, stats: dict[str, Any]) -> dict[str, Any]:
        lengths = [*stats["steps_by_depth"]] or [0]
        skipped = self._skipped_by_reason.total()
        lengths[0] += skipped
        return {
            "steps": stats["steps"] + skipped,
            "steps_without_drafts": dict(
                self._skipped_by_reason + Counter(stats["steps_without_drafts"])
            ),
            "steps_by_depth": dict(enumerate(lengths)),
            "missing_draft_kv_tokens": self._backlog.holes,
        }

    def _slots(self, req_ids: list[str]) -> np.ndarray:
        for req_id in self._requests.without_slot(req_ids):
            state = self._runner.requests[req_id]
            slot = self._admit(
                req_id, req_ids, state.num_prompt_tokens, state.sampling_params
            )
            self._backlog.forget(slot)
            if self._memory is not None:
                self._memory.begin(slot)
        return self._requests.slots(req_ids)

    def _freed(self, slot: int) -> None:
        self._backlog.forget(slot)
