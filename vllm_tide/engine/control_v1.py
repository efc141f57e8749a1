"""Control of the speculative length on Model Runner V1 (the CPU backend).

Translates between the runner's arrays and the policy of `vllm_tide.control`. In one
step, in order: `begin`, `plan` (the target's tokens are known), `go_on` after each
draft pass but the last, `end`, `choose` (drafts are handed to the scheduler). With
several ranks the leader decides and the others follow, so a collective of the draft
never waits for a rank that thought otherwise.

The memory (`tide.test_time.memory`) is asked in `plan`, where it may make the draft
needless; what stands for each request is decided in `choose`. The policy hears of the
draft's tokens only: to it a request that the memory drafted for had none.
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
from vllm_tide.engine.timers import RoundTimer
from vllm_tide.memory.ngram import Text
from vllm_tide.memory.source import Memory

CATCHUP_MIB = 64
"""Memory for features of tokens the draft has not seen while drafting was off; older
ones leave a hole in its KV cache."""

# Steps in a row that the memory leaves the draft out of before it is looked at again.
_LEFT_OUT = 32
_NONE = np.empty(0, np.int64)


class ControlV1(Control):
    """Decides how far the draft runs and which of its tokens are verified.

    Args:
        runner: vLLM's `GPUModelRunner` (V1) or its CPU subclass.
        agree: Gives every rank the leader's integer; identity for one rank.
        memory: Whether drafts come from the requests' own texts too.

    Attributes:
        same: The step drafts nothing and is as the one before.
        verified_memory: Those of them whose drafts the step that ends has verified.
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
    ) -> None:
        capacity = int(runner.max_num_reqs)
        super().__init__(capacity, int(runner.max_model_len), config, most)
        self._runner = runner
        self.agree = agree
        self.leader = leader
        self._backlog = DraftBacklog(
            runner, CATCHUP_MIB, num_aux, hidden_size, capacity
        )
        self.timer = RoundTimer()
        self._sample: StepSample | None = None
        self._confidence: torch.Tensor | None = None
        self._steps = self._asked = 0
        self._planned: list[str] = []
        self._resting, self._reason = 0, ""  # rounds that stay off without asking
        self._rested = 0  # rounds since the last question that were such
        self._rests: Counter[str] = Counter()  # all of them, by reason
        self._rest_ids: list[str] = []  # requests of the last one
        self._rest_rows = _NONE, _NONE, _NONE  # their slots, first rows and rows
        self.verified_memory: set[str] = set()
        longest = int(runner.max_model_len)
        self._memory = Memory(capacity, longest, most) if memory and leader else None
        # Of this step: what the memory proposes, and the slots of its requests.
        self._recalled: tuple[np.ndarray, Proposals] | None = None
        self._at = _NONE
        self._left_out = 0  # steps in a row without the draft, for the memory

    def begin(self, scheduler_output: Any) -> None:
        """A step begins: forget ended requests, start the clock."""
        if finished := scheduler_output.finished_req_ids:
            self._contain("forget", self._forget, finished)
        # With a request that goes on, the engine had work all the time since.
        self._continues = bool(scheduler_output.scheduled_cached_reqs.req_ids)
        self.timer.begin(self._continues)
        self._steps = self._asked = 0
        self._timed, self.same = True, False
        self._decoding = _NONE, _NONE, 0  # first positions, rows less drafts, drafts
        self._planned = []
        self._recalled = None
        if self._memory is not None:
            # A request may wait for some steps with its drafts.
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
        """How many draft steps at most; 0 leaves the draft out of this step.

        Args:
            sampled_token_ids: [n, 1 + K] tokens of this step, -1 where rejected.
            aux_hidden_states: num_aux tensors [>= rows, H].
        """
        runner = self._runner
        req_ids = runner.input_batch.req_ids
        num = len(req_ids)
        now = time.monotonic()
        if self._rested and self._is_same(scheduler_output, req_ids):
            # Little code: while a model computes, it falls out of the caches.
            self._resting -= 1
            self._rested += 1
            self._rests[self._reason] += 1
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
        rests = self._recalled is None and not spec  # one may have waited with drafts
        if rests and self._rests_on(slots, num_rows > num, now):
            # One round of a rest is learnt from: an early one, for it may end soon.
            self._timed = self._rested <= 1 and num_rows == num
            context = int(start.sum()) if self._timed else 0
            self.timer.planned(num, context, 0, num_rows - num)
            self._rest_ids = req_ids.copy() if num_rows == num else []
            self._rest_rows = slots, row, rows
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
        """True if a step of a rest is as the one before, a token for each request."""
        self.same = bool(
            self._resting
            and scheduler_output.total_num_scheduled_tokens == len(req_ids)
            and req_ids == self._rest_ids
            and not scheduler_output.scheduled_spec_decode_tokens
            and not scheduler_output.scheduled_new_reqs
            and self._memory is None
        )
        return self.same

    def _keep(
        self, features: Sequence[torch.Tensor], start: np.ndarray, num: int
    ) -> int:
        """Keep all rows of a step of a rest, `num`; every one is committed."""
        slots, row, rows = self._rest_rows
        self._decoding, keep = (start, rows, 0), self._backlog.keep
        self._contain("keep", keep, features, slots, row, rows, start, num)
        return self.agree(0)

    def _rests_on(self, slots: np.ndarray, prefill: bool, now: float) -> bool:
        """True if drafting did not pay, and about as many requests have no limit."""
        if not (
            self._resting
            and self._continues
            and 8 * abs(len(slots) - self._off_size) <= self._off_size
            and not self._slo.binds(slots)
        ):
            self._resting = 0
            return False
        self._resting -= 1
        self._rests[self._reason] += 1
        self._rested += not prefill
        if prefill and isinstance(self.policy, AdaSpecPolicy):
            self.policy.leave_out(now - self._asked_at)
        self._asked_at = now
        return True

    def _rows(self, num: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
        """First row, rows and first position of each request; rows of the step."""
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
        """The leader's choice of steps; 0: none."""
        if self.policy is None and not self._start_again(now):
            return 0 if self.start is not None else self.num_speculative_tokens
        assert self.policy is not None  # noqa: S101 (it has just been started)
        self.timer.asks()
        self._slo.advance(slots, emitted, now)
        rested, self._rested = self._rested, 0
        if self._continues:
            # After idling nothing of the last round is left to learn from, and the
            # time since is not its time.
            self.policy.observe(
                Outcome(slots, drafts, accepted, emitted, now, self._sample, 1 + rested)
            )
        self._sample = None
        waiting = int(self._backlog.missing[slots].sum())
        batch = self._batch(slots, context, emitted, now, num_rows, waiting)
        if self._recalled is not None:
            batch.memory = self._recalled[1]
            batch.memory.force = self._left_out >= _LEFT_OUT
        plan = self.policy.plan(batch, now)
        self._resting, self._reason = plan.unasked, plan.reason
        self._left_out = self._left_out + 1 if plan.reason == "memory" else 0
        if plan.reason == "check":  # what a plain step takes is to be measured
            self._recalled = None
        return min(plan.passes, self.num_speculative_tokens)

    def on_draft_logits(self, confidence: torch.Tensor) -> None:
        """A draft pass ended.

        Args:
            confidence: float [n] largest probability of the draft at each request.
        """
        self.timer.drafted()
        self._steps += 1
        self._confidence = confidence

    def go_on(self) -> bool:
        """True if the draft runs once more."""
        more = self.policy is not None or self.start is None
        if self.leader and self.policy is not None:
            more = self._contain("go_on", self._tell_confidence) or False
        return bool(self.agree(int(more)))

    def end(self) -> None:
        if self._steps == self._asked and self._steps and self.policy is not None:
            # Nobody asks after the last pass whether to go on; its confidence counts.
            self._contain("end", self._tell_confidence)
        sample = self.timer.end(self._timed)
        if sample is not None:
            self._sample = sample

    def choose(
        self, req_ids: list[str], draft_token_ids: list[list[int]]
    ) -> list[list[int]]:
        if self.explored:  # those of requests that wait with their drafts are left
            kept = self.explored.keys() - req_ids
            self.explored = {req_id: self.explored[req_id] for req_id in kept}
        if self._planned != req_ids and self._recalled is None:
            # Not drafted in this step (off, or the input does not fit the draft): the
            # scheduler has nothing to give to any request.
            return []
        if self.policy is None and self.start is None:
            return draft_token_ids
        policy = self.policy
        lengths = None if policy is None else self._contain("choose", policy.choose)
        if lengths is None:  # it failed in this step
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
        """Tokens that each request got in this step, [n]; 0 inside of a prompt."""
        emitted = (sampled >= 0).sum(axis=1)
        emitted[self._runner.discard_request_mask.np[: len(sampled)]] = 0
        return np.asarray(emitted)

    def _recall(
        self, slots: np.ndarray, sampled: np.ndarray
    ) -> tuple[np.ndarray, Proposals] | None:
        """The memory's proposals; the table of tokens ends before this step's."""
        batch, num = self._runner.input_batch, len(slots)
        emitted = self._emitted(sampled)
        known = batch.num_tokens_no_spec[:num].astype(np.int64)
        text = Text(batch.token_ids_cpu, known, sampled, emitted)
        caps = self._book.caps(slots, text.length - 1, self.num_speculative_tokens)
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
        """Put the memory's proposals in the place of the drafts that they are to be."""
        assert self._memory is not None  # noqa: S101 (asked by `choose`)
        if self._planned and not isinstance(policy, AdaSpecPolicy):
            self._memory.drafted(self._at, np.array(drafts))
        memory = policy.remembered
        if self._recalled is None or memory is None:
            return drafts
        counts = memory & ((lengths > 0) | (self._left_out > 0))
        self.remembered |= (chosen := {req_ids[i] for i in np.flatnonzero(counts)})
        if chosen:
            self._resting = 0  # the next step verifies something
        tokens = self._recalled[0].tolist()
        return [tokens[i] if memory[i] else drafts[i] for i in range(len(drafts))]

    def _own_drafts(
        self, req_ids: list[str], drafts: np.ndarray, accepted: np.ndarray
    ) -> np.ndarray:
        """The draft's tokens among those that the step verified; counts the memory's.

        Args:
            drafts, accepted: int64 [n].
        """
        verified = self.verified_memory
        memory = np.fromiter((r in verified for r in req_ids), bool, len(req_ids))
        found = np.count_nonzero(drafts[memory]), accepted[memory].sum()
        self._memory_count += np.array(found)
        return np.where(memory, 0, drafts)

    def _tell_confidence(self) -> bool:
        if self.policy is None or self._confidence is None:
            return True
        return self.policy.go_on(self._steps, self._confidence.numpy())

    def fill(self, step: Step) -> None:
        """Add to the step that ends whose drafts it verified, and why, and its cost."""
        step.explored = self.explored
        if self.verified_memory:
            kept = [req_id in self.verified_memory for req_id in step.req_ids]
            step.memory = np.array(kept, bool)
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
            steps=self._steps,
        )

    def _start_again(self, now: float) -> bool:
        self._rests, self._sample = Counter(), None
        return super()._start_again(now)

    def stop(self) -> None:
        super().stop()
        self._resting = 0

    def draft_swapped(self) -> None:
        self._resting = 0  # it may pay where the old one did not
        if self._memory is not None:
            self._memory.record.draft_swapped()
        super().draft_swapped()

    def _counted(self, stats: dict[str, Any]) -> dict[str, Any]:
        lengths = [*stats["steps_by_depth"]] or [0]
        rests = self._rests.total()
        lengths[0] += rests
        return {
            "steps": stats["steps"] + rests,
            "steps_without_drafts": dict(
                self._rests + Counter(stats["steps_without_drafts"])
            ),
            "steps_by_depth": dict(enumerate(lengths)),
            "hole_tokens": self._backlog.holes,
        }

    def _slots(self, req_ids: list[str]) -> np.ndarray:
        table, requests = self._table, self._runner.requests
        for req_id in [name for name in req_ids if name not in table.slot_of]:
            state = requests[req_id]
            slot = self._admit(
                req_id, set(req_ids), state.num_prompt_tokens, state.sampling_params
            )
            self._backlog.forget(slot)
            if self._memory is not None:
                self._memory.begin(slot)
        return table.slots(req_ids)

    def _end(self, slot: int) -> None:
        self._backlog.forget(slot)
        super()._end(slot)
