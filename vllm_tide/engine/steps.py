"""Asynchronous copies of a step's results to the host on Model Runner V2.

On V2 tokens, acceptances and confidences are on the device, and the host runs ahead of
it. A step's numbers are copied to pinned memory after the step, and read once they have
landed, a step or two later, in the order of the steps. Nothing blocks: a step without a
free buffer is skipped and counted. (Model Runner V1 fills a `Step` at its end, see
`worker_v1.py`.)

The small arrays are packed on the model's stream, before the next step overwrites their
sources, and copied together on another stream, so that the model's stream never waits
for a copy. Rows are copied after them (`device_stage.py`) and may land later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from vllm_tide.capture.step import Step
from vllm_tide.kernels.gather_step import gather_step
from vllm_tide.kernels.topk_teacher import TopKWorkspace, topk_teacher

# Steps in flight: two queued by the scheduler, one with rows being written.
BUFFERS = 3
# On a device also those with rows still being copied.
DEVICE_BUFFERS = 6


def cut_on_device(batch: Any) -> bool:
    """Return whether adaptive verification cut the drafts of a batch on the device.

    Then the host arrays of vLLM's `InputBatch` are correct in sum only.
    """
    return batch.max_query_len is not None


class StepBuffer:
    """Host memory for one step, and the event after its copies."""

    def __init__(
        self,
        max_rows: int,
        max_reqs: int,
        depth: int,
        device: torch.device,
        copies: torch.cuda.Stream | None = None,
    ) -> None:
        self._on_host = device.type == "cpu"
        self._copies = copies
        # Output size of `gather_step` for a step of the largest size.
        most = max_reqs * (2 * depth + 6) + 2 + max_rows
        pinned = {"pin_memory": not self._on_host}
        self._host = torch.empty(most, dtype=torch.int32, **pinned)
        self._device = self._host
        if not self._on_host:
            self._device = torch.zeros(most, dtype=torch.int32, device=device)
        self._shapes: list[torch.Size] = []
        self._packed = self._event = None
        if not self._on_host:
            self._packed, self._event = torch.cuda.Event(), torch.cuda.Event()

    def fill(
        self,
        batch: Any,
        sampler_output: Any,
        confidence: torch.Tensor,
        draft_tokens: torch.Tensor,
    ) -> None:
        """Enqueue the copies.

        Args:
            batch: vLLM's `InputBatch` (V2).
            sampler_output: vLLM's `SamplerOutput` (V2).
            confidence: float32 [>= n, K], probabilities of the drafted tokens.
            draft_tokens: int64 [>= n, K], drafted tokens.
        """
        n, rows = batch.num_reqs, batch.num_tokens
        parts = [
            batch.seq_lens[:n],
            sampler_output.num_sampled[:n],
            sampler_output.sampled_token_ids[:n],
            batch.input_ids[:rows],
            confidence[:n],
            draft_tokens[:n, 0],
        ]
        if cut_on_device(batch):
            parts += [batch.query_start_loc[: n + 1], batch.cu_num_logits[: n + 1]]
        self._enqueue(parts)

    def warm_up(self) -> None:
        one, row = self._device[:1], torch.zeros_like(self._device[:2]).view(1, 2)
        self._enqueue([one, one, row.long(), one, row.float(), row.long()[:, 0]])

    def _enqueue(self, parts: list[torch.Tensor]) -> None:
        self._shapes = [part.shape for part in parts]
        gather_step(parts, self._device)
        if self._packed is None or self._event is None or self._copies is None:
            return
        size = sum(part.numel() for part in parts)
        self._packed.record()
        self._copies.wait_event(self._packed)
        with torch.cuda.stream(self._copies):
            self._host[:size].copy_(self._device[:size], non_blocking=True)
            self._event.record()

    def filled(self) -> bool:
        """Return whether the copies are complete; does not block."""
        return self._event is None or bool(self._event.query())

    def arrays(self) -> list[np.ndarray]:
        """Return the arrays passed to `fill`, int32 except for the confidence."""
        host, at, arrays = self._host.numpy(), 0, []
        for shape in self._shapes:
            arrays.append(host[at : at + shape.numel()].reshape(shape))
            at += shape.numel()
        arrays[4] = arrays[4].view(np.float32)
        return arrays


class ConfidenceTable:
    """Table of confidences (highest probability of a row), filled per draft step.

    Filled in every draft pass, mostly inside its captured graph, or from vLLM's
    acceptance estimator after the step. A softmax there would
    keep two float32 tables of the whole vocabulary allocated. Therefore a device uses
    the kernel of the top-k teacher for one token, with preallocated memory.

    Args:
        vocab: Entries of a row; rows of another length cause allocations.
        block: Whether one pass drafts all tokens of a request.

    Attributes:
        table: float32 [max_reqs, depth], on the device.
    """

    def __init__(
        self,
        max_reqs: int,
        depth: int,
        vocab: int,
        device: torch.device,
        block: bool = False,
    ) -> None:
        self.table = torch.zeros(max_reqs, depth, device=device)
        self._vocab = vocab
        self._workspace = None
        if device.type != "cpu":
            rows = max_reqs * depth if block else max_reqs
            self._workspace = TopKWorkspace(rows, vocab, 1, device)

    def keep(self, logits: torch.Tensor, draft_step: torch.Tensor) -> None:
        """Store the confidences of a draft step; does not block.

        Args:
            logits: [n, vocab], n at most `max_reqs`; [n * depth, vocab] for a block,
                request by request.
            draft_step: int64 [], number of the step, on the device for graph replay;
                [n * depth] for a block.
        """
        confidence = self._highest(logits)
        if draft_step.ndim:
            self.table.view(-1)[: len(confidence)] = confidence[:, 0]
            return
        where = draft_step.expand(len(confidence), 1)
        self.table[: len(confidence)].scatter_(1, where, confidence)

    def take(self, estimator: Any, slots: torch.Tensor) -> None:
        """Compute the confidences from the features of vLLM's acceptance estimator.

        With adaptive verification it has read the logits already. Its features are the
        log-odds of the highest probability, at the request's temperature.

        Args:
            estimator: vLLM's `OnlineAcceptanceEstimator`.
            slots: integer [n], on the device.
        """
        rows = self.table[: len(slots)]
        torch.index_select(estimator.features, 0, slots, out=rows)
        rows.sigmoid_()

    def _highest(self, logits: torch.Tensor) -> torch.Tensor:
        if self._workspace is None:
            return torch.softmax(logits.float(), dim=-1).amax(dim=-1, keepdim=True)
        fits = logits.shape[1] == self._vocab
        top = topk_teacher(logits, 1, self._workspace if fits else None)
        return top.logprobs.exp_()


class StepLog:
    """Steps in flight, in order."""

    def __init__(
        self, max_rows: int, max_reqs: int, depth: int, device: torch.device
    ) -> None:
        count, copies = BUFFERS, None
        if device.type != "cpu":
            count, copies = DEVICE_BUFFERS, torch.cuda.Stream(device)
        sizes = max_rows, max_reqs, depth
        self._free = [StepBuffer(*sizes, device, copies) for _ in range(count)]
        self.buffers = tuple(self._free)
        self.buffers[0].warm_up()
        self._steps: deque[Step] = deque()
        self._gap = False
        self.lost = 0

    def open(self, batch: Any, prompt_len: np.ndarray, version: int) -> Step | None:
        """Append a step, after the target's forward and before the draft's.

        Args:
            batch: vLLM's `InputBatch` (V2).
            prompt_len: int32, prompt length by request slot.

        Returns:
            The step, which `fill` completes; None if no buffer is free.
        """
        if self._steps and not self._steps[-1].whole:
            self._lose(self._steps[-1])  # not filled because of a fault
        if not self._free:
            self.lost += 1
            self._gap = True
            return None
        buffer, n = self._free.pop(), batch.num_reqs
        try:
            drafts = batch.num_draft_tokens_per_req
            if drafts is None:
                drafts = np.zeros(n, np.int32)
            step = Step(
                req_ids=batch.req_ids,
                bounds=batch.query_start_loc_np[: n + 1],
                drafts=drafts,
                # Drafts of a request in its prefill are placeholders.
                padding=np.where(batch.is_prefilling_np, drafts, 0),
                logit_ends=batch.cu_num_logits_np[1:],
                num_prompt_tokens=prompt_len[batch.idx_mapping_np],
                version=version,
                buffer=buffer,
                cut=cut_on_device(batch),
                after_gap=self._gap,
            )
        except BaseException:
            self._free.append(buffer)
            self._gap = True
            raise
        self._gap = False
        self._steps.append(step)
        return step

    def skip(self) -> None:
        """Mark a gap: the drafts of a step that is not recorded are unknown."""
        self._gap = True

    def fill(self, step: Step, *numbers: Any) -> None:
        """Enqueue the copies of a step's numbers and rows, after all of the step."""
        try:
            step.buffer.fill(*numbers)
            if step.staged is not None:
                step.staged.send()
        except BaseException:
            self._lose(step)
            raise
        step.whole = True

    def _lose(self, step: Step) -> None:
        """Mark a step as lost; it stays in the log while its rows may be in flight."""
        step.whole = step.seen = self._gap = True
        step.full = None

    def begin(self, ended: Sequence[str]) -> bool:
        """Add ended requests to the newest step in flight, as the next one begins.

        Returns:
            Whether there is a step in flight.
        """
        if not self._steps:
            return False
        newest = self._steps[-1]
        newest.ended = (*(newest.ended or ()), *ended)
        return True

    def landed(self) -> Iterator[Step]:
        """Yield the steps that have landed since the last call, in order."""
        for step in self._steps:
            if step.seen:
                continue
            if not step.whole or not step.buffer.filled():
                return
            step.seen = True
            step.read()
            yield step

    def done(self, wait_for_next: bool) -> Iterator[Step]:
        """Yield and remove landed steps; their buffers are free afterwards.

        Args:
            wait_for_next: Only steps that are followed by another one.
        """
        while self._steps and self._steps[0].seen:
            step = self._steps[0]
            if wait_for_next and step.ended is None:
                return
            if step.staged is not None and not step.staged.filled():
                return
            self._steps.popleft()
            try:
                yield step
            finally:
                if step.staged is not None:
                    step.staged.release()
                self._free.append(step.buffer)
