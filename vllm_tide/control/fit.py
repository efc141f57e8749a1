"""Robust fit of the time model to measured rounds.

Every part of a round is a linear model with coefficients that cannot be negative: the
token cost as a fixed cost plus one ramp for each interval between hinge knots, and the
context term. It is fitted to *relative* residuals, because a policy compares ratios of
times, by Huber's iteratively reweighted least squares, because a busy machine produces
rounds that took far too long and none that took far too little.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from vllm_tide.control.online_time import NAN, RoundSample
from vllm_tide.control.time_model import ForwardModel, TimeModel

# Share of the distinct shapes that is kept out of the fit for the reported error.
_HELD_OUT = 5
# Half a KV block, of the sizes there are.
_ROUNDINGS = (0.0, 8.0, 16.0, 32.0, 64.0, 128.0)
# A first draft pass has a prompt's rows as well; contexts are not read for those.
_LONGEST_QUERY = 16


@dataclass(frozen=True, slots=True)
class PartReport:
    """Errors of the prediction of one part of a round.

    Attributes:
        r2: Share of the variance of the fitted samples that is explained.
        median_abs_error: Median relative error of the fitted samples.
        held_out_median_abs_error: The same over held-out shapes, each shape's repeats
            reduced to their median; nan if there are none.
    """

    r2: float
    median_abs_error: float
    held_out_median_abs_error: float
    num_samples: int


@dataclass(frozen=True, slots=True)
class FitReport(PartReport):
    """Error of the predicted times of whole rounds.

    Attributes:
        parts: Reports of target, draft_first, draft_next and host, as far as measured.
    """

    parts: dict[str, PartReport]

    def to_json(self) -> dict[str, Any]:
        return {name: _without_nan(value) for name, value in asdict(self).items()}


def fit(
    samples: Sequence[RoundSample], sizes: tuple[int, ...] = ()
) -> tuple[TimeModel, FitReport]:
    """Fit a time model to measured rounds.

    Args:
        samples: Rounds of many shapes; repeats of a shape share everything but times.
        sizes: CUDA-graph sizes that tokens are rounded up to; empty: none.

    Returns:
        The model fitted to all samples, and the errors of the model fitted without
        every fifth distinct shape.

    Raises:
        ValueError: No sample of the target, or none with a second shape.
    """
    held = held_out(samples)
    kept = [s for s, out in zip(samples, held, strict=True) if not out]
    unseen = [s for s, out in zip(samples, held, strict=True) if out]
    report = report_on(_fit_all(kept, sizes), kept, unseen)
    return _fit_all(samples, sizes), report


def held_out(samples: Sequence[RoundSample]) -> list[bool]:
    """Which samples belong to held-out shapes: every fifth in order of appearance.

    The largest and the smallest shape are never held out: a model is not asked to
    extrapolate.
    """
    order: dict[tuple[int, ...], int] = {}
    for sample in samples:
        order.setdefault(shape_of(sample), len(order))
    rows = {shape: shape[0] + shape[2] + shape[3] for shape in order}
    ends = {min(rows.values(), default=0), max(rows.values(), default=0)}
    return [
        order[shape] % _HELD_OUT == _HELD_OUT // 2 and rows[shape] not in ends
        for shape in map(shape_of, samples)
    ]


def shape_of(sample: RoundSample) -> tuple[int, ...]:
    """Everything of a sample but its times; context rounded to 16 tokens a request.

    Contexts grow by some tokens while a shape is repeated.
    """
    per_request = round(sample.context / max(sample.requests, 1) / 16)
    return (
        sample.requests,
        per_request,
        sample.verified,
        sample.prefill,
        sample.steps,
        sample.first_rows,
    )


def report_on(
    model: TimeModel, fitted: Sequence[RoundSample], unseen: Sequence[RoundSample]
) -> FitReport:
    """Errors of a model on rounds it was fitted to and on rounds it was not."""
    parts = {}
    for name in ("target", "draft_first", "draft_next", "host"):
        seen = _part_pairs(model, fitted, name)
        if len(seen[0]):
            parts[name] = _part_report(seen, _part_pairs(model, unseen, name))
    whole = _part_report(
        _part_pairs(model, fitted, None), _part_pairs(model, unseen, None)
    )
    return FitReport(**asdict(whole), parts=parts)


def fit_forward(
    tokens: np.ndarray,
    requests: np.ndarray,
    context: np.ndarray,
    seconds: np.ndarray,
    sizes: tuple[int, ...] = (),
    query: np.ndarray | None = None,
) -> ForwardModel:
    """Fit one forward's cost.

    Args:
        tokens: [samples] rows of the forward.
        requests: [samples] requests of the forward.
        context: [samples] cached tokens it read.
        seconds: [samples] measured.
        query: [samples] rows per request; None: one each.
    """
    rows = ForwardModel((1,), (0.0,), 0.0, sizes=sizes).padded(tokens)
    knots = _knots(rows)
    ramps = _ramps(rows, knots)
    queries = np.ones(1)
    best, error, rounding = np.empty(0), np.inf, 0.0
    lengths = [queries]
    if query is not None:
        lengths.append(_knots(np.minimum(query, _LONGEST_QUERY)))
    for tried in itertools.product(lengths, _ROUNDINGS):
        at, more = tried
        reads = np.ones((len(rows), 1)) if query is None else _ramps(query, at)
        cached = (context + more * requests)[:, None]
        design = np.column_stack([ramps, reads * cached])
        found = robust_nonnegative(design, seconds)
        missed = float(np.abs(design @ found / seconds - 1.0).mean())
        # A larger one must earn it: without context to tell, none is right. So must a
        # price for each query length (by Schwarz's criterion): a busy machine makes any
        # of them up of few rounds.
        more_prices = len(at) - len(queries)
        earned = len(rows) ** (-more_prices / (2 * len(rows)))
        if missed < min(earned, 0.995) * error:
            best, error, queries, rounding = found, missed, at, more
    reading = np.cumsum(best[len(knots) :])
    extra = reading - reading[0]
    varies = bool(extra[-1] > 0.0)
    return ForwardModel(
        knots=tuple(int(knot) for knot in knots),
        seconds=tuple(float(value) for value in np.cumsum(best[: len(knots)])),
        alpha=float(reading[0]),
        sizes=sizes,
        queries=tuple(float(length) for length in queries) if varies else (),
        extra=tuple(float(value) for value in extra) if varies else (),
        rounding=rounding if reading[-1] > 0.0 else 0.0,
    )


def _knots(rows: np.ndarray) -> np.ndarray:
    """Powers of two, each interval between them holding a measured row count."""
    low, high = math.floor(rows.min()), math.ceil(rows.max())
    knots = [low]
    power = 1
    while power < high:
        power *= 2
        inside = (rows > knots[-1]) & (rows <= power)
        if power > low and inside.any():
            knots.append(min(power, high))
    return np.array(knots)


def _ramps(rows: np.ndarray, knots: np.ndarray) -> np.ndarray:
    """[samples, knots]: one, then how far into each interval a row count is, 0..1."""
    ramps = [np.ones(len(rows))]
    ramps += [
        np.clip((rows - low) / (high - low), 0.0, 1.0)
        for low, high in zip(knots[:-1], knots[1:], strict=True)
    ]
    return np.column_stack(ramps)


def _fit_all(samples: Sequence[RoundSample], sizes: tuple[int, ...]) -> TimeModel:
    target = _select(samples, "target")
    if len(target) < 2:
        raise ValueError("a time model needs measured rounds of at least two shapes")
    n = np.array([s.requests for s in target])
    rows = n + np.array([s.verified + s.prefill for s in target])
    cached = np.array([s.context for s in target])
    query = 1.0 + np.array([s.verified for s in target]) / n
    seconds = np.array([s.target_s for s in target])
    model = TimeModel(
        fit_forward(rows, n, cached, seconds, sizes, query),
        draft_first=ForwardModel((1,), (0.0,), 0.0),
        draft_next=ForwardModel((1,), (0.0,), 0.0),
    )
    if first := _select(samples, "draft_first"):
        rows = np.array([s.first_rows for s in first])
        n = np.array([s.requests for s in first])
        forward = fit_forward(
            rows,
            n,
            np.array([s.context for s in first]),
            np.array([s.draft_first_s for s in first]),
            sizes,
            rows / n,
        )
        model = replace(model, draft_first=forward, draft_next=forward)
    if further := _select(samples, "draft_next"):
        passes = np.array([s.steps - 1 for s in further])
        n = np.array([s.requests for s in further])
        # The mean pass: pass j reads what the passes before it appended.
        mean = np.array([s.context for s in further]) + n * 0.5 * (passes + 1)
        seconds = np.array([s.draft_next_s for s in further]) / passes
        model = replace(model, draft_next=fit_forward(n, n, mean, seconds, sizes))
    if host := _select(samples, "host"):
        n = np.array([s.requests for s in host], np.float64)
        design = np.column_stack([np.ones(len(n)), n])
        fixed, each = robust_nonnegative(design, np.array([s.host_s for s in host]))
        model = replace(model, host=float(fixed), host_per_request=float(each))
    return model


def _select(samples: Sequence[RoundSample], part: str) -> list[RoundSample]:
    passes = {"draft_first": 1, "draft_next": 2}.get(part, 0)
    return [s for s in samples if s.steps >= passes and getattr(s, f"{part}_s") > 0.0]


def _predict(model: TimeModel, sample: RoundSample, part: str) -> float:
    n, context = sample.requests, sample.context
    if part == "target":
        return sum(model.target_parts(n, context, sample.verified, sample.prefill))
    if part == "draft_first":
        return sum(model.draft_first_parts(n, context, sample.first_rows))
    if part == "draft_next":
        tokens, cached = model.draft_next_parts(n, context, sample.steps - 1)
        return float(tokens + cached)
    return model.overhead(n)


def _part_pairs(
    model: TimeModel, samples: Sequence[RoundSample], part: str | None
) -> tuple[np.ndarray, np.ndarray]:
    """Predicted and measured seconds, [shapes]: the medians of each shape's repeats.

    Args:
        part: Name of a part; None: the sum of what was measured of each round.
    """
    names = ("target", "draft_first", "draft_next", "host") if part is None else (part,)
    groups: dict[tuple[int, ...], list[tuple[float, float]]] = {}
    for sample in samples:
        present = [name for name in names if _select([sample], name)]
        if present:
            predicted = sum(_predict(model, sample, name) for name in present)
            measured = sum(getattr(sample, f"{name}_s") for name in present)
            groups.setdefault(shape_of(sample), []).append((predicted, measured))
    middle = [np.median(np.array(pairs), axis=0) for pairs in groups.values()]
    table = np.array(middle).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def _part_report(
    fitted: tuple[np.ndarray, np.ndarray], unseen: tuple[np.ndarray, np.ndarray]
) -> PartReport:
    predicted, measured = fitted
    variance = float(((measured - measured.mean()) ** 2).sum())
    left = float(((measured - predicted) ** 2).sum())
    return PartReport(
        r2=1.0 - left / variance if variance > 0.0 else NAN,
        median_abs_error=_median_error(*fitted),
        held_out_median_abs_error=_median_error(*unseen),
        num_samples=len(measured),
    )


def _median_error(predicted: np.ndarray, measured: np.ndarray) -> float:
    if not len(measured):
        return NAN
    return float(np.median(np.abs(predicted / measured - 1.0)))


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(entry) for key, entry in value.items()}
    return None if isinstance(value, float) and not np.isfinite(value) else value


_HUBER = 1.345
_ROUNDS = 12


def robust_nonnegative(design: np.ndarray, measured: np.ndarray) -> np.ndarray:
    """Huber regression of relative residuals with coefficients >= 0.

    Args:
        design: [samples, coefficients].
        measured: [samples], positive.

    Returns:
        [coefficients] float64.
    """
    scaled = design / measured[:, None]
    # Columns of similar size: a context token costs 1e-7 s, a forward 1e-2.
    size = np.linalg.norm(scaled, axis=0)
    size[size == 0.0] = 1.0
    scaled = scaled / size
    weight = np.ones(len(measured))
    found = np.zeros(design.shape[1])
    for _ in range(_ROUNDS):
        root = np.sqrt(weight)
        before, found = found, nonnegative(scaled * root[:, None], root)
        residual = np.abs(1.0 - scaled @ found)
        spread = max(1.4826 * float(np.median(residual)), 1e-6)
        weight = np.minimum(1.0, _HUBER * spread / np.maximum(residual, 1e-12))
        if np.abs(found - before).max() <= 1e-9 * max(float(found.max()), 1e-12):
            break
    return np.asarray(found / size)


def nonnegative(design: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Least squares with coefficients >= 0 (Lawson and Hanson's active set).

    Args:
        design: [samples, coefficients].
        target: [samples].

    Returns:
        [coefficients] float64.
    """
    num = design.shape[1]
    gram, moment = design.T @ design, design.T @ target
    # Unsupported columns would make a subsystem singular.
    gram = gram + 1e-12 * max(float(gram.trace()) / num, 1e-300) * np.eye(num)
    tolerance = 1e-10 * max(float(np.abs(moment).max()), 1e-300)
    value, free = np.zeros(num), np.zeros(num, bool)
    for _ in range(10 * num):
        slope = np.where(free, -np.inf, moment - gram @ value)
        if slope.max() <= tolerance:
            break
        free[int(slope.argmax())] = True
        while True:
            trial = np.zeros(num)
            trial[free] = np.linalg.solve(gram[np.ix_(free, free)], moment[free])
            if trial[free].min() > 0.0:
                break
            falling = free & (trial <= 0.0)
            step = (value[falling] / (value[falling] - trial[falling])).min()
            value = value + step * (trial - value)
            free &= value > 1e-14 * max(float(value.max()), 1e-300)
            value[~free] = 0.0
            if not free.any():
                trial = np.zeros(num)
                break
        value = trial
    return value
