"""Terms of the training loss and their gradients (eagle3-training.md c.5).

Every term has the logit gradient of a cross entropy with a pseudo target t:

    d l / d z = (sum t) q - t,   t = -q * d l / d q  (a multiple of q may be added)

so a weighted sum of terms needs one softmax and one weighted sum of their targets.

    forward_kl  sum p log(p/q)             t = p
    reverse_kl  sum q log(q/p)             t = -q log(q/p)
    lk_hybrid   L kl + (1 - L) (1 - a)     t = L p^ + (1 - L) q 1[q <= p]
    next_token  -log q_x                   t = 1_x
    discard     sum f log(f/q)             t = f, top k of p renormalised

`discard` is the second part of Aurora's eq. 3, filtered as in its section 3.

a = sum min(p, q) is the acceptance and 1 - a the total variation. The KL terms use p^,
renormalised over the draft vocabulary; a uses the target's true mass on it, which
determines what verification accepts.

Shapes: n rows, V draft vocabulary, B outcomes of the teacher (V, or k + 1).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_tide.config import ConfigError, TrainConfig

NEXT_TOKEN, DISCARD = "next_token", "discard"
FLOOR = 1e-30  # lower bound of teacher probabilities in logarithms


class Outcomes:
    """Teacher and draft distributions over all V draft tokens, n rows.

    Attributes:
        z: [n, V] logits, at least fp32.
        q: [n, V] their softmax; `combine` overwrites it.
        lse: [n] logarithm of the sum of exp(z).
        p: [n, B] teacher, sums to one.
        plogp: [n] sum of p log p.
        mass: [n] true mass of the draft vocabulary under the target; None means one.
    """

    def __init__(
        self, z: Tensor, p: Tensor, plogp: Tensor, mass: Tensor | None = None
    ) -> None:
        self.z, self.p, self.plogp, self.mass = z, p, plogp, mass
        top = z.amax(-1)
        self.q = torch.softmax(z, dim=-1)
        self.lse = top - self.q.amax(-1).log()  # saves a pass over z

    @property
    def outcome_q(self) -> Tensor:
        """[n, B] draft's probability of each outcome."""
        return self.q

    @cached_property
    def log_q(self) -> Tensor:
        """[n, B] logarithm of `outcome_q`; zero where the outcome is impossible."""
        return self.z - self.lse[:, None]

    @property
    def listed_p(self) -> Tensor:
        return self.p

    def cross_entropy(self) -> Tensor:
        return self.lse - torch.linalg.vecdot(self.p, self.z)

    def spread(self, target: Tensor) -> Tensor:
        """Convert a pseudo target [n, B] over outcomes to [n, V] over tokens."""
        return target

    @cached_property
    def true_p(self) -> Tensor:
        """[n, B] true probability of each outcome under the target."""
        return self.p if self.mass is None else self.p * self.mass[:, None]

    @cached_property
    def acceptance(self) -> Tensor:
        """[n], a = sum min(p, q)."""
        return torch.minimum(self.true_p, self.outcome_q).sum(-1)

    @cached_property
    def below_target(self) -> Tensor:
        """[n, B], q where q <= p, else zero."""
        q = self.outcome_q
        return torch.where(q <= self.true_p, q, 0.0)


class BucketedOutcomes(Outcomes):
    """Teacher of k listed tokens and one tail outcome for all other tokens.

    Terms compare the two distributions over k + 1 outcomes: exact for listed tokens;
    the tail gives a lower bound of a divergence and an upper bound of acceptance.
    Within the tail, a term moves mass in proportion to q.

    Args:
        z: [n, V] logits.
        p: [n, k + 1] teacher, tail last, zero for a listed token outside D.
        plogp: [n].
        mass: [n] or None.
        ids: int64 [n, k] draft ids, distinct in a row, -1 outside D.
    """

    def __init__(
        self, z: Tensor, p: Tensor, plogp: Tensor, mass: Tensor | None, ids: Tensor
    ) -> None:
        super().__init__(z, p, plogp, mass)
        inside = ids >= 0
        self._at = at = ids.clamp(min=0)
        # Add, not assign: several tokens outside D share column 0.
        hide = torch.where(inside, float("-inf"), 0.0).to(z.dtype)
        others = z.scatter_add(1, at, hide)
        none_left = others.amax(-1, keepdim=True).isneginf()
        log_tail = torch.logsumexp(others, -1, keepdim=True) - self.lse[:, None]
        self._within = torch.softmax(others, -1).masked_fill_(none_left, 0.0)
        listed = (z.gather(1, at) - self.lse[:, None]).masked_fill_(~inside, 0.0)
        q = torch.cat([listed.exp().masked_fill_(~inside, 0.0), log_tail.exp()], -1)
        self._outcome_q = q
        self.log_q = torch.cat([listed, log_tail.masked_fill_(none_left, 0.0)], -1)

    @property
    def outcome_q(self) -> Tensor:
        return self._outcome_q

    @property
    def listed_p(self) -> Tensor:  # [n, k]
        return self.p[:, :-1]

    def cross_entropy(self) -> Tensor:
        """Return [n], -sum p log q over the k + 1 outcomes."""
        return -torch.linalg.vecdot(self.p, self.log_q)

    def spread(self, target: Tensor) -> Tensor:
        """Distribute the tail's target over its tokens in proportion to q."""
        dense = self._within * target[:, -1:]
        return dense.scatter_add_(1, self._at, target[:, :-1])


class TermResult(NamedTuple):
    """Value [n] (nats), pseudo target [n, B], and its sum [n] (None: one) of a term."""

    value: Tensor
    target: Tensor
    total: Tensor | None = None


LK_ETA = 3.0
"""Rate at which `lk_hybrid` moves from KL to TV as acceptance grows."""
DISCARD_TOPK = 10
"""Teacher tokens used by the `discard` term."""


@dataclass(frozen=True)
class LossMix:
    """Weights and parameters of the summed terms.

    Attributes:
        weights: Term to weight, all positive; `discard` comes last.
    """

    weights: Mapping[str, float]
    lk_eta: float = LK_ETA
    discard_topk: int = DISCARD_TOPK

    @classmethod
    def from_config(cls, config: TrainConfig) -> LossMix:
        """Build the mix; terms of weight zero are left out.

        Raises:
            ConfigError: All weights are zero.
        """
        named = {str(n): w for n, w in config.loss.items() if w > 0}
        if not named:
            raise ConfigError(
                "train.loss: every weight is zero; give one term a positive weight, "
                'for example {"forward_kl": 1.0}.'
            )
        last = {n: named.pop(n) for n in (DISCARD,) if n in named}
        return cls({**named, **last})

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.weights)

    @property
    def committed(self) -> tuple[str, ...]:
        return tuple(n for n in self.weights if n != DISCARD)

    @property
    def branch(self) -> tuple[str, ...]:
        return tuple(n for n in self.weights if n == DISCARD)

    @property
    def needs_mass(self) -> bool:
        """True if a term uses acceptance, hence the mass on a pruned vocabulary."""
        return "lk_hybrid" in self.weights


def forward_kl(rows: Outcomes, mix: LossMix) -> TermResult:
    return TermResult(rows.plogp + rows.cross_entropy(), rows.p)


def reverse_kl(rows: Outcomes, mix: LossMix) -> TermResult:
    """Compute KL(q || p^), with p^ at least `FLOOR`."""
    ratio = rows.log_q - rows.p.clamp_min(FLOOR).log()
    target = ratio.mul_(rows.outcome_q).neg_()
    total = target.sum(-1)
    return TermResult(-total, target, total)


def lk_hybrid(rows: Outcomes, mix: LossMix) -> TermResult:
    """Compute L KL(p^ || q) + (1 - L) TV, L = exp(-eta a) per row, detached."""
    share = torch.exp(-mix.lk_eta * rows.acceptance)
    kl = rows.plogp + rows.cross_entropy()
    value = share * kl + (1 - share) * (1.0 - rows.acceptance)
    target = torch.lerp(rows.below_target, rows.p, share[:, None])
    return TermResult(value, target, target.sum(-1))


def discard(rows: Outcomes, mix: LossMix) -> TermResult:
    """Compute KL(f || q) with f the `discard_topk` top tokens of p^, renormalised.

    A top-k teacher with fewer tokens gives all of them. Ties at the cut are broken
    arbitrarily.
    """
    listed = rows.listed_p
    f, at = listed.topk(min(mix.discard_topk, listed.shape[-1]))
    f = f / f.sum(-1, keepdim=True).clamp_min(FLOOR)
    log_q = rows.log_q.gather(1, at)
    value = (torch.xlogy(f, f) - f * log_q).sum(-1)
    target = torch.zeros_like(rows.p).scatter_(1, at, f)
    return TermResult(value, target, f.sum(-1))


TERMS: dict[str, Callable[[Outcomes, LossMix], TermResult]] = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "lk_hybrid": lk_hybrid,
    DISCARD: discard,
}


def combine(
    rows: Outcomes, mix: LossMix, names: Sequence[str], weights: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor]:
    """Return values [T, n] of T terms and the gradient [n, V] of their weighted sum.

    Args:
        rows: n rows; `rows.q` is overwritten.
        weights: [T, n], weight of each term at each row, dtype of the logits.
        labels: int64 [n], draft id of the following token, -1 without one (value and
            gradient of `next_token` are zero).
    """
    values = torch.empty_like(weights)
    results: list[tuple[TermResult, Tensor]] = []
    label_weight: Tensor | None = None
    at = labels.clamp(min=0)[:, None]
    for value, name, weight in zip(values, names, weights, strict=True):
        if name == NEXT_TOKEN:
            label_weight = weight.masked_fill(labels < 0, 0.0)
            nll = rows.lse - rows.z.gather(1, at)[:, 0]
            value.copy_(nll.masked_fill_(labels < 0, 0.0))
        else:
            result = TERMS[name](rows, mix)
            value.copy_(result.value)
            results.append((result, weight))
    if len(results) == 1 and label_weight is None:  # the common case: two passes over q
        ((result, weight),) = results
        grad = rows.q if result.total is None else rows.q.mul_(result.total[:, None])
        return values, grad.sub_(rows.spread(result.target)).mul_(weight[:, None])
    total = torch.zeros_like(rows.lse)
    target = torch.zeros_like(rows.p)
    for result, weight in results:
        total += weight if result.total is None else weight * result.total
        target.addcmul_(result.target, weight[:, None])
    if label_weight is not None:
        total += label_weight
    grad = rows.q.mul_(total[:, None])
    if results:
        grad.sub_(rows.spread(target))
    if label_weight is not None:
        grad.scatter_add_(1, at, -label_weight[:, None])
    return values, grad
