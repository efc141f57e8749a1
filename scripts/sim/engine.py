"""The event loop: continuous batching with chunked prefill, one engine step at a time.

A step drops finished requests, schedules decoding requests with the drafts of the
previous step, fills the remaining token budget with prompts (first come first served,
the last one in part), runs the target, and calls the policy (`adapter`). A request that
ends in a step is in that step's batch, without caps, because the engine's worker
receives the end only with the next step.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from sim import state as col
from sim.acceptance import Process
from sim.adapter import Adapter
from sim.arrivals import Trace
from sim.state import Result, Server, Step, empty
from sim.truth import Truth
from vllm_tide.control.policies import Policy


def simulate(
    trace: Trace,
    process: Process,
    truth: Truth,
    server: Server,
    policy: Policy | None,
    due: np.ndarray | None = None,
) -> Result:
    """Replay a trace.

    Args:
        trace: Requests.
        process: The acceptance process of this trace.
        truth: True times.
        server: Limits of the engine.
        policy: The policy; None serves without a draft model. Its optional attribute
            `adapter` is the type of its `Adapter`.
        due: [R] int64 output tokens after which each request arrives, ascending; see
            `progress_at_arrival`. None: requests arrive at their exact times.
    """
    adapter = None
    if policy is not None:
        kind = getattr(policy, "adapter", Adapter)
        adapter = kind(policy, process, truth, server)
    engine = _Engine(trace, process, truth, server, adapter, due)
    while engine.step():
        pass
    stats: dict[str, Any] = {} if policy is None else policy.stats()
    if adapter is not None:
        stats = stats | adapter.slo_counts()
    return engine.result(stats)


def progress_at_arrival(trace: Trace, result: Result) -> np.ndarray:
    """Return the tokens that an arm had written at each arrival, [R] int64.

    With a replay by progress instead of by time every arm has the same load: a fast one
    does not run out of requests, and a slow one does not queue them. Throughput then
    differs between arms even if all of them keep up with the arrivals.
    """
    ends, written = result.timeline
    before = np.searchsorted(ends, trace.arrival, side="right")
    return np.asarray(np.concatenate([[0], written])[before])


class _Engine:
    def __init__(
        self,
        trace: Trace,
        process: Process,
        truth: Truth,
        server: Server,
        adapter: Adapter | None,
        due: np.ndarray | None,
    ) -> None:
        self._trace, self._process, self._truth = trace, process, truth
        self._adapter = adapter
        self._most_rows = server.max_num_batched_tokens
        self._free = list(range(server.max_num_seqs - 1, -1, -1))
        self._state = empty()
        self._ended = False
        self._prefilling = 0
        self._next = 0  # first request not admitted yet
        self._by_progress = due is not None
        arrives = trace.arrival if due is None else due
        self._due: list[float] = [*arrives.tolist(), math.inf]
        self._now = self._clock = 0.0  # the clock counts tokens when by progress
        self._continues = False
        self._arrived_s = trace.arrival if due is None else np.zeros(len(trace))
        self._first_s = np.full(len(trace), np.nan)
        self._last_s = np.full(len(trace), np.nan)
        self._busy = self._batch_seconds = 0.0
        self._ends: list[float] = []
        self._written: list[int] = []
        self._output = self._steps = self._verified = self._accepted = 0

    def step(self) -> bool:
        """Run an engine step; return False when every request has ended."""
        if self._ended:
            self._drop_ended()
        if self._free and self._due[self._next] <= self._clock:
            self._admit()
        state = self._state
        num = state.shape[1]
        if num == 0:
            if self._next == len(self._trace):
                return False
            self._clock = self._due[self._next]
            if not self._by_progress:
                self._now = self._clock
            self._continues = False
            return True
        step, first = self._run_target(state, num)
        now = self._now + step.target_s
        if self._adapter is not None:
            now += self._adapter.after_target(state, step, now)
        else:
            now += self._truth.model.host
        if len(first):
            self._first_s[state[col.REQUEST, first]] = now
        if step.ended:
            self._last_s[state[col.REQUEST, state[col.LEFT] <= 0]] = now
        self._busy += now - self._now
        self._batch_seconds += num * (now - self._now)
        self._now = now
        self._steps += 1
        written = int(step.emitted.sum())
        self._output += written
        self._clock = self._clock + written if self._by_progress else now
        self._ends.append(now)
        self._written.append(self._output)
        self._verified += step.verified
        self._accepted += int(step.accepted.sum())
        self._continues = True
        return True

    def result(self, stats: dict[str, Any]) -> Result:
        """Return the result after every request has ended."""
        output = self._trace.output
        tpot = (self._last_s - self._first_s) / np.maximum(output - 1, 1)
        return Result(
            output_tokens=self._output,
            busy_s=self._busy,
            steps=self._steps,
            mean_batch=self._batch_seconds / max(self._busy, 1e-12),
            drafted=0 if self._adapter is None else self._adapter.drafted,
            verified=self._verified,
            accepted=self._accepted,
            e2e=self._last_s - self._arrived_s,
            tpot=np.where(output > 1, tpot, np.nan),
            stats=stats,
            timeline=(np.array(self._ends), np.array(self._written)),
        )

    def _run_target(self, state: np.ndarray, num: int) -> tuple[Step, np.ndarray]:
        """Run a target step; return it and the requests with their first token."""
        sent = state[col.SENT]
        verified = int(sent.sum())
        rows = num - self._prefilling + verified
        context = int(state[col.CACHED].sum())
        accepted = np.minimum(self._process.run[state[col.AT]], sent)
        emitted = committed = accepted + 1
        first = np.empty(0, np.int64)
        if self._prefilling:
            todo = state[col.TODO].copy()
            # In order, within the budget: the last prompt may be scheduled in part.
            budget = self._most_rows - rows
            chunk = np.clip(budget - (np.cumsum(todo) - todo), 0, todo)
            rows += int(chunk.sum())
            committed = np.where(todo > 0, chunk, emitted)
            emitted[todo > chunk] = 0
            first = np.nonzero((chunk > 0) & (chunk == todo))[0]
            state[col.TODO] = todo - chunk
            self._prefilling -= len(first)
        state[col.CACHED] += committed
        state[col.AT] += emitted
        state[col.LEFT] -= emitted
        num_ended = int(np.count_nonzero(state[col.LEFT] <= 0))
        self._ended = num_ended > 0
        step = Step(
            requests=num,
            context=context,
            verified=verified,
            rows=rows,
            target_s=self._truth.target(num, context, verified, rows - num - verified),
            accepted=accepted,
            emitted=emitted,
            committed=committed,
            emitting=num - self._prefilling - num_ended,
            ended=self._ended,
            continues=self._continues,
        )
        return step, first

    def _drop_ended(self) -> None:
        alive = self._state[col.LEFT] > 0
        for slot in self._state[col.SLOT, ~alive].tolist():
            self._free.append(slot)
            if self._adapter is not None:
                self._adapter.drop(slot)
        self._state = self._state[:, alive]
        self._ended = False

    def _admit(self) -> None:
        """Admit waiting requests, first come first served, within the budget."""
        state, trace = self._state, self._trace
        decoding = state.shape[1] - self._prefilling
        scheduled = int(state[col.SENT].sum() + state[col.TODO].sum())
        budget = self._most_rows - decoding - scheduled
        columns = []
        while self._due[self._next] <= self._clock and self._free and budget > 0:
            i, slot = self._next, self._free.pop()
            if self._by_progress:
                self._arrived_s[i] = self._now
            prompt = int(trace.prompt[i])
            start = int(self._process.start[i])
            columns.append([i, slot, start, int(trace.output[i]), 0, 0, 0, prompt])
            budget -= prompt
            self._next += 1
            if self._adapter is not None:
                self._adapter.add(slot, self._now)
        if columns:
            self._state = np.concatenate([state, np.array(columns, np.int64).T], axis=1)
            self._prefilling += len(columns)
