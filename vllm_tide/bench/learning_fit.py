"""Trains a draft offline on captured documents: fixed steps, warm-up and cosine.

The trainer's own step, packing and evaluation; only the data is all there from the
beginning. Runs in the suite's process or in a worker of it.
"""

from __future__ import annotations

import math
import random
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vllm_tide.config import TrainConfig
from vllm_tide.draft.eagle3 import Eagle3Draft
from vllm_tide.draft.target import TargetRows
from vllm_tide.train.evaluate import FORMS, Evaluation, evaluate
from vllm_tide.train.packing import pack, take_batch
from vllm_tide.train.sample import Sample, split_windows
from vllm_tide.train.step import TrainStep, has_fast_bfloat16

WARM_UP, FLOOR = 0.05, 0.02
"""Share of the steps with a rising rate; the rate at the end (share of the peak)."""
MAX_IDLE = 64
"""Batches in a row that train nothing before the fit is given up."""


@dataclass(frozen=True)
class Fit:
    """What a fit did.

    Attributes:
        steps: Optimizer steps done.
        seconds: Time of the steps, evaluations not counted.
        tokens: Rows trained on, repeats counted.
        loss: Mean loss of the last tenth of the steps; NaN without any.
    """

    steps: int
    seconds: float
    tokens: int
    loss: float


def train_config(values: Mapping[str, Any]) -> TrainConfig:
    """Return the knobs of an offline fit, in a type this CPU computes fast."""
    dtype = "bfloat16" if has_fast_bfloat16() else "float32"
    return TrainConfig.model_validate({"compute_dtype": dtype, **values})


def rate(step: int, total: int) -> float:
    """Return the factor on the learning rate at a step (0 to total - 1)."""
    warm = max(1, round(WARM_UP * total))
    if step < warm:
        return (step + 1) / (warm + 1)
    progress = (step - warm) / max(1, total - warm)
    return FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * progress))


def fit(
    draft: Eagle3Draft,
    target: TargetRows,
    samples: Sequence[Sample],
    config: TrainConfig,
    steps: int,
    on_step: Callable[[int], object] = lambda _: None,
) -> Fit:
    """Train a draft in place.

    Args:
        draft: Moved in place.
        target: Rows of the target.
        samples: Documents; cut to `max_sample_tokens`.
        config: Knobs; its seed orders the passes.
        steps: Optimizer steps.
        on_step: Given the number of steps done after each.

    Raises:
        ValueError: The documents have nothing to train on.
    """
    size = min(config.max_sample_tokens, config.batch_tokens)
    documents = [part for sample in samples for part in split_windows(sample, size)]
    if not documents:
        raise ValueError("no captured document has anything to train on")
    step = TrainStep(draft, target, config)
    rng = random.Random(config.seed)  # noqa: S311 - shuffling only
    queue: deque[Sample] = deque()
    losses: list[float] = []
    tokens = idle = 0
    seconds = 0.0
    while len(losses) < steps and idle < MAX_IDLE:
        began = time.perf_counter()
        if not queue:
            queue.extend(rng.sample(documents, len(documents)))
        chosen = take_batch(queue, config.batch_tokens, branches=step.trains_branches)
        batch = pack(chosen, config.batch_tokens, branches=step.trains_branches)
        result = step.run(batch, rate(len(losses), steps))
        seconds += time.perf_counter() - began
        idle = 0 if result is not None else idle + 1
        if result is not None:
            losses.append(result.loss)
            tokens += result.num_tokens
            on_step(len(losses))
    last = losses[-max(1, len(losses) // 10) :]
    mean = sum(last) / len(last) if last else math.nan
    return Fit(len(losses), seconds, tokens, mean)


def acceptance(
    draft: Eagle3Draft,
    target: TargetRows,
    samples: Sequence[Sample],
    depth: int,
    config: TrainConfig,
) -> Evaluation:
    """Evaluate a draft on held-out documents, in the type it is trained in."""
    dtype = getattr(torch, config.compute_dtype)
    found: Evaluation = evaluate(
        draft, target, samples, depth, capacity=config.batch_tokens, dtype=dtype
    )
    return found


def acceptance_figures(evaluation: Evaluation) -> dict[str, Any]:
    """Return an evaluation for the report: every form with its standard error."""
    figures: dict[str, Any] = {
        "rows": evaluation.num_rows,
        "requests": len(evaluation.requests),
    }
    for form in FORMS:
        error = evaluation.standard_error(form)
        figures[form] = _finite(evaluation.acceptance(form))
        figures[f"{form}_error"] = _finite(error)
        figures[f"{form}_conditional"] = [
            _finite(value) for value in evaluation.conditional(form)
        ]
    return figures


def _finite(value: float) -> float | None:
    return round(value, 4) if math.isfinite(value) else None
