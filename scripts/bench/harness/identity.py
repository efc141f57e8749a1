"""Token by token comparison of the greedy outputs of two arms.

Batches differ between arms, so sums are rounded differently, and the argmax of two
nearly equal logits may differ. A first difference is therefore re-scored: the target
runs over the common prefix once in the served type and once in a wider one. The largest
deviation between the two over the vocabulary is the rounding error of this row. Each of
the two candidates may be off by at most this error, in opposite directions, hence the
factor 2. A difference is a near tie if both candidates are within that distance of the
best logit; otherwise the output is wrong. A request is compared up to its first
difference.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.harness.client import RequestResult

# Two candidates, each off by one rounding error.
TOLERANCE_ERRORS = 2.0


@dataclass(frozen=True, slots=True)
class Difference:
    """First difference between a request's outputs in two arms."""

    arms: tuple[str, str]
    index: int  # of the request in the stream
    position: int  # of the output token, 0 is the first
    tokens: tuple[int, int]
    prefix: tuple[int, ...]  # prompt and the common output before the difference


@dataclass(frozen=True, slots=True)
class Rescored:
    """A difference with the target's logits of its two candidates."""

    difference: Difference
    logit_gap: float  # between the two candidates, in the wider type
    below_best: float  # of the lower candidate, to the row's largest logit
    rounding_error: float  # of the served type at this row, over the vocabulary
    near_tie: bool

    def summary(self) -> dict[str, object]:
        record = asdict(self)
        del record["difference"]
        d = self.difference
        return {
            "arms": list(d.arms),
            "request": d.index,
            "position": d.position,
            **record,
        }


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Return the first position where two outputs differ; None if equal."""
    for position, (left, right) in enumerate(zip(a, b, strict=False)):
        if left != right:
            return position
    return None if len(a) == len(b) else min(len(a), len(b))


def compare(
    names: tuple[str, str],
    left: Sequence[RequestResult],
    right: Sequence[RequestResult],
) -> list[Difference]:
    """Compare two arms; skip failed requests, which are counted elsewhere."""
    if [r.index for r in left] != [r.index for r in right]:
        raise ValueError(f"arms {names[0]} and {names[1]} ran different streams")
    differences = []
    for a, b in zip(left, right, strict=True):
        if not (a.ok and b.ok):
            continue
        if a.prompt_token_ids != b.prompt_token_ids:
            raise ValueError(f"request {a.index} was tokenised differently")
        position = first_difference(a.token_ids, b.token_ids)
        if position is None:
            continue
        if position >= min(len(a.token_ids), len(b.token_ids)):
            raise ValueError(f"request {a.index} is shorter in one arm")
        tokens = (a.token_ids[position], b.token_ids[position])
        prefix = (*a.prompt_token_ids, *a.token_ids[:position])
        differences.append(Difference(names, a.index, position, tokens, prefix))
    return differences


def compare_arms(arms: Mapping[str, Sequence[RequestResult]]) -> list[Difference]:
    """Compare every arm with the first one."""
    names = list(arms)
    differences: list[Difference] = []
    for name in names[1:]:
        differences += compare((names[0], name), arms[names[0]], arms[name])
    return differences


# Returns one row of logits in the served type and in the wider one.
Scorer = Callable[[Sequence[int]], tuple[Sequence[float], Sequence[float]]]


def rescore(difference: Difference, scorer: Scorer) -> Rescored:
    """Decide whether a difference is a near tie."""
    served, wide = scorer(difference.prefix)
    error = max(abs(a - b) for a, b in zip(served, wide, strict=True))
    first, second = (wide[token] for token in difference.tokens)
    below = max(wide) - min(first, second)
    # Both candidates must be near the best logit, not only near each other.
    near = below <= TOLERANCE_ERRORS * error
    return Rescored(difference, abs(first - second), below, error, near)


def transformers_scorer(target: Path, dtype: str) -> Scorer:
    import torch
    from transformers import AutoModelForCausalLM

    # The client is bound to some cores; more threads would wait for each other there.
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    wide_type = torch.float64 if dtype == "float32" else torch.float32
    kinds = (getattr(torch, dtype), wide_type)
    models = [AutoModelForCausalLM.from_pretrained(target, dtype=k) for k in kinds]

    def score(prefix: Sequence[int]) -> tuple[list[float], list[float]]:
        ids = torch.tensor([list(prefix)])
        with torch.no_grad():
            rows = [m(ids, use_cache=False).logits[0, -1].double() for m in models]
        return rows[0].tolist(), rows[1].tolist()

    return score


def rescore_all(
    differences: Sequence[Difference], target: Path, dtype: str
) -> list[Rescored]:
    """Re-score differences; load the target only if there are any."""
    if not differences:
        return []
    scorer = transformers_scorer(target, dtype)
    return [rescore(difference, scorer) for difference in differences]


MAX_SHOWN = 50
Rescore = Callable[[Sequence[Difference], Path, str], list[Rescored]]


def identity_of(
    arms: Mapping[str, Sequence[RequestResult]],
    target: Path,
    dtype: str,
    rescore: Rescore = rescore_all,
) -> dict[str, Any]:
    """Compare every arm with the first one, on the requests of both."""
    measured = {name: results for name, results in arms.items() if results}
    if len(measured) < 2:
        return {"compared_with": None, "arms": {}, "differences": []}
    first, *others = measured
    differences: list[Difference] = []
    compared: dict[str, int] = {}
    for name in others:
        left, right = _common(measured[first], measured[name])
        compared[name] = sum(a.ok and b.ok for a, b in zip(left, right, strict=True))
        differences += compare((first, name), left, right)
    rescored = rescore(differences, target, dtype)
    verdicts = {}
    for name in others:
        mine = [item for item in rescored if item.difference.arms[1] == name]
        wrong = sum(not item.near_tie for item in mine)
        verdicts[name] = {
            "compared": compared[name],
            "identical": not wrong and compared[name] > 0,
            "near_ties": len(mine) - wrong,
            "wrong": wrong,
        }
    shown = [item.summary() for item in rescored][:MAX_SHOWN]
    return {"compared_with": first, "arms": verdicts, "differences": shown}


def identity_problems(identity: Mapping[str, Any], where: str = "") -> list[str]:
    """Return a sentence for each arm with different outputs."""
    return [
        f"{where}{name}: outputs differ from {identity['compared_with']} "
        f"({verdict['wrong']} not near ties)"
        for name, verdict in identity["arms"].items()
        if not verdict["identical"]
    ]


def _common(
    left: Sequence[RequestResult], right: Sequence[RequestResult]
) -> tuple[list[RequestResult], list[RequestResult]]:
    both = {r.index for r in left} & {r.index for r in right}
    return tuple(  # type: ignore[return-value]
        sorted((r for r in side if r.index in both), key=lambda r: r.index)
        for side in (left, right)
    )
