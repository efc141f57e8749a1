"""Expected acceptance length of a draft on held-out rows.

Per row, the probability that the first j drafted tokens are all accepted is a
cumulative product (conditional, so correlation between steps is included). Their sum
plus the bonus token is the expected number of tokens per verify step, as vLLM reports
it. Tokens are teacher-forced, so this ranks drafts; the canary decides on served speed.

Four forms: `greedy` (argmax equals the target's argmax: exact for greedy serving of
greedy text), `mass` (sum min(p, q), sampled drafts), `argmax_mass` (p of the draft's
argmax: greedy drafts under a sampling target, vLLM's default), `served` (the form that
applies to the request: `greedy` at temperature 0). p is the target's true mass on the
draft vocabulary at temperature 1, not renormalised.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vllm_tide.draft.module import Draft
from vllm_tide.draft.target import TargetRows
from vllm_tide.train.gpu import on_device
from vllm_tide.train.packing import Batch, PackedBatch, pack, plan_rows, take_batch
from vllm_tide.train.sample import Sample, TopK, by_request

FORMS = ("greedy", "mass", "argmax_mass", "served")
_PROBS_BYTES = 128 << 20
_ROWS = 256  # rows with logits [_ROWS, V] in memory at once


@dataclass
class Evaluation:
    """Sums over held-out rows.

    Attributes:
        requests: Per request key: rows, then accepted drafts in each form.
    """

    num_steps: int
    requests: dict[int, list[float]] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        return int(sum(r[0] for r in self.requests.values()))

    def acceptance(self, form: str = "served") -> float:
        """Return expected tokens per verify step, bonus token included (1 to K + 1)."""
        rows, column = self.num_rows, 1 + FORMS.index(form)
        accepted = sum(r[column] for r in self.requests.values())
        return 1.0 + accepted / rows if rows else math.nan

    def standard_error(self, form: str = "served") -> float:
        """Return the standard error of `acceptance` over requests (ratio estimator)."""
        column = 1 + FORMS.index(form)
        return _ratio_error([(r[0], r[column]) for r in self.requests.values()])

    def __add__(self, other: Evaluation) -> Evaluation:
        """Add two evaluations; a request in both is one request with all rows."""
        requests = {key: list(row) for key, row in self.requests.items()}
        for key, row in other.requests.items():
            before = requests.get(key, [0.0] * len(row))
            requests[key] = [a + b for a, b in zip(before, row, strict=True)]
        return Evaluation(self.num_steps, requests)


class Scores:
    """Scores of one draft by request, each evaluated once."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        # Per request key: its windows and its entry in `Evaluation.requests`.
        self._scores: dict[int, tuple[list[Sample], list[float]]] = {}

    def missing(self, samples: Iterable[Sample]) -> list[Sample]:
        """Return samples of requests not yet evaluated with the same windows."""
        requests = by_request(samples)
        out = []
        for key, windows in requests.items():
            known, _ = self._scores.get(key, ([], []))
            if list(map(id, known)) != list(map(id, windows)):
                out += windows
        return out

    def add(self, samples: Iterable[Sample], evaluation: Evaluation) -> None:
        requests = by_request(samples)
        for key, row in evaluation.requests.items():
            self._scores[key] = requests[key], row

    def of(self, samples: Iterable[Sample]) -> Evaluation:
        """Return the evaluation of the samples' requests, as far as they were added."""
        keys = [key for key in by_request(samples) if key in self._scores]
        return Evaluation(self._num_steps, {key: self._scores[key][1] for key in keys})

    def keep(self, keys: Collection[int]) -> None:
        self._scores = {k: v for k, v in self._scores.items() if k in keys}


def gain(new: Evaluation, old: Evaluation, form: str = "served") -> tuple[float, float]:
    """Return the gain in acceptance length and its paired standard error over requests.

    A non-finite score of the new draft counts as zero accepted tokens.
    """
    column = 1 + FORMS.index(form)
    pairs = [
        (
            r[0],
            (r[column] if math.isfinite(r[column]) else 0) - old.requests[key][column],
        )
        for key, r in new.requests.items()
        if key in old.requests
    ]
    rows = sum(n for n, _ in pairs)
    if not rows:
        return 0.0, math.inf
    return sum(d for _, d in pairs) / rows, _ratio_error(pairs)


def _ratio_error(pairs: list[tuple[float, float]]) -> float:
    count, rows = len(pairs), sum(n for n, _ in pairs)
    if count < 2 or not rows:
        return math.inf
    ratio = sum(s for _, s in pairs) / rows
    squares = sum((s - ratio * n) ** 2 for n, s in pairs)
    return math.sqrt(squares * count / (count - 1)) / rows


@torch.no_grad()
def evaluate(
    draft: Draft,
    target: TargetRows,
    samples: Iterable[Sample],
    num_steps: int,
    *,
    capacity: int = 2048,
    dtype: torch.dtype = torch.float32,
    progress: Callable[[], bool] | None = None,
    attention: str = "auto",
    sampled_form: str = "argmax_mass",
) -> Evaluation:
    """Evaluate a draft on the device of the target's rows.

    Args:
        capacity: Rows per batch.
        dtype: Compute dtype of the draft; the target's logits are fp32.
        progress: Called between batches; False ends the evaluation.
        sampled_form: Form that applies to requests above temperature 0.
    """
    result = Evaluation(num_steps)
    per_row = 4 * draft.vocab.target_ids.numel()
    capacity = max(_ROWS, min(capacity, _PROBS_BYTES // per_row))
    rows = target.rows_in(torch.float32)
    queue = deque(samples)
    weights = draft.compute_weights(dtype)
    while queue:
        taken = take_batch(queue, capacity, branches=False)
        forms = [sampled_form if s.sampled else "greedy" for s in taken]
        batch = pack(taken, branches=False)
        _add_batch(result, draft, target, rows, batch, weights, attention, forms)
        if progress is not None and not progress():
            break
    return result


def _target_probs(
    teacher: Tensor | TopK, draft: Draft, target: TargetRows, rows: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the true mass p^D fp32 [M, V_d] and argmax draft id [M] (-1: not in D)."""
    vocab, device = on_device(draft.vocab, rows.device), rows.device
    size = vocab.target_ids.numel()
    if isinstance(teacher, TopK):
        ids = vocab.draft_ids[teacher.ids.long()]
        mass = teacher.logprobs.float().exp().masked_fill(ids < 0, 0.0)
        probs = torch.zeros(len(ids), size, device=device)
        return probs.scatter_add_(1, ids.clamp(min=0), mass), ids[:, 0]
    probs = torch.empty(len(teacher), size, device=device)
    best = torch.empty(len(teacher), dtype=torch.int64, device=device)
    for lo in range(0, len(teacher), _ROWS):
        hidden = teacher[lo : lo + _ROWS].to(rows.dtype)
        z = target.logits(hidden, rows).float()
        best[lo : lo + _ROWS] = vocab.draft_ids[z.argmax(-1)]
        full = torch.softmax(z, dim=-1)
        full = full if vocab.is_identity else full[:, vocab.target_ids]
        probs[lo : lo + _ROWS] = full
    return probs, best


def _add_batch(
    result: Evaluation,
    draft: Draft,
    target: TargetRows,
    rows: Tensor,
    packed: PackedBatch,
    weights: dict[str, Tensor],
    attention: str,
    served: list[str],
) -> None:
    steps = plan_rows(packed, result.num_steps, complete=True)
    if not steps:
        return
    batch, device = Batch.from_plan(packed, steps, draft.vocab.draft_ids), rows.device
    count = steps[0].loss.numel()
    docs = batch.loss.doc[:count]
    batch = on_device(batch, device)
    outputs = draft.forward_steps(
        batch.rows, weights, depth=result.num_steps, attention=attention
    )
    index = batch.loss.teacher
    probs, best = _target_probs(batch.teacher, draft, target, rows)
    greedy = torch.tensor([form == "greedy" for form in served])[docs].to(device)
    other = next((form for form in served if form != "greedy"), "greedy")
    product = {form: torch.ones(count, device=device) for form in FORMS}
    total = {form: torch.zeros(count, device=device) for form in FORMS}
    for normed, at in zip(outputs, index.split(count), strict=True):
        accepted = _accept(draft, weights, normed, probs, best, at)
        accepted["served"] = torch.where(greedy, accepted["greedy"], accepted[other])
        for form in FORMS:
            product[form] *= accepted[form]
            total[form] += product[form]
    total = {form: sums.cpu() for form, sums in total.items()}
    for doc, key in enumerate(packed.keys):
        mine = docs == doc
        entry = result.requests.setdefault(key, [0.0] * (1 + len(FORMS)))
        entry[0] += float(mine.sum())
        for column, form in enumerate(FORMS, start=1):
            entry[column] += float(total[form][mine].sum())


def _accept(
    draft: Draft,
    weights: dict[str, Tensor],
    normed: Tensor,
    probs: Tensor,
    best: Tensor,
    at: Tensor,
) -> dict[str, Tensor]:
    """Return the acceptance probability per row in each form."""
    out = {form: torch.empty(at.numel(), device=at.device) for form in FORMS[:3]}
    for lo in range(0, at.numel(), _ROWS):
        part = slice(lo, lo + _ROWS)
        z, p = draft.logits(normed[part], weights).float(), probs[at[part]]
        choice = z.argmax(-1)
        out["greedy"][part] = (choice == best[at[part]]).float()
        out["argmax_mass"][part] = p.gather(1, choice[:, None])[:, 0]
        out["mass"][part] = torch.minimum(p, z.softmax(-1)).sum(-1)
    return out
