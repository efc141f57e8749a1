"""Capture on Model Runner V2: rows are staged behind the step, written when landed.

The row meaning is V1's (`capture_v1.py`), and so are the records: `Recorder` makes
both. What differs is that the host never sees a tensor of the step it launches: `stage`
enqueues copies, `write` runs when they have landed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from vllm_tide.capture.recorder import Recorder, RequestRows, StepRows
from vllm_tide.capture.staging import WIRE_DTYPES, top_k_teacher
from vllm_tide.config import CaptureConfig
from vllm_tide.engine.row_stage import RunLayout, TopRows, make_stage
from vllm_tide.engine.step_log import Step
from vllm_tide.kernels.topk_teacher import TopKWorkspace, topk_teacher
from vllm_tide.transport.ring import RingWriter
from vllm_tide.transport.ring_format import Collect


class CaptureV2(Recorder):
    """Copies rows of live traffic into the ring; see `Recorder` for what it counts.

    Args:
        runner: vLLM's `GPUModelRunner` (V2) or its CPU subclass.
        ring: Where records go; it drops and counts what does not fit.
        places: Steps under way, at most.
        tenant_key: Secret that hides the tenants' names; see `CapturePolicy`.
    """

    def __init__(
        self,
        runner: Any,
        ring: RingWriter,
        config: CaptureConfig,
        num_aux: int,
        hidden_size: int,
        places: int,
        tenant_key: bytes | None = None,
    ) -> None:
        topk = config.teacher_topk if config.teacher != "hidden" else 0
        logits = min(
            runner.max_num_tokens,
            runner.max_num_reqs * (runner.num_speculative_steps + 1),
        )
        layout = RunLayout(
            runner.max_num_tokens,
            logits if topk else 0,
            num_aux,
            hidden_size,
            WIRE_DTYPES[ring.spec.feature_dtype],
            config.teacher == "hidden",
            min(topk, runner.vocab_size),
        )
        self._stage = make_stage(runner.device, places, layout, ring.capacity)
        self._stage.warm_up(runner.dtype)
        features_like, hidden_like = layout.like()
        super().__init__(ring, config, features_like, hidden_like, tenant_key)
        # Any number of rows and no columns.
        self._no_features = np.empty((runner.max_num_tokens, 0), features_like.dtype)
        self._workspace = None
        if self._topk and runner.device.type != "cpu":
            k = min(self._topk, runner.vocab_size)
            self._workspace = TopKWorkspace(logits, runner.vocab_size, k, runner.device)
        self._logits_topk: TopRows | None = None

    def admit(self, scheduler_output: Any) -> None:
        """Decide about the requests that this step brings.

        A preempted request comes back as a new one and keeps its ticket.
        """
        for new in scheduler_output.scheduled_new_reqs:
            if new.req_id in self._tickets:
                continue
            params = new.sampling_params
            supported = not new.mm_features and new.prompt_embeds is None
            self._admit(new.req_id, params, supported)

    def on_logits(self, logits: torch.Tensor) -> None:
        """Keep the top-k teacher: before sampling, which may work on them in place.

        Args:
            logits: [num_logits, V], raw logits of the target.
        """
        self._logits_topk = None
        if not self._topk or not logits.shape[0] or self.wish is not Collect.FULL:
            return
        if self._workspace is None:
            self._logits_topk = top_k_teacher(logits, self._topk)
        else:
            self._logits_topk = topk_teacher(logits, self._topk, self._workspace)

    def stage(
        self,
        step: Step,
        hidden_states: torch.Tensor,
        aux_hidden_states: Sequence[torch.Tensor],
    ) -> None:
        """Enqueue the copies of a step's rows, unless nobody wants them.

        Before the draft runs: replaying its graphs overwrites what those of the target
        returned (PIECEWISE graphs; all share one pool of memory).

        Args:
            hidden_states: [>= rows, H], after the final norm.
            aux_hidden_states: num_aux tensors [>= rows, H].
        """
        topk, self._logits_topk = self._logits_topk, None
        wish = self.wish
        if wish is Collect.NOTHING:
            return  # `write` counts it
        if wish is not Collect.FULL:
            if any(self._wanted(req_id) for req_id in step.req_ids):
                step.full = False
            return
        self.budget.look(self._ring)
        counts = np.diff(step.bounds) - step.drafts * step.padded
        prompts = step.num_prompt_tokens.tolist()
        taken = [
            i
            for i, (req_id, count) in enumerate(
                zip(step.req_ids, counts.tolist(), strict=True)
            )
            if self._takes(self._tickets.get(req_id), count, prompts[i])
        ]
        if not taken:
            return
        sizes = counts[taken]
        first = np.cumsum(sizes) - sizes
        if step.cut:  # on the device: whose rows are whose is not known here
            rows = np.arange(step.rows, dtype=np.int32)
        else:
            rows = np.arange(sizes.sum(), dtype=np.int32)
            rows += np.repeat(step.bounds[taken] - first, sizes).astype(np.int32)
        step.staged = self._stage.fill(aux_hidden_states, hidden_states, rows, topk)
        if step.staged is None:
            self.dropped["behind"] += int(sizes.sum())
            return
        step.full, step.first = True, dict(zip(taken, first.tolist(), strict=True))
        step.size = sum(map(self.budget.size, sizes.tolist()))
        self.budget.staged += step.size

    def write(self, step: Step, overrun: Sequence[str] = ()) -> None:
        """Write the records of a step that has landed.

        Args:
            overrun: Requests that had ended before it ran: their rows are no traffic.
        """
        staged, full = step.staged, step.full
        self.budget.staged -= step.size
        before = None if step.after_gap else self._drafted_by
        self._drafted_by = step.version if step.steps else None
        if self.wish is Collect.NOTHING:
            full = None
            counts = np.diff(step.bounds).tolist()
            for req_id, count in zip(step.req_ids, counts, strict=True):
                if req_id in self._tickets and req_id not in overrun:
                    self._end_records(self._tickets[req_id], count)
        if full is None:
            return
        rows_of = StepRows(
            features=self._no_features if staged is None else staged.features,
            hidden=None if staged is None else staged.hidden,
            topk=None if staged is None else staged.topk,
            full=full,
            version=step.version,
            drafted_by=before,
            concurrency=len(step.req_ids),
            cost=step.cost,
        )
        for i, req_id in enumerate(step.req_ids):
            wanted = i in step.first if full else self._wanted(req_id)
            ticket = self._tickets.get(req_id)
            if not wanted or ticket is None or req_id in overrun:
                continue
            if ticket.refusal != "paused":  # a switch off and on since it was staged
                self._write(ticket, self._rows(step, i), rows_of)

    def close(self) -> None:
        """Let the staging memory go; nothing is staged after."""
        self._stage.close()

    def _wanted(self, req_id: str) -> bool:
        ticket = self._tickets.get(req_id)
        return ticket is not None and ticket.refusal is None

    @staticmethod
    def _rows(step: Step, i: int) -> RequestRows:
        landed = (step.start, step.emitted, step.sampled, step.token_ids)
        start, emitted, sampled, token_ids = (np.asarray(part) for part in landed)
        low, high = int(step.bounds[i]), int(step.bounds[i + 1])
        num_drafts = int(step.drafts[i])
        padding = num_drafts if step.padded[i] else 0
        return RequestRows(
            low=low if step.cut else step.first.get(i, 0),
            count=high - padding - low,
            drafts=num_drafts - padding,
            padding=padding,
            start=int(start[i]),
            num_prompt_tokens=int(step.num_prompt_tokens[i]),
            token_ids=token_ids[low:high],
            sampled=sampled[i, : emitted[i]].tolist(),
            logit_end=int(step.logit_ends[i]),
            verify_chance=step.explored.get(step.req_ids[i], step.verify_chance),
        )
