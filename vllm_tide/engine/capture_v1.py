"""Capture on Model Runner V1 (the CPU backend): a step's rows become records.

Runs on the model's thread after sampling, when the step's sampled tokens are known.
Row meaning: request i owns rows [qsl[i], qsl[i+1]); the last k of them hold its k
drafted tokens; row j has position num_computed + j.

While the trainer does not collect (`RingWriter.collect`, looked at once per step) the
records are light: ids and counts, no features, no teacher, nothing staged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from vllm_tide.capture.policy import CapturePolicy, Ticket
from vllm_tide.capture.staging import Staging
from vllm_tide.config import CaptureConfig
from vllm_tide.transport.record import Phase, Record
from vllm_tide.transport.ring import RingWriter

_NO_FLOATS = np.empty(0, np.float32)
_NO_TOKENS = np.empty(0, np.int32)


class CaptureV1:
    """Copies rows of live traffic into the ring.

    Args:
        runner: vLLM's `GPUModelRunner` (V1) or its CPU subclass.
        ring: Where records go; it drops and counts what does not fit.
        config: `tide.capture`.
        num_aux: Number of captured layers.
        hidden_size: H of the target.
        tenant_key: Secret that hides the tenants' names; see `CapturePolicy`.

    Attributes:
        rows: Rows written to the ring so far, those of light records left out.
        requests: Requests with at least one record.
        dropped: Rows (requests for `opted_out`, `not_sampled`, `malformed_opt_out`,
            `malformed_tenant`, `unsupported_input`) that were not written, by reason;
            `paused` are the rows of light records.
        draft_version: Version of the live draft; set by the owner at each swap.
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
        self._runner = runner
        self._ring = ring
        self._hidden = config.teacher in ("hidden", "both")
        self._topk = config.teacher_topk if config.teacher != "hidden" else 0
        self._policy = CapturePolicy(config.sample_rate, tenant_key=tenant_key)
        self._staging = Staging(
            runner.max_num_tokens,
            num_aux,
            hidden_size,
            config.feature_dtype,
            self._hidden,
        )
        self._no_features = self._staging.features[:, :0]
        self._tickets: dict[str, Ticket] = {}
        self._draft_probs: list[torch.Tensor] = []
        # What the previous step drafted: request id -> (probabilities, version).
        self._drafted: dict[str, tuple[np.ndarray, int]] = {}
        self._logits_topk: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None
        self.rows = 0
        self.requests = 0
        self.dropped: Counter[str] = Counter()
        self.draft_version = 0

    def use_ring(self, ring: RingWriter) -> None:
        """Write to another ring from now on: the one before was cut short."""
        self._ring = ring

    def on_draft_logits(self, confidence: torch.Tensor) -> None:
        """Keep the probability of each drafted token.

        Args:
            confidence: float32 [num_reqs] probability of the token that one draft
                step drafted (the largest).
        """
        self._draft_probs.append(confidence)

    def on_logits(self, logits: torch.Tensor | None) -> None:
        """Keep the top-k teacher: before sampling, which may work on them in place.

        Args:
            logits: [num_logits, V], raw logits of the target.
        """
        self._logits_topk = None
        if not self._topk or logits is None or not self._ring.collect:
            return
        k = min(self._topk, logits.shape[-1])
        logprobs = torch.log_softmax(logits.float(), dim=-1)
        top, ids = logprobs.topk(k, dim=-1)
        tail = torch.log1p(-top.exp().sum(dim=-1).clamp(max=1.0))
        self._logits_topk = (
            ids.to(torch.int32).numpy(),
            top.numpy(),
            tail.numpy(),
        )

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
        probs, self._draft_probs = self._draft_probs, []
        drafted, self._drafted = self._drafted, {}
        batch = self._runner.input_batch
        tickets = [self._ticket(req_id) for req_id in batch.req_ids]
        wanted = [i for i, ticket in enumerate(tickets) if ticket.refusal is None]
        full = self._ring.collect
        if wanted and (aux_hidden_states is not None or not full):
            if full and aux_hidden_states is not None:
                num_rows = scheduler_output.total_num_scheduled_tokens
                self._staging.fill(aux_hidden_states, hidden_states, num_rows)
            spec = scheduler_output.scheduled_spec_decode_tokens
            logit_ends = self._logit_ends(batch.req_ids, spec)
            for i in wanted:
                req_id = batch.req_ids[i]
                self._write(
                    i,
                    tickets[i],
                    spec.get(req_id, ()),
                    drafted.get(req_id),
                    sampled[i],
                    logit_ends[i],
                    full,
                )
        if probs:
            stacked = torch.stack(probs, dim=1).numpy()
            for i in wanted:
                if i < stacked.shape[0]:
                    self._drafted[batch.req_ids[i]] = (stacked[i], self.draft_version)

    def forget(self, req_ids: Sequence[str]) -> None:
        """Requests ended (finished or aborted): say so to the trainer, drop state."""
        for req_id in req_ids:
            ticket = self._tickets.pop(req_id, None)
            self._drafted.pop(req_id, None)
            if ticket is not None and ticket.started:
                self._ring.try_write(self._farewell(ticket))

    def _ticket(self, req_id: str) -> Ticket:
        ticket = self._tickets.get(req_id)
        if ticket is None:
            state = self._runner.requests[req_id]
            params = state.sampling_params
            supported = not state.mm_features and state.prompt_embeds is None
            extra = params.extra_args if params is not None else None
            ticket = self._policy.admit(extra, supported)
            self._tickets[req_id] = ticket
            if ticket.refusal is not None:
                self.dropped[ticket.refusal] += 1
        return ticket

    @staticmethod
    def _logit_ends(
        req_ids: Sequence[str], spec: dict[str, list[int]]
    ) -> Sequence[int]:
        """End of each request's rows in the logits: 1 + drafts rows each."""
        counts = [1 + len(spec.get(req_id, ())) for req_id in req_ids]
        return list(np.cumsum(counts))

    def _write(
        self,
        index: int,
        ticket: Ticket,
        drafts: Sequence[int],
        drafted: tuple[np.ndarray, int] | None,
        sampled: list[int],
        logit_end: int,
        full: bool,
    ) -> None:
        runner, batch = self._runner, self._runner.input_batch
        low = int(runner.query_start_loc.np[index])
        high = int(runner.query_start_loc.np[index + 1])
        num_drafts = len(drafts)
        # Placeholders (-1, scheduled to keep a graph's shape) are no tokens: their
        # rows say nothing about the model.
        padding = sum(1 for token in drafts if token < 0)
        if padding:
            self.dropped["placeholder"] += padding
            high -= padding
        count = high - low
        committed = high - low - 1 - (num_drafts - padding)
        num_accepted = committed + max(len(sampled) - 1, 0)
        start = int(batch.num_computed_tokens_cpu[index])
        if not ticket.started:
            ticket.started = True
            self.requests += 1
            # A prefix-cache hit never computes these rows: they are missing, and
            # the record's start says so.
            if full:
                self.dropped["prefix_cached"] += start
        verify = num_drafts > padding or (count == 1 and committed == 0)
        probs, version = self._probs(count - 1, drafted) if verify else (None, None)
        teacher_start, topk = (
            self._teacher(count, num_drafts, padding, logit_end)
            if full
            else (count, None)
        )
        features = self._staging.features if full else self._no_features
        hidden = self._staging.teacher if full else None
        record = Record(
            key=ticket.key,
            phase=Phase.VERIFY if verify else Phase.PREFILL,
            start=start,
            num_prompt_tokens=int(batch.num_prompt_tokens[index]),
            num_accepted=min(num_accepted, count - 1),
            next_token=sampled[-1] if sampled else -1,
            draft_version=self.draft_version if version is None else version,
            token_ids=runner.input_ids.np[low:high],
            draft_probs=_NO_FLOATS if probs is None else probs,
            features=features[low:high],
            teacher_start=teacher_start,
            teacher_hidden=(
                None if hidden is None else hidden[low + teacher_start : high]
            ),
            teacher_topk_ids=None if topk is None else topk[0],
            teacher_topk_logprobs=None if topk is None else topk[1],
            teacher_tail_logprob=None if topk is None else topk[2],
            tenant=ticket.tenant,
        )
        if self._ring.try_write(record):
            if full:
                self.rows += count
            else:
                self.dropped["paused"] += count

    @staticmethod
    def _probs(
        num_drafts: int, drafted: tuple[np.ndarray, int] | None
    ) -> tuple[np.ndarray, int | None]:
        if drafted is None or drafted[0].shape[0] < num_drafts:
            return np.full(num_drafts, np.nan, np.float32), None
        return drafted[0][:num_drafts].astype(np.float32, copy=False), drafted[1]

    def _teacher(
        self, count: int, num_drafts: int, padding: int, logit_end: int
    ) -> tuple[int, tuple[np.ndarray, np.ndarray, np.ndarray] | None]:
        """First row with a teacher, and the rows' top-k slices.

        Only sampled rows have logits (the last of a prefill, all of a verification),
        so a top-k teacher starts later than a hidden one; with both kinds stored the
        record starts where both exist.
        """
        if self._logits_topk is None:
            return (0, None) if not self._topk else (count, None)
        have = min(1 + num_drafts - padding, count)
        end = logit_end - padding
        ids, top, tail = (array[end - have : end] for array in self._logits_topk)
        return count - have, (ids, top, tail)

    def _farewell(self, ticket: Ticket) -> Record:
        staging = self._staging
        topk = self._topk
        return Record(
            key=ticket.key,
            phase=Phase.VERIFY,
            start=0,
            num_prompt_tokens=0,
            num_accepted=0,
            next_token=-1,
            draft_version=self.draft_version,
            token_ids=_NO_TOKENS,
            draft_probs=_NO_FLOATS,
            features=staging.features[:0],
            teacher_start=0,
            teacher_hidden=None if staging.teacher is None else staging.teacher[:0],
            teacher_topk_ids=np.empty((0, topk), np.int32) if topk else None,
            teacher_topk_logprobs=np.empty((0, topk), np.float32) if topk else None,
            teacher_tail_logprob=_NO_FLOATS if topk else None,
            finished=True,
            tenant=ticket.tenant,
        )
