"""Capture of a step's rows, the same on both model runners.

Request i has rows [bounds[i], bounds[i + 1]) of a step, its drafted tokens last; row j
has position start + j. `stage` packs rows and, on a device, enqueues their copies.
`write` turns them into records when the step's numbers have reached the host. On Model
Runner V1 that is the end of the step, so `record` does both. On V2 the host launches a
step without reading its tensors.

`Recorder.collect_mode` is read once per step. Metadata-only records hold ids and counts
without features and teacher, and nothing is staged. A pause writes no records.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from vllm_tide.capture.policy import Ticket
from vllm_tide.capture.recorder import Recorder
from vllm_tide.capture.step import Step, request_table
from vllm_tide.config import CaptureConfig
from vllm_tide.engine.device_stage import make_stage
from vllm_tide.engine.staging import WIRE_DTYPES, RunLayout, TopRows, top_k_teacher
from vllm_tide.kernels.topk_teacher import TopKWorkspace, topk_teacher
from vllm_tide.transport.record import MEMORY
from vllm_tide.transport.ring import Collect, RingWriter

STEPS_WRITTEN = 2
"""Steps that have left the step log and wait for the thread that writes their rows."""


class Capture(Recorder):
    """Capture of live traffic's rows into the ring; counters are in `Recorder`.

    Args:
        runner: vLLM's `GPUModelRunner` (V1 or V2) or its CPU subclass.
        ring: Destination of the records; drops and counts records that do not fit.
        depth: Most drafted tokens of a request in one step.
        max_steps: Most steps in flight.
        tenant_key: Key for hashing tenant names; see `CapturePolicy`.
    """

    def __init__(
        self,
        runner: Any,
        ring: RingWriter,
        config: CaptureConfig,
        depth: int,
        max_steps: int = 1,
        tenant_key: bytes | None = None,
    ) -> None:
        spec, threaded = ring.spec, runner.device.type != "cpu"
        super().__init__(ring, config, tenant_key, threaded)
        logits = min(runner.max_num_tokens, runner.max_num_reqs * (depth + 1))
        layout = RunLayout(
            runner.max_num_tokens,
            logits if self._topk else 0,
            len(spec.aux_layer_ids),
            spec.hidden_size,
            WIRE_DTYPES[spec.feature_dtype],
            config.teacher == "hidden",
            self._topk,
        )
        max_steps += STEPS_WRITTEN * threaded
        self._stage = make_stage(runner.device, max_steps, layout, ring.capacity)
        self._stage.warm_up(runner.dtype)
        self._workspace = None
        if self._topk and threaded:
            vocab = runner.vocab_size
            self._workspace = TopKWorkspace(logits, vocab, self._topk, runner.device)
        self._logits_topk: TopRows | None = None
        self._all = np.arange(layout.num_rows, dtype=np.int32)

    def admit(self, scheduler_output: Any) -> None:
        """Decide which new requests of a step are captured.

        A preempted request may reappear as a new one; it keeps its ticket.
        """
        for new in scheduler_output.scheduled_new_reqs:
            if new.req_id in self._tickets:
                continue
            params = new.sampling_params
            supported = not new.mm_features and new.prompt_embeds is None
            self._admit(new.req_id, params, supported)

    def on_logits(self, logits: torch.Tensor | None) -> None:
        """Compute the top-k teacher before sampling, which may modify the logits.

        Args:
            logits: [num_logits, V], raw logits of the target.
        """
        self._logits_topk = None
        if not self._topk or logits is None or not len(logits):
            return
        if self.collect_mode is not Collect.FULL:
            return
        if self._workspace is None:
            self._logits_topk = top_k_teacher(logits, self._topk)
        else:
            self._logits_topk = topk_teacher(logits, self._topk, self._workspace)

    def stage(
        self,
        step: Step,
        hidden_states: torch.Tensor,
        aux_hidden_states: Sequence[torch.Tensor] | None,
    ) -> None:
        """Enqueue the copies of a step's rows, unless full rows are not collected.

        On a device this must precede the draft: replaying its graphs overwrites the
        outputs of the target's (PIECEWISE graphs; all share one memory pool).

        Args:
            hidden_states: [>= rows, H], after the final norm.
            aux_hidden_states: num_aux tensors [>= rows, H]; None stages no rows.
        """
        topk, self._logits_topk = self._logits_topk, None
        self._settle()
        mode = self.collect_mode
        if mode is Collect.NOTHING:
            return  # `write` counts the rows
        if mode is not Collect.FULL:
            if any(self._is_captured(req_id) for req_id in step.req_ids):
                step.full = False
            return
        if aux_hidden_states is None:
            return
        self.budget.update(self._ring)
        counts = np.diff(step.bounds).astype(np.int64) - step.padding
        taken = self._take(step, counts)
        if not len(taken):
            return
        sizes = counts[taken]
        total = int(sizes.sum())
        if step.cut or total == step.rows:
            # Drafts were cut on the device: each request's rows are not known here.
            rows = self._all[: step.rows]
        else:
            rows = np.arange(total, dtype=np.int32)
            gaps = step.bounds[taken] - np.cumsum(sizes) + sizes
            rows += np.repeat(gaps, sizes).astype(np.int32)
        step.staged = self._stage.fill(aux_hidden_states, hidden_states, rows, topk)
        if step.staged is None:
            self.dropped["behind"] += total
            return
        step.full, step.taken = True, taken
        step.size = int(self.budget.size(sizes).sum())
        self.budget.staged += step.size

    def write(self, step: Step, overrun: Sequence[str] = ()) -> None:
        """Write the records of a step that has landed.

        Args:
            overrun: Requests that ended before the step ran; their rows are skipped.
        """
        self.budget.staged -= step.size
        step.drafted_by = None if step.after_gap else self._drafted_by
        self._drafted_by = step.version if step.steps else None
        late = frozenset(overrun)
        if self.collect_mode is Collect.NOTHING:
            step.full = None
            counts = np.diff(step.bounds).tolist()
            here = [
                (self._tickets[req_id], count)
                for req_id, count in zip(step.req_ids, counts, strict=True)
                if req_id in self._tickets and req_id not in late
            ]
            self._end_records([t for t, _ in here], [count for _, count in here])
        if step.full is not None and self._write(*self._requests(step, late), step):
            step.staged = None  # the thread releases it
        self._settle()
        self._raise_fault()

    def record(self, step: Step, *hidden: Any) -> None:
        """Stage and write a step that has landed; arguments as for `stage`."""
        try:
            self.stage(step, *hidden)
        finally:  # after a fault too: `write` stores the draft version of the next step
            try:
                self.write(step)
            finally:
                if step.staged is not None:
                    step.staged.release()

    def close(self) -> None:
        """Finish the pending writes, then release the staging memory."""
        super().close()
        self._stage.close()

    def _is_captured(self, req_id: str) -> bool:
        ticket = self._tickets.get(req_id)
        return ticket is not None and ticket.refusal is None

    def _requests(
        self, step: Step, late: frozenset[str]
    ) -> tuple[list[Ticket], np.ndarray]:
        """Return the requests of a landed step that get records, and `REQUEST` [n]."""
        at, tickets, names = [], [], step.req_ids
        taken = np.asarray(step.taken)
        for i in taken.tolist() if step.full else range(len(names)):
            ticket = self._tickets.get(names[i])
            if ticket is None or names[i] in late or ticket.refusal == "paused":
                continue  # paused: capture was off and on again since it was staged
            if step.full or ticket.refusal is None:
                at.append(i)
                tickets.append(ticket)
        # A slice of all requests gives views, which cost less than copies.
        which = slice(None) if len(at) == len(names) else np.array(at, np.int64)
        bounds = np.asarray(step.bounds)
        first, end = bounds[:-1][which], bounds[1:][which]
        padding, sampled = step.padding[which], np.asarray(step.sampled)[which]
        emitted = np.asarray(step.emitted)[which]
        table = request_table(tickets, step)
        table["first"] = table["low"] = first
        if step.full and not step.cut:
            sizes = np.diff(bounds)[taken] - step.padding[taken]
            low = np.cumsum(sizes) - sizes
            table["low"] = low[np.searchsorted(taken, at)]
        table["count"] = end - padding - first
        table["drafts"] = drafts = step.drafts[which] - padding
        table["padding"] = padding
        table["start"] = np.asarray(step.start)[which]
        table["num_prompt_tokens"] = step.num_prompt_tokens[which]
        table["logit_end"] = step.logit_ends[which]
        table["committed"] = committed = np.minimum(emitted, sampled.shape[1])
        last = np.minimum(committed - 1, drafts)
        following = sampled[np.arange(len(at)), last]
        table["next_token"] = np.where(committed > 0, following, -1)
        table["verify_chance"] = step.verify_chance
        if step.explored:
            table["verify_chance"] = [
                step.explored.get(names[i], step.verify_chance) for i in at
            ]
        if step.memory is not None:
            table["flags"] |= np.where(step.memory[which], MEMORY, 0)
        return tickets, table
