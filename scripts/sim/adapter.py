"""Adapter of a policy to the simulated engine, like `engine.control_v1` in vLLM.

The calls after each target step are, in order: observe, plan, one `go_on` per draft
pass (including the last one, which passes its confidence), choose. Tokens of a step
without drafting are missing in the draft's KV cache and are caught up in one pass
before the next draft. Only the clairvoyant policy (`free_catchup`) does not pay for it.
"""

from __future__ import annotations

import math

import numpy as np

from sim import state as col
from sim.acceptance import Process
from sim.state import Server, Step
from sim.truth import Truth
from vllm_tide.control.batch import Batch, Outcome
from vllm_tide.control.policies import Policy
from vllm_tide.control.slo import SloBook
from vllm_tide.control.step_times import StepSample


class Adapter:
    """Adapter of one policy.

    Args:
        policy: The policy. Optional attributes besides the protocol: `reveal(survival,
            emitting)` receives the truth, `free_catchup` skips the cost of catching up,
            and `fresh` runs the draft's first pass in every step.
        process: The acceptance process.
        truth: True times.
        server: Limits of the engine.

    Attributes:
        drafted: Draft tokens so far.
    """

    def __init__(
        self, policy: Policy, process: Process, truth: Truth, server: Server
    ) -> None:
        self._policy, self._process, self._truth = policy, process, truth
        self._reveal = getattr(policy, "reveal", None)
        self._free_catchup = bool(getattr(policy, "free_catchup", False))
        self._fresh = bool(getattr(policy, "fresh", False))
        self._slo_seconds = server.slo_seconds
        self._slo = None
        if server.slo_seconds is not None:
            self._slo = SloBook(server.max_num_seqs)
        self._began = np.zeros(server.max_num_seqs, bool)
        # Every batch uses views of these.
        self._no = np.zeros(server.max_num_seqs, bool)
        self._none = np.zeros(server.max_num_seqs, np.int64)
        self._unlimited = np.full(server.max_num_seqs, np.inf)
        self._sample: StepSample | None = None
        self.drafted = 0

    def add(self, slot: int, now: float) -> None:
        """Start a request."""
        self._began[slot] = False
        if self._slo is not None:
            self._slo.add(slot, self._slo_seconds)
        self._policy.add(slot, False, now)

    def drop(self, slot: int) -> None:
        """End a request."""
        if self._slo is not None:
            self._slo.finish(slot)

    def after_target(self, state: np.ndarray, step: Step, now: float) -> float:
        """Run the policy after a target step.

        Args:
            state: [8, n] running requests; sent and missing drafts are updated.
            step: The target step.
            now: Simulated seconds.

        Returns:
            Seconds of drafting and of everything else until the next step.
        """
        slots = state[col.SLOT].copy()
        limit = self._limit(slots, step, now)
        self._policy.observe(
            Outcome(
                slots=slots,
                verified=state[col.SENT].copy(),
                accepted=step.accepted,
                emitted=step.emitted,
                now=now,
                sample=self._sample,
            )
        )
        missing = state[col.MISSING]
        batch = Batch(
            slots=slots,
            context=state[col.CACHED].copy(),
            caps=self._caps(state, step),
            sampled=self._no[: step.requests],
            limit=limit,
            first_rows=step.rows,
            catchup_rows=int(missing.sum()),
            prefill=0,  # not known yet, as in the engine's worker
        )
        if self._reveal is not None:
            self._reveal(self._survival(state, batch.caps), step.emitting)
        plan = self._policy.plan(batch, now)
        if plan.passes > 0:
            steps, lengths, late_s, first_s, next_s = self._draft(
                state, batch, plan.passes
            )
        else:
            steps, lengths, first_s, next_s = 0, self._none[: step.requests], 0.0, 0.0
            late_s = self._skip(state, step, batch)
        state[col.SENT] = lengths
        host_s = self._truth.model.host
        self._sample = self._measure(step, steps, first_s, next_s, host_s)
        return late_s + first_s + next_s + host_s

    def slo_counts(self) -> dict[str, int]:
        """Return the requests within and beyond their limit; empty without a limit."""
        if self._slo is None:
            return {}
        return {"slo_met": int(self._slo.met), "slo_missed": int(self._slo.missed)}

    def _draft(
        self, state: np.ndarray, batch: Batch, most: int
    ) -> tuple[int, np.ndarray, float, float, float]:
        """Return steps, sent drafts [n], seconds of catch-up, first pass, others."""
        truth, cached = self._truth, int(batch.context.sum())
        late_s = 0.0
        if batch.catchup_rows and not self._free_catchup:
            late = state[col.MISSING] > 0
            late_s = truth.model.draft_first(
                batch.catchup_rows, int(batch.context[late].sum())
            )
        state[col.MISSING] = 0
        confidence = self._process.confidence[state[col.AT]]
        steps, more = 0, True
        while more and steps < most:
            steps += 1
            more = self._policy.go_on(steps, confidence[:, steps - 1])
        lengths = np.minimum(self._policy.choose(), batch.caps)
        requests = len(batch.slots)
        self.drafted += steps * requests
        first_s = truth.draft_first(cached, batch.first_rows)
        return (
            steps,
            lengths,
            late_s,
            first_s,
            truth.draft_next(requests, cached, steps - 1),
        )

    def _skip(self, state: np.ndarray, step: Step, batch: Batch) -> float:
        """Return the draft's seconds in a step without drafts."""
        if self._fresh:
            cached = int(batch.context.sum())
            return self._truth.draft_first(cached, batch.first_rows)
        state[col.MISSING] += step.committed
        return 0.0

    def _limit(self, slots: np.ndarray, step: Step, now: float) -> np.ndarray:
        if self._slo is None:
            return self._unlimited[: step.requests]
        first = (step.emitted > 0) & ~self._began[slots]
        for slot in slots[first].tolist():
            self._began[slot] = True
            self._slo.advance(np.array([slot]), np.ones(1), now)
        self._slo.advance(slots, step.emitted - first, now)
        return np.asarray(self._slo.limits(slots, now))

    def _caps(self, state: np.ndarray, step: Step) -> np.ndarray:
        caps: np.ndarray = np.minimum(state[col.LEFT] - 1, self._process.top)
        if step.ended or step.emitting < step.requests:
            caps[(step.emitted == 0) | (caps < 0)] = 0
        return caps

    def _survival(self, state: np.ndarray, caps: np.ndarray) -> np.ndarray:
        survival: np.ndarray = self._process.survival[state[col.AT]]
        top = self._process.top
        if int(caps.min()) < top:
            survival[np.arange(top) >= caps[:, None]] = 0.0
        return survival

    def _measure(
        self, step: Step, steps: int, first_s: float, next_s: float, host_s: float
    ) -> StepSample:
        truth = self._truth
        return StepSample(
            requests=step.requests,
            context=step.context,
            verified=step.verified,
            prefill=step.rows - step.requests - step.verified,
            steps=steps,
            first_rows=step.rows if steps else 0,
            target_s=truth.measured(step.target_s),
            draft_first_s=truth.measured(first_s) if steps else math.nan,
            draft_next_s=truth.measured(next_s) if steps > 1 else math.nan,
            host_s=truth.measured(host_s) if step.continues else math.nan,
        )
