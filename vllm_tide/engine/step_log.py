"""Decisions of a step of Model Runner V2, copied to the host without waiting for it.

On V2 tokens, verdicts and confidences live on the device, and the host runs ahead of
it. A step's numbers are copied to pinned memory behind the step itself; they are read
once they have landed, a step or two later, in the order of the steps. Nothing here ever
waits: a step that finds no free place is left out and counted.

The small arrays are packed on the model's stream, before the next step overwrites what
they are read from, and copied together. The rows come on a stream of their own
(`device_stage.py`), and may take longer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from vllm_tide.engine.row_stage import StagedRows
from vllm_tide.engine.timers import Reading
from vllm_tide.kernels.gather_step import gather_step

# Steps under way: two that the scheduler queues, one whose rows are being written.
PLACES = 3
# On a device also those whose rows are still being copied beside the next steps.
DEVICE_PLACES = 6


def cut_on_device(batch: Any) -> bool:
    """Whether adaptive verification cut the drafts of a batch where no host sees it.

    The host's arrays of vLLM's `InputBatch` then have the right sums only.
    """
    return batch.max_query_len is not None


class Place:
    """Host memory for one step, and the event that says it is filled."""

    def __init__(
        self, max_rows: int, max_reqs: int, depth: int, device: torch.device
    ) -> None:
        self._on_host = device.type == "cpu"
        # What `gather_step` packs, of a step of the largest size.
        most = max_reqs * (2 * depth + 6) + 2 + max_rows
        pinned = {"pin_memory": not self._on_host}
        self._host = torch.empty(most, dtype=torch.int32, **pinned)
        self._device = self._host
        if not self._on_host:
            self._device = torch.zeros(most, dtype=torch.int32, device=device)
        self._shapes: list[torch.Size] = []
        self._event = None if self._on_host else torch.cuda.Event()

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
        if not self._on_host:
            size = sum(part.numel() for part in parts)
            self._host[:size].copy_(self._device[:size], non_blocking=True)

    def seal(self) -> None:
        """Everything that belongs to the step was enqueued on the current stream."""
        if self._event is not None:
            self._event.record()

    def filled(self) -> bool:
        """True if the copies have landed; never waits."""
        return self._event is None or bool(self._event.query())

    def arrays(self) -> list[np.ndarray]:
        """The parts that `fill` was given, int32 but for the confidence."""
        host, at, found = self._host.numpy(), 0, []
        for shape in self._shapes:
            found.append(host[at : at + shape.numel()].reshape(shape))
            at += shape.numel()
        found[4] = found[4].view(np.float32)
        return found


@dataclass(slots=True)
class Timing:
    """Times of a step by one clock.

    Attributes:
        continues: Whether the engine cannot have idled since the step before.
        read: Its times, once the step has landed.
    """

    continues: bool
    read: Reading


@dataclass(slots=True)
class Step:
    """One step. What the host knew at once, and, once landed, what the device decided.

    Attributes:
        req_ids: Requests in the order of the batch.
        bounds: int32 [n + 1], their rows. Where drafts are cut on the device, this,
            `drafts` and `logit_ends` are bounds from above until the step is read.
        drafts: int32 [n], drafted tokens that were verified, placeholders included.
        padded: bool [n], whether a request's drafts are placeholders: nothing had been
            drafted for it yet.
        logit_ends: int32 [n], end of each request's rows in the logits.
        num_prompt_tokens: int32 [n].
        version: Version of the draft that runs after it.
        steps: Draft steps that ran, for the next step's verification.
        whole: Whether all of it was enqueued, draft and copies included.
        cut: Whether drafts were cut on the device.
        trimmed: int32 [n], drafted tokens that were cut there, once read.
        after_gap: Whether the step before it was lost: what that one drafted for this
            one is not known.
        full: For capture: True if its rows were staged, False if it asks for ids and
            counts only, None if it is left out.
        first: Of each request whose rows were staged: the first of them there.
        size: Bytes of the ring that they may take.
        timing: For control: what the clock says of it.
        cost: For capture: `Record.cost`, once control has learnt of the step.
        verify_chance: `Record.verify_chance` of requests that `explored` does not name.
        explored: The same of drafts that only exploration verified, by request.
        number: Which step it is.
        memory: bool [n], whether the verified drafts were the memory's instead of
            the draft's, once control has learnt of the step; None: nobody's were.
        ended: Requests that were known to have ended when the next step began; None
            before that.
    """

    req_ids: Sequence[str]
    bounds: np.ndarray
    drafts: np.ndarray
    padded: np.ndarray
    logit_ends: np.ndarray
    num_prompt_tokens: np.ndarray
    version: int
    place: Place
    steps: int = 0
    whole: bool = False
    cut: bool = False
    trimmed: np.ndarray | None = None
    after_gap: bool = False
    full: bool | None = None
    staged: StagedRows | None = None
    first: dict[int, int] = field(default_factory=dict)
    size: int = 0
    timing: Timing | None = None
    cost: float = 1.0
    verify_chance: float = 1.0
    explored: dict[str, float] = field(default_factory=dict)
    number: int = 0
    memory: np.ndarray | None = None
    ended: tuple[str, ...] | None = None
    seen: bool = False
    start: np.ndarray | None = None
    emitted: np.ndarray | None = None
    sampled: np.ndarray | None = None
    token_ids: np.ndarray | None = None
    confidence: np.ndarray | None = None
    drafted: np.ndarray | None = None

    @property
    def rows(self) -> int:
        return int(self.bounds[-1])

    def read(self) -> None:
        """Take the landed numbers: views of the place, good until it is given back.

        Sets `start` int64 [n] position of each request's first row, `emitted` int32
        [n] tokens committed (0 for a prefill chunk that is not the last), `sampled`
        int32 [n, 1 or K + 1], `token_ids` int32 [rows], `confidence` float32 [n, K]
        and `drafted` int32 [n], the first drafted token.
        """
        seq_lens, self.emitted, self.sampled, *rest = self.place.arrays()
        self.token_ids, self.confidence, self.drafted, *cuts = rest
        if self.cut:
            self.bounds, logit_bounds = cuts
            self.logit_ends = logit_bounds[1:]
            # One row of a request's logits is no draft's.
            verified = np.diff(logit_bounds) - 1
            self.trimmed, self.drafts = self.drafts - verified, verified
        self.start = seq_lens.astype(np.int64) - np.diff(self.bounds)


class StepLog:
    """Steps under way, in order."""

    def __init__(
        self, max_rows: int, max_reqs: int, depth: int, device: torch.device
    ) -> None:
        count = PLACES if device.type == "cpu" else DEVICE_PLACES
        self._free = [Place(max_rows, max_reqs, depth, device) for _ in range(count)]
        self.places = tuple(self._free)
        self.places[0].warm_up()
        self._steps: deque[Step] = deque()
        self._gap = False
        self.lost = 0

    def open(self, batch: Any, prompt_len: np.ndarray, version: int) -> Step | None:
        """The target ran, the draft is next: note the step.

        Args:
            batch: vLLM's `InputBatch` (V2).
            prompt_len: int32, prompt length by request slot.

        Returns:
            The step, which `fill` completes, or None if no place was free.
        """
        if self._steps and not self._steps[-1].whole:
            self._lose(self._steps[-1])  # a fault kept it from being filled
        if not self._free:
            self.lost += 1
            self._gap = True
            return None
        place, n = self._free.pop(), batch.num_reqs
        try:
            drafts = batch.num_draft_tokens_per_req
            if drafts is None:
                drafts = np.zeros(n, np.int32)
            step = Step(
                req_ids=batch.req_ids,
                bounds=batch.query_start_loc_np[: n + 1],
                drafts=drafts,
                # Drafts are made only after the last row of a prefill.
                padded=batch.is_prefilling_np & (drafts > 0),
                logit_ends=batch.cu_num_logits_np[1:],
                num_prompt_tokens=prompt_len[batch.idx_mapping_np],
                version=version,
                place=place,
                cut=cut_on_device(batch),
                after_gap=self._gap,
            )
        except BaseException:
            self._free.append(place)
            self._gap = True
            raise
        self._gap = False
        self._steps.append(step)
        return step

    def skip(self) -> None:
        """A step is not recorded: what it drafted is not known."""
        self._gap = True

    def fill(self, step: Step, *numbers: Any) -> None:
        """The step was enqueued whole: enqueue the copies of its numbers."""
        try:
            step.place.fill(*numbers)
            step.place.seal()
        except BaseException:
            self._lose(step)
            raise
        step.whole = True

    def _lose(self, step: Step) -> None:
        """Nobody learns of it; its rows may be on their way, so it waits its turn."""
        step.whole = step.seen = self._gap = True
        step.full = None

    def begin(self, ended: Sequence[str]) -> bool:
        """The next step begins.

        Returns:
            Whether a step under way took note of them; else nothing is under way.
        """
        if not self._steps:
            return False
        newest = self._steps[-1]
        newest.ended = (*(newest.ended or ()), *ended)
        return True

    def landed(self) -> Iterator[Step]:
        """Steps whose numbers have landed since the last call, in order."""
        for step in self._steps:
            if step.seen:
                continue
            if not step.whole or not step.place.filled():
                return
            step.seen = True
            step.read()
            yield step

    def done(self, wait_for_next: bool) -> Iterator[Step]:
        """Landed steps that nobody else will look at; their places are free after.

        Args:
            wait_for_next: Only those after which another step has begun.
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
                self._free.append(step.place)
