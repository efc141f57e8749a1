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

from vllm_tide.capture.recorder import Extent, Recorder, RequestRows, StepRows
from vllm_tide.capture.topk import top_k_teacher
from vllm_tide.config import CaptureConfig
from vllm_tide.engine.row_stage import TopRows, make_stage
from vllm_tide.engine.run_layout import Landing
from vllm_tide.engine.step_log import Step
from vllm_tide.kernels.topk_teacher import TopKWorkspace, topk_teacher
from vllm_tide.transport.ring import RingWriter
from vllm_tide.transport.ring_format import Collect

DIRECT_BYTES = 256 << 10
"""Features of one record from which on they go straight into the ring (bytes)."""


class CaptureV2(Recorder):
    """Copies rows of live traffic into the ring; see `Recorder` for what it counts.

    Args:
        runner: vLLM's `GPUModelRunner` (V2) or its CPU subclass.
        ring: Where records go; it drops and counts what does not fit.
        config: `tide.capture`.
        num_aux: Number of captured layers.
        hidden_size: H of the target.
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
        keeps_hidden = config.teacher in ("hidden", "both")
        topk = config.teacher_topk if config.teacher != "hidden" else 0
        logits = min(
            runner.max_num_tokens,
            runner.max_num_reqs * (runner.num_speculative_steps + 1),
        )
        self._stage = make_stage(
            runner.device,
            places,
            runner.max_num_tokens,
            num_aux,
            hidden_size,
            config.feature_dtype,
            keeps_hidden,
            logits,
            min(topk, runner.vocab_size),
        )
        self._stage.warm_up(runner.dtype)
        features_like, hidden_like = self._stage.like()
        super().__init__(ring, config, features_like, hidden_like, tenant_key)
        # Only this ring, should another replace it.
        self._landing_in = ring if self._stage.use_ring(ring.memory) else None
        row_bytes = features_like.shape[1] * features_like.itemsize
        self._direct_rows = max(-(-DIRECT_BYTES // row_bytes), 1)
        self._under_way: list[Step] = []  # staged, not written
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
        if self._topk and logits.shape[0] and self.wish is Collect.FULL:
            self._logits_topk = self._top(logits)

    def stage(
        self,
        step: Step,
        token_ids: torch.Tensor,
        hidden_states: torch.Tensor,
        aux_hidden_states: Sequence[torch.Tensor],
    ) -> None:
        """Enqueue the copies of a step's rows, unless nobody wants them.

        Before the draft runs: replaying its graphs overwrites what those of the target
        returned (PIECEWISE graphs; all share one pool of memory).

        Args:
            step: The step.
            token_ids: int32 [>= rows], its input.
            hidden_states: [>= rows, H], after the final norm.
            aux_hidden_states: num_aux tensors [>= rows, H].
        """
        topk, self._logits_topk = self._logits_topk, None
        if not any(self._wanted(req_id) for req_id in step.req_ids):
            return
        wish = self.wish
        if wish is Collect.NOTHING:
            return  # `write` counts it
        if full := wish is Collect.FULL:
            landings = self._landings(step, topk is not None)
            try:
                step.staged = self._stage.fill(
                    token_ids, aux_hidden_states, hidden_states, step.rows, topk,
                    landings,
                )  # fmt: skip
            finally:
                if step.staged is None:
                    self._give_up(step)
            if step.staged is None:
                self.dropped["behind"] += step.rows
                return
        step.full = full
        self._under_way.append(step)

    def write(self, step: Step, overrun: Sequence[str] = ()) -> None:
        """Write the records of a step that has landed.

        Args:
            step: The step.
            overrun: Requests that had ended before it ran: their rows are no traffic.
        """
        staged, full = step.staged, step.full
        self._under_way = [other for other in self._under_way if other is not step]
        drafted, self._drafted = self._drafted, {}
        if step.after_gap:
            drafted = {}
        if self.wish is Collect.NOTHING:
            full = None
            for req_id, count in zip(
                step.req_ids, np.diff(step.bounds).tolist(), strict=True
            ):
                if req_id in self._tickets and req_id not in overrun:
                    self._end_records(self._tickets[req_id], count)
        if full is None:
            self._give_up(step)  # of a step that was lost after its rows were staged
            return
        rows_of = StepRows(
            features=self._no_features if staged is None else staged.features,
            hidden=None if staged is None else staged.hidden,
            topk=None if staged is None else staged.topk,
            full=full,
            version=step.version,
            concurrency=len(step.req_ids),
            cost=step.cost,
        )
        try:
            for i, req_id in enumerate(step.req_ids):
                if not self._wanted(req_id) or req_id in overrun:
                    continue
                rows, slot = self._rows(step, i), step.slots.get(i)
                before = drafted.get(req_id)
                self._write(self._tickets[req_id], rows, before, rows_of, slot)
                if step.steps and step.confidence is not None:
                    probs = step.confidence[i, : step.steps].copy()
                    self._drafted[req_id] = (probs, step.version)
        finally:
            self._give_up(step)

    def close(self) -> None:
        """Let the staging memory go; nothing is staged after."""
        self._stage.close()

    def _top(self, logits: torch.Tensor) -> TopRows:
        if self._workspace is None:
            return top_k_teacher(logits, self._topk)
        return topk_teacher(logits, self._topk, self._workspace)

    def _wanted(self, req_id: str) -> bool:
        ticket = self._tickets.get(req_id)
        return ticket is not None and ticket.refusal is None

    def _landings(self, step: Step, topk: bool) -> list[Landing]:
        """Promise room in the ring to the large records of a step."""
        landings: list[Landing] = []
        # Which rows are whose is not known yet where the device cuts drafts.
        if self._landing_in is not self._ring or step.cut:
            return landings
        for i in np.flatnonzero(np.diff(step.bounds) >= self._direct_rows).tolist():
            req_id, rows = step.req_ids[i], self._extent(step, i)
            if not self._wanted(req_id) or self._would_overtake(req_id):
                continue
            if (slot := self._promise(rows, topk)) is not None:
                step.slots[i] = slot
                teacher = rows.low + self._teacher_start(rows, topk)
                end = rows.low + rows.count
                landings.append(Landing(rows.low, end, teacher, slot.places))
        return landings

    def _would_overtake(self, req_id: str) -> bool:
        """Whether a record of the request is to be written behind what is promised now.

        A request's records must lie in the order of its rows.
        """
        return any(
            req_id in before.req_ids
            and list(before.req_ids).index(req_id) not in before.slots
            for before in self._under_way
        )

    def _give_up(self, step: Step) -> None:
        """Slots that no record was written to: others wait behind them."""
        for slot in step.slots.values():
            self._ring.cancel(slot)

    @staticmethod
    def _extent(step: Step, i: int) -> Extent:
        num_drafts = int(step.drafts[i])
        return Extent(
            low=int(step.bounds[i]),
            high=int(step.bounds[i + 1]),
            num_drafts=num_drafts,
            padding=num_drafts if step.padded[i] else 0,
        )

    def _rows(self, step: Step, i: int) -> RequestRows:
        known = self._extent(step, i)
        landed = (step.start, step.emitted, step.sampled, step.token_ids)
        start, emitted, sampled, token_ids = (np.asarray(part) for part in landed)
        return RequestRows(
            low=known.low,
            high=known.high,
            num_drafts=known.num_drafts,
            padding=known.padding,
            start=int(start[i]),
            num_prompt_tokens=int(step.num_prompt_tokens[i]),
            token_ids=token_ids[known.low : known.high],
            sampled=sampled[i, : emitted[i]].tolist(),
            logit_end=int(step.logit_ends[i]),
            verify_chance=step.explored.get(step.req_ids[i], step.verify_chance),
        )
