"""Ratios between arms over traces with their spread, and SLO attainment.

A ratio is taken repeat by repeat, visits of the same cell and repeat being neighbours
in time, and given as `{"mean", "min", "max", "n"}`; the mean is geometric.

Attainment is the share of requests whose TPOT is within a limit: as in the AdaSpec
paper a scale x the P90 TPOT of plain decoding on the same trace, so plain decoding
itself attains 90% at scale 1. A failed request has not attained anything.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bench.harness.arms import STATIC
from bench.harness.common import percentile, rounded

SCALES = (0.8, 0.9, 1.0, 1.1, 1.2)


def attained(tpots_ms: Sequence[float], failed: int, limit_ms: float) -> float | None:
    """Share of requests within the limit; None if there are none."""
    total = len(tpots_ms) + failed
    return sum(t <= limit_ms for t in tpots_ms) / total if total else None


def attainment(
    by_arm: Mapping[str, tuple[Sequence[float], int]],
    scales: Sequence[float] = SCALES,
    baseline: str = "none",
) -> dict[str, object]:
    """Limits and attainment of every arm on one trace.

    `served` is the paper's curve of a policy that knows its limit: at each scale
    the attainment of the arm (`adaspec@0.9`) that was served with that scale.

    Args:
        by_arm: TPOTs in ms and number of failed requests, all repeats together.
        scales: Factors of the baseline's P90.
        baseline: Arm whose P90 TPOT is the limit at scale 1.
    """
    if baseline not in by_arm or not by_arm[baseline][0]:
        return {"p90_tpot_ms": None, "scales": list(scales), "arms": {}, "served": {}}
    p90_ms = percentile(by_arm[baseline][0], 90)
    served: dict[str, list[float | None]] = {}
    for arm, (tpots, failed) in by_arm.items():
        policy, _, scale_text = arm.partition("@")
        for place, scale in enumerate(scales):
            if scale_text and abs(float(scale_text) - scale) < 1e-9:
                curve = served.setdefault(policy, [None] * len(scales))
                curve[place] = rounded(attained(tpots, failed, scale * p90_ms))
    return {
        "served": served,
        "p90_tpot_ms": round(p90_ms, 4),
        "scales": list(scales),
        "arms": {
            arm: [rounded(attained(tpots, failed, scale * p90_ms)) for scale in scales]
            for arm, (tpots, failed) in by_arm.items()
        },
    }


Cells = Sequence[Mapping[str, Any]]
LATENCY = "mean_e2e_s"
_SPECULATION = (
    "drafted_per_request_round",
    "verified_per_request_round",
    "accepted_per_request_round",
    "acceptance_rate",
    "acceptance_length",
)


def geometric_mean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def spread(values: Sequence[float]) -> dict[str, float | int] | None:
    """Mean (geometric), least, largest and number; None if empty."""
    if not values:
        return None
    return {
        "mean": round(geometric_mean(values), 4),
        "min": round(min(values), 4),
        "max": round(max(values), 4),
        "n": len(values),
    }


def _by(cells: Cells, *keys: str) -> dict[tuple[Any, ...], list[Mapping[str, Any]]]:
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = defaultdict(list)
    for cell in cells:
        groups[tuple(cell.get(key) for key in keys)].append(cell)
    return dict(groups)


def _values(cells: Cells, key: str) -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = defaultdict(dict)
    for cell in cells:
        if cell.get(key):
            found[cell["arm"]][cell.get("repeat", 0)] = float(cell[key])
    return dict(found)


def _ratios(new: Mapping[int, float], old: Mapping[int, float]) -> list[float]:
    return [new[r] / old[r] for r in sorted(new.keys() & old.keys())]


def _means(values: Mapping[str, Mapping[int, float]]) -> dict[str, float]:
    return {arm: geometric_mean(by.values()) for arm, by in values.items()}


def trace_summary(
    cells: Cells, scales: Sequence[float] | None = None
) -> dict[str, Any]:
    """Summary of the replays among a run's cells, by target and trace."""
    cells = [cell for cell in cells if cell.get("trace") is not None]
    scales = scales or SCALES
    return {
        f"{target}: {trace}": _one_trace(group, scales)
        for (target, trace), group in _by(cells, "target", "trace").items()
    }


def _one_trace(cells: Cells, scales: Sequence[float]) -> dict[str, Any]:
    values = _values(cells, LATENCY)
    means = _means(values)
    static = {arm: mean for arm, mean in means.items() if STATIC.match(arm)}
    best = min(static, key=lambda arm: static[arm]) if static else None
    tpots: dict[str, tuple[list[float], int]] = {}
    for cell in cells:
        seen, failed = tpots.get(cell["arm"], ([], 0))
        tpots[cell["arm"]] = (
            [*seen, *cell.get("tpots_ms", ())],
            failed + cell.get("failed", 0),
        )
    return {
        "best_static": best,
        "arms": {
            arm: {
                LATENCY: round(means[arm], 4),
                "speedup_over_none": spread(_ratios(values.get("none", {}), by)),
                "speedup_over_best_static": spread(
                    _ratios(values[best], by) if best else []
                ),
                **_mean_speculation([c for c in cells if c["arm"] == arm]),
            }
            for arm, by in values.items()
        },
        "attainment": attainment(tpots, scales),
    }


def _mean_speculation(cells: Cells) -> dict[str, float | None]:
    result: dict[str, float | None] = {}
    for key in _SPECULATION:
        known = [cell[key] for cell in cells if cell.get(key) is not None]
        result[key] = round(sum(known) / len(known), 4) if known else None
    return result


def trace_verdict(summary: Mapping[str, Any]) -> str | None:
    """One sentence on control's latency over the traces; None without a static arm."""
    logs = []
    for found in summary.values():
        arms, best = found["arms"], found["best_static"]
        if "adaspec" in arms and best:
            logs.append(math.log(arms["adaspec"][LATENCY] / arms[best][LATENCY]))
    if not logs:
        return None
    lower = sum(log <= 0.0 for log in logs)
    return (
        f"adaspec: mean latency {math.exp(sum(logs) / len(logs)):.3f} of the best "
        f"static length's; lower on {lower} of {len(logs)} traces"
    )
