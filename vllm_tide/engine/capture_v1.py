"""Capture on Model Runner V1 (the CPU backend): a step's rows become records.

Runs on the model's thread after sampling, when the step's sampled tokens are known.
Row meaning: request i owns rows [qsl[i], qsl[i+1]); the last k of them hold its k
drafted tokens; row j has position num_computed + j.

While the trainer wants light records (`Recorder.wish`, looked at once per step) they
are ids and counts, no features, no teacher, nothing staged; in a pause there are none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from vllm_tide.capture.policy import Ticket
from vllm_tide.capture.recorder import Recorder
from vllm_tide.capture.staging import WIRE_DTYPES, top_k_teacher
from vllm_tide.capture.step_frames import RequestRows, StepRows, TopK
from vllm_tide.config import CaptureConfig
from vllm_tide.engine.row_stage import HostRows, RunLayout
from vllm_tide.transport.ring import Collect, RingWriter


class CaptureV1(Recorder):
    """Copies rows of live traffic into the ring; see `Recorder` for what it counts.

    Args:
        runner: vLLM's `GPUModelRunner` (V1) or its CPU subclass.
        ring: Where records go; it drops and counts what does not fit.
        tenant_key: Secret that hides the tenants' names; see `CapturePolicy`.
    """

    def __init__(
        self,
        runner: Any,
        ring: RingWriter,
        config: CaptureConfig,
        num_aux: int,
        hidden_size: int,
        tenant_key: bytes | None = None,
    ) -> None:
        layout = RunLayout(
            runner.max_num_tokens,
            0,
            num_aux,
            hidden_size,
            WIRE_DTYPES[ring.spec.feature_dtype],
            config.teacher == "hidden",
            0,
        )
        super().__init__(ring, config, tenant_key)
        self._runner = runner
        self._staging = HostRows(layout)
        self._logits_topk: TopK | None = None
        # Of the step that ends: `Record.cost`, and `Record.verify_chance` of the
        # requests whose drafts only exploration verified.
        self.step_cost = 1.0
        self.explored: dict[str, float] = {}
        # Requests whose drafts in it were not the draft's: `Record.memory`.
        self.remembered: set[str] = set()

    def on_logits(self, logits: torch.Tensor | None) -> None:
        """Keep the top-k teacher: before sampling, which may work on them in place.

        Args:
            logits: [num_logits, V], raw logits of the target.
        """
        self._logits_topk = None
        if not self._topk or logits is None or self.wish is not Collect.FULL:
            return
        ids, top, tail = top_k_teacher(logits, self._topk)
        self._logits_topk = (ids.numpy(), top.numpy(), tail.numpy())

    def on_sampled(
        self,
        scheduler_output: Any,
        hidden_states: torch.Tensor,
        aux_hidden_states: Sequence[torch.Tensor] | None,
        sampled: list[list[int]],
    ) -> None:
        """Write the step's records.

        Args:
            scheduler_output: vLLM's; says how many rows and drafts each request has.
            hidden_states: [>= T, H], after the final norm.
            aux_hidden_states: num_aux tensors [>= T, H].
            sampled: Tokens committed per request; empty for a non-final prefill chunk.
        """
        before, self._drafted_by = self._drafted_by, self.draft_version
        topk, self._logits_topk = self._logits_topk, None
        runner, batch = self._runner, self._runner.input_batch
        tickets = [self._ticket(req_id) for req_id in batch.req_ids]
        wish = self.wish
        full = wish is Collect.FULL
        bounds = runner.query_start_loc.np[: len(tickets) + 1]
        if wish is Collect.NOTHING:
            self._end_records(tickets, np.diff(bounds).tolist())
            return
        if full:
            if aux_hidden_states is None:
                return
            self.budget.look(self._ring)
        spec, ids = scheduler_output.scheduled_spec_decode_tokens, batch.req_ids
        given = [spec.get(req_id, ()) for req_id in ids]
        padding = [sum(token < 0 for token in drafts) for drafts in given]
        counts = (np.diff(bounds) - padding).tolist()
        prompts = batch.num_prompt_tokens[: len(ids)].tolist()
        at = [
            i
            for i, ticket in enumerate(tickets)
            if (
                self._takes(ticket, counts[i], prompts[i])
                if full
                else ticket.refusal is None
            )
        ]
        drafts = np.array([len(tokens) for tokens in given], np.int64) - padding
        following = [
            tokens[min(len(tokens) - 1, most)] if tokens else -1
            for tokens, most in zip(sampled, drafts.tolist(), strict=True)
        ]
        columns = {
            "first": bounds[:-1],
            "count": counts,
            "drafts": drafts,
            "padding": padding,
            "start": batch.num_computed_tokens_cpu[: len(ids)],
            "num_prompt_tokens": prompts,
            "logit_end": np.cumsum([1 + len(tokens) for tokens in given]),
            "committed": [len(tokens) for tokens in sampled],
            "next_token": following,
        }
        of = {name: np.array(values, np.int64)[at] for name, values in columns.items()}
        first, count = of["first"], of["count"]
        requests = RequestRows(
            tickets=[tickets[i] for i in at],
            low=(low := np.cumsum(count) - count),
            verify_chance=np.array([self.explored.get(ids[i], 1.0) for i in at]),
            memory=np.array([ids[i] in self.remembered for i in at], bool),
            **of,
        )
        features = None
        if full and at and aux_hidden_states is not None:
            index = np.arange(count.sum()) + np.repeat(first - low, count)
            self._staging.fill(aux_hidden_states, hidden_states, index.astype(np.int32))
            features = self._staging.features
        step = StepRows(
            token_ids=runner.input_ids.np,
            features=features,
            hidden=self._staging.hidden,
            topk=topk,
            version=self.draft_version,
            drafted_by=before,
            concurrency=len(ids),
            cost=self.step_cost,
        )
        self._write(requests, step)

    def _ticket(self, req_id: str) -> Ticket:
        ticket = self._tickets.get(req_id)
        if ticket is None:
            state = self._runner.requests[req_id]
            params = state.sampling_params
            supported = not state.mm_features and state.prompt_embeds is None
            ticket = self._admit(req_id, params, supported)
        return ticket
