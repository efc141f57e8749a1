"""Training documents: consecutive captured positions of one request."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Branch:
    """Rejected draft rows of one verify step, for the `discard` loss.

    Attributes:
        position: Position a of the last committed token before the rejection.
        tokens: int32 [m], b_1..b_m at positions a+1..a+m.
        features: [m, A*H] target features conditioned on the branch.
        teacher_hidden: [m, H] or None.
        teacher_topk: Rows of a top-k teacher, or None.
    """

    position: int
    tokens: Tensor
    features: Tensor
    teacher_hidden: Tensor | None
    teacher_topk: TopK | None = None


@dataclass(frozen=True)
class TopK:
    """Top-k teacher: ids int32 [S, k], log-probabilities and tail float32."""

    ids: Tensor
    logprobs: Tensor
    tail_logprob: Tensor

    def __getitem__(self, rows: slice | Tensor) -> TopK:
        return TopK(self.ids[rows], self.logprobs[rows], self.tail_logprob[rows])


@dataclass(frozen=True)
class Sample:
    """S consecutive positions `start .. start + S - 1` of one request.

    Attributes:
        num_prompt_tokens: Token x_t is generated iff t >= num_prompt_tokens.
        tokens: int32 [S], token at each position.
        features: [S, A*H], captured residual streams, capture dtype.
        has_teacher: bool [S].
        teacher_hidden: [S, H] after the final norm (rows without teacher: zeros).
        teacher_topk: Used when there is no hidden teacher.
        by_memory: bool [S], the position is of a step that the memory drafted: chains
            of the draft do not begin there, and are not trained; None: there is none.
        in_vocab: bool [S], the row's next token is in a pruned draft vocabulary; None:
            all are.
        loss_from: First position usable as teacher (>= num_prompt_tokens); later than
            the prompt only in windows that repeat rows as context.
        tenant: Id of the request's tenant; 0 is none.
        captured_unix_s: Time of assembly (trainer's clock, s); 0 is unknown.
        trained: Cycle of each training pass over the document.
    """

    key: int
    start: int
    num_prompt_tokens: int
    tokens: Tensor
    features: Tensor
    has_teacher: Tensor
    teacher_hidden: Tensor | None = None
    teacher_topk: TopK | None = None
    by_memory: Tensor | None = None
    in_vocab: Tensor | None = None
    loss_from: int = 0
    branches: tuple[Branch, ...] = field(default_factory=tuple)
    tenant: int = 0
    captured_unix_s: float = 0.0
    sampled: bool = False
    trained: list[int] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return self.tokens.numel()

    def why_unusable(self, vocab_size: int) -> str | None:
        """Return why this document cannot be trained on, None if it can.

        Args:
            vocab_size: Size of the target's vocabulary.
        """
        teachers = [self.teacher_topk, *(b.teacher_topk for b in self.branches)]
        topk = [teacher for teacher in teachers if teacher is not None]
        ids = [self.tokens, *(b.tokens for b in self.branches)]
        for tokens in (*ids, *(teacher.ids for teacher in topk)):
            if tokens.numel() and not (
                int(tokens.min()) >= 0 and int(tokens.max()) < vocab_size
            ):
                return "token_out_of_range"
        floats = [self.features, self.teacher_hidden]
        for branch in self.branches:
            floats += [branch.features, branch.teacher_hidden]
        if not all(bool(x.isfinite().all()) for x in floats if x is not None):
            return "not_finite"
        if any(bool(teacher.logprobs.isnan().any()) for teacher in topk):
            return "not_finite"
        return None

    def in_vocabulary(self, members: Tensor) -> Sample:
        """Return a copy with `in_vocab` set; the last row's next token is unknown.

        Args:
            members: bool [V], target tokens in the draft vocabulary.
        """
        known = torch.ones(self.num_tokens, dtype=torch.bool)
        known[:-1] = members[self.tokens[1:].long()]
        return replace(self, in_vocab=known)

    @property
    def valid(self) -> Tensor:
        """Bool [S]: the position is a usable teacher."""
        positions = torch.arange(self.start, self.start + self.num_tokens)
        out = self.has_teacher & (
            positions >= max(self.num_prompt_tokens, self.loss_from)
        )
        return out if self.in_vocab is None else out & self.in_vocab

    @property
    def starts(self) -> Tensor:
        """Bool [S]: the teacher of a chain's first token may be at the position."""
        if self.by_memory is None:
            return torch.ones(self.num_tokens, dtype=torch.bool)
        return ~self.by_memory

    @property
    def num_trained(self) -> int:
        """Number of rows trained at step 0."""
        return int((self.valid & self.starts)[1:].sum())

    @property
    def trained_positions(self) -> Tensor:
        """int64 [num_trained]: positions of the request trained at step 0."""
        return self.start + 1 + (self.valid & self.starts)[1:].nonzero()[:, 0]

    def superseded(self, positions: Tensor, branches: frozenset[int]) -> Sample | None:
        """Return this document without positions that newer documents train.

        Each (request, position) is then trained once, in the newest document. Rows
        before the last trained one stay as context. None if no trained row is left.
        """
        mine = torch.arange(self.start, self.start + self.num_tokens)
        left = replace(
            self,
            has_teacher=self.has_teacher & ~torch.isin(mine, positions),
            branches=tuple(b for b in self.branches if b.position not in branches),
        )
        if not left.num_trained:
            return None
        last = max(
            int(left.trained_positions[-1]), *(b.position for b in left.branches), 0
        )
        return left.window(0, last + 1 - self.start, 0)

    @property
    def num_bytes(self) -> int:
        total = self.tokens.nbytes + self.features.nbytes
        if self.teacher_hidden is not None:
            total += self.teacher_hidden.nbytes
        if self.teacher_topk is not None:
            total += self.teacher_topk.ids.nbytes + self.teacher_topk.logprobs.nbytes
        return total + sum(b.features.nbytes for b in self.branches)

    def window(self, lo: int, hi: int, loss_from: int) -> Sample:
        """Return rows [lo, hi) as a separate document with the same positions."""
        rows = slice(lo, hi)
        first, last = self.start + lo, self.start + hi
        # A branch is trained in the same window as its row.
        low = max(first, loss_from)
        hidden, topk = self.teacher_hidden, self.teacher_topk
        return replace(
            self,
            start=first,
            tokens=self.tokens[rows],
            features=self.features[rows],
            has_teacher=self.has_teacher[rows],
            teacher_hidden=None if hidden is None else hidden[rows],
            teacher_topk=None if topk is None else topk[rows],
            by_memory=None if self.by_memory is None else self.by_memory[rows],
            in_vocab=None if self.in_vocab is None else self.in_vocab[rows],
            loss_from=max(self.loss_from, loss_from),
            branches=tuple(b for b in self.branches if low <= b.position < last),
            trained=self.trained.copy(),
        )


def by_request(samples: Iterable[Sample]) -> dict[int, list[Sample]]:
    """Group windows by request key, both in order of appearance."""
    out: dict[int, list[Sample]] = {}
    for sample in samples:
        out.setdefault(sample.key, []).append(sample)
    return out


def split_windows(sample: Sample, max_tokens: int) -> list[Sample]:
    """Split a long document into windows of at most `max_tokens` rows.

    Windows are laid out from the end. A quarter of each but the first is context,
    trained in the window before, so that every row is trained once. Prompt rows that
    no window needs as context are left out.
    """
    size = sample.num_tokens
    if size <= max_tokens:
        return [sample] if sample.num_trained else []
    context = max_tokens // 4
    out: list[Sample] = []
    hi = size
    while True:
        lo = max(0, hi - max_tokens)
        # Row lo has no predecessor in this window, so it is no teacher.
        loss_from = sample.start + lo + context if lo > 0 else 0
        window = sample.window(lo, hi, loss_from)
        if window.num_trained:
            out.append(window)
        if lo == 0 or loss_from <= sample.num_prompt_tokens:
            break
        hi = lo + context
    return out[::-1]
