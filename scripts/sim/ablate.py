"""Ablation of the controller in the simulator, one part at a time.

scripts/sim/ablate.py --json FILE [--seconds 30] [--part NAME]

Each pair of numbers is tokens per second without a part over those with it: the
geometric mean over the cells of the published suite, and the lowest cell. The
conditions are: known true times; cold (unknown times, as at an engine start); changing
times; faster kernels for steps without drafts; other acceptance processes
(`sim.acceptance.TRUTHS`). Conditions two to four have 10% noise.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from math import exp, inf, log
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]
from sim.acceptance import TRUTHS
from sim.arrivals import MAX_INPUT, PATTERNS, synthetic
from sim.engine import progress_at_arrival, simulate
from sim.suite import Options, _process, arm_policy, run_arm, suite_cells
from sim.truth import Mismatch, Truth
from vllm_tide.control import acceptance, adaspec, allowance, forecast, step_times
from vllm_tide.control.time_model import TimeModel

POLICY = adaspec.AdaSpecPolicy


def _knobs(**changes: float | bool) -> Callable[[], None]:
    """Return a function that changes settings."""

    def change() -> None:
        original = POLICY.__init__

        def init(self, settings, times):  # type: ignore[no-untyped-def]
            original(self, replace(settings, **changes), times)

        POLICY.__init__ = init  # type: ignore[method-assign]

    return change


def _numbers(module: object, **values: object) -> Callable[[], None]:
    """Return a function that changes constants."""

    def change() -> None:
        for name, value in values.items():
            setattr(module, name, value)

    return change


def _not_called(owner: type, name: str) -> Callable[[], None]:
    return lambda: setattr(owner, name, lambda *_, **__: None)


def _no_correction() -> None:
    """Draft the planned length and ignore the confidences."""

    def go_on(self, step, confidence):  # type: ignore[no-untyped-def]
        state = self._step
        state.depth = step
        state.confidences[step - 1] = confidence
        return step < min(state.max_depth, state.planned + 1)

    POLICY.go_on = go_on  # type: ignore[method-assign]


def _no_plan() -> None:
    """Decide after each pass by the confidences only."""
    plan = POLICY.plan

    def planned(self, batch, now):  # type: ignore[no-untyped-def]
        result = plan(self, batch, now)
        self._step.planned = 0
        return result

    POLICY.plan = planned  # type: ignore[method-assign]


def _all_drafts_alike() -> None:
    """Forecast the mean draft, with equal confidences for all drafts."""
    original = forecast.Forecaster.__init__

    def init(self, *args, **more):  # type: ignore[no-untyped-def]
        original(self, *args, **more)
        self._normal[:] = 0.0

    forecast.Forecaster.__init__ = init  # type: ignore[method-assign]


PARTS: dict[str, Callable[[], None]] = {
    "nothing": lambda: None,
    "plan before confidences": _no_plan,
    "correction by confidences": _no_correction,
    "choice of what is verified": _knobs(verify=False),
    "simulated drafts": _all_drafts_alike,
    "curve of confidences": _not_called(acceptance.Acceptance, "_fit"),
    "intercepts of requests": _not_called(acceptance.RequestIntercepts, "learn"),
    "how much requests differ": _numbers(acceptance, _REQUEST_WEIGHT=0.0),
    "fading of verdicts": _numbers(acceptance, HALF_LIFE_TOKENS=1e9),
    "exploration": _knobs(probe_share=0.0),
    "exploration that is due": _numbers(allowance, _DUE=inf),
    "uncertainty of times": _numbers(step_times.StepTimes, ratio_sd=lambda *_: 0.0),
    "whole drafts now and then": _knobs(explore=False),
    "learning of times": _not_called(step_times.PassTime, "observe"),
    "curve of times": _numbers(step_times, _SHAPE_SD=1e-2),
    "unknown slope": _numbers(step_times, _FREE_ROWS=np.full(2, 1e3)),
    "clipping": _numbers(step_times, _CLIP=1e9),
    "learning anew": _numbers(step_times, _LEANING=inf),
    "drift of times": _numbers(step_times, _DRIFT=0.0),
}


class Changing(Truth):
    """Load by another process at intervals: the target takes 1.5 times as long."""

    def __init__(self, model: TimeModel, noise: float, seed: int) -> None:
        super().__init__(model, noise, seed)
        self._steps = 0

    def target(self, requests: int, context: int, verified: int, prefill: int) -> float:
        self._steps += 1
        factor = 1.5 if self._steps // 500 % 2 else 1.0
        return factor * super().target(requests, context, verified, prefill)


class OneRow(Truth):
    """Faster kernels for one row per request, as on many machines."""

    def target(self, requests: int, context: int, verified: int, prefill: int) -> float:
        factor = 1.0 if verified or prefill else 0.75
        return factor * super().target(requests, context, verified, prefill)


# Options of the simulator, and the true times.
CONDITIONS: dict[str, tuple[dict[str, Any], type[Truth]]] = {
    "told": ({}, Truth),
    "cold": ({"mismatch": Mismatch(noise=0.1, cold=True)}, Truth),
    "changing": ({"mismatch": Mismatch(noise=0.1)}, Changing),
    "one row": ({"mismatch": Mismatch(noise=0.1, cold=True)}, OneRow),
    **{kind: ({"truth": kind}, Truth) for kind in TRUTHS if kind != "family"},
}


def throughputs(part: str, condition: str, seconds: float) -> list[float]:
    """Return tokens per second of each cell without a part."""
    PARTS[part]()
    traces = [synthetic(pattern, seconds, 5.0, 0) for pattern in PATTERNS]
    cells = suite_cells("published", [trace.clipped(MAX_INPUT) for trace in traces])
    changes, kind = CONDITIONS[condition]
    options = Options(by_progress=True, **changes)
    rates = []
    for cell in cells:
        process = _process(cell.trace, cell.regime, options)
        due = progress_at_arrival(cell.trace, run_arm("none", cell, process, options))
        truth = kind(cell.time, options.mismatch.noise, options.seed)
        policy = arm_policy("adaspec", cell, process, options)
        result = simulate(cell.trace, process, truth, options.server, policy, due)
        rates.append(result.throughput)
    return rates


def _all(
    parts: Sequence[str], seconds: float
) -> Iterator[tuple[str, str, list[float]]]:
    pairs = [(part, condition) for part in parts for condition in CONDITIONS]
    with ProcessPoolExecutor(
        2, mp_context=get_context("spawn"), max_tasks_per_child=1
    ) as pool:
        jobs = [pool.submit(throughputs, *pair, seconds) for pair in pairs]
        for pair, job in zip(pairs, jobs, strict=True):
            yield *pair, job.result()


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line for each part and return the exit status."""
    parser = argparse.ArgumentParser(prog="ablate.py", description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument(
        "--seconds", type=float, default=30.0, help="length of the traces (30)"
    )
    parser.add_argument("--part", action="append", choices=[*PARTS][1:])
    args = parser.parse_args(argv)
    print("without", " " * 22, "  ".join(f"{name:12}" for name in CONDITIONS))
    whole: dict[str, list[float]] = {}
    rows: list[dict[str, Any]] = []
    parts = ["nothing", *(args.part or [*PARTS][1:])]
    for part, condition, rates in _all(parts, args.seconds):
        if part == "nothing":
            whole[condition] = rates
            continue
        if not rows or rows[-1]["without"] != part:
            rows.append({"without": part, "of": {}})
        ratios = [a / b for a, b in zip(rates, whole[condition], strict=True)]
        mean = exp(sum(map(log, ratios)) / len(ratios))
        rows[-1]["of"][condition] = {"mean": mean, "least": min(ratios)}
        if len(rows[-1]["of"]) == len(CONDITIONS):
            columns = [
                f"{each['mean']:.4f} {each['least']:.3f}"
                for each in rows[-1]["of"].values()
            ]
            print(f"{part:30}", "  ".join(columns), flush=True)
    args.json.write_text(json.dumps({"seconds": args.seconds, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
