"""Numerators and denominators of a step's loss, summed over ranks before they divide.

One vector goes out before the logits (denominators: the gradient needs them) and one
after (numerators: only reported). Every rank sends both, with or without rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_tide.train.loss_rows import (
    NUM_KINDS,
    LossRows,
    kind_of,
    kind_weights,
    request_weights,
    sum_by_step,
)
from vllm_tide.train.loss_terms import LossMix

# Sums a float64 vector over all ranks.
Reduce = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class LossSums:
    """Sums over all ranks for T terms and K steps.

    Attributes:
        mix: The terms.
        numerators: float64 [T, K], weighted values.
        denominators: float64 [T, K], weights; zero where a term has no row.
        num_tokens: Packed rows, branch rows included.
        num_loss_rows: Rows with a loss.
        num_branch_rows: Those of them on rejected branches.
    """

    mix: LossMix
    numerators: Tensor
    denominators: Tensor
    num_tokens: int
    num_loss_rows: int
    num_branch_rows: int

    @property
    def means(self) -> Tensor:
        """float64 [T, K'], K' up to the last step with a row."""
        some = self.denominators > 0
        used = int(some.any(0).nonzero().max()) + 1
        mean = self.numerators / self.denominators.masked_fill(~some, 1.0)
        return mean[:, :used]

    @property
    def step_losses(self) -> list[float]:
        """Per step, the weighted sum of the terms' means."""
        means = self.means
        weights = torch.tensor(list(self.mix.weights.values()), dtype=means.dtype)
        return (weights @ means).tolist()

    @property
    def terms(self) -> dict[str, list[float]]:
        """Per term, its mean at each step."""
        return dict(zip(self.mix.names, self.means.tolist(), strict=True))


class LossSummer:
    """Weighs the rows of one batch; one object per step.

    All on the host, where the rows were planned.

    Args:
        mix: T terms.
        num_steps: K.
        decay: gamma, weight of each further step.
        reduce: Sums a float64 vector over ranks; None is one rank.
    """

    def __init__(
        self, mix: LossMix, num_steps: int, decay: float, reduce: Reduce | None = None
    ) -> None:
        """Nothing summed yet."""
        self.mix, self.num_steps, self.decay = mix, num_steps, decay
        self.num_ranks = 1
        self._reduce = reduce
        self._kinds = [kind_of(name) for name in mix.names]
        self._step: Tensor | None = None
        self._by_term = torch.zeros(len(self._kinds), 0)
        self._denominators = torch.zeros(NUM_KINDS, num_steps)
        self._counts = [0, 0, 0]

    def weigh(
        self,
        rows: LossRows | None,
        labels: Tensor | None,
        keys: Sequence[int],
        num_tokens: int,
    ) -> Tensor | None:
        """Weight of each term at each row.

        Args:
            rows: This rank's L rows; None has none.
            labels: From `LossRows.labels`.
            keys: Request key of each document.
            num_tokens: Packed rows, branch rows included.

        Returns:
            float64 [T, L] (L = 0 without rows); None when no rank has a row that a
            term applies to.
        """
        sums = torch.zeros(NUM_KINDS, self.num_steps, dtype=torch.float64)
        counts = [1, num_tokens, 0, 0]
        if rows is not None and labels is not None:
            by_kind = kind_weights(rows, labels, request_weights(rows, keys))
            sums = sum_by_step(by_kind, rows.step, self.num_steps)
            self._by_term, self._step = by_kind[self._kinds], rows.step
            counts[2:] = rows.branch.numel(), rows.branch.numel() - rows.num_committed
        counted = torch.tensor(counts, dtype=torch.float64)
        vector = self._sum(torch.cat([sums.flatten(), counted]))
        self._denominators = vector[:-4].view_as(sums)[self._kinds]
        self.num_ranks, *self._counts = (int(c) for c in vector[-4:].tolist())
        if not bool((self._denominators > 0).any()):
            return None
        if self._step is None:
            return self._by_term.to(torch.float64)
        return self._by_term * self._scale()[:, self._step]

    def close(self, values: Tensor | None) -> LossSums:
        """Sum the values [T, L] of this rank (None has none) and of the others."""
        sums = torch.zeros_like(self._denominators)
        if values is not None and self._step is not None:
            weighed = values.cpu() * self._by_term
            sums = sum_by_step(weighed, self._step, self.num_steps)
        sums = self._sum(sums.flatten()).view_as(sums)
        return LossSums(self.mix, sums, self._denominators, *self._counts)

    def _scale(self) -> Tensor:
        """float64 [T, K]: w_term gamma^i / denominator; zero without a row."""
        share = self._denominators
        weights = torch.tensor(list(self.mix.weights.values()), dtype=torch.float64)
        decay = self.decay ** torch.arange(self.num_steps, dtype=torch.float64)
        inverse = torch.where(share > 0, 1.0 / share, 0.0)
        return weights[:, None] * decay * inverse

    def _sum(self, vector: Tensor) -> Tensor:
        return vector if self._reduce is None else self._reduce(vector)
