"""Cells (model, trace, acceptance regime) and arms: every arm on every cell."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing import get_context
from typing import Any

import numpy as np

from sim.acceptance import REGIMES, TRUTHS, Process, make_process
from sim.arrivals import SimError, Trace
from sim.clairvoyant import ClairvoyantPolicy
from sim.dynamic import DynamicPolicy, tune
from sim.engine import progress_at_arrival, simulate
from sim.published import MODELS, published
from sim.state import Result, Server
from sim.tide_gate import TideGatePolicy
from sim.truth import Mismatch, Truth
from vllm_tide.control.adaspec import ControlSettings
from vllm_tide.control.policies import (
    AdaSpecPolicy,
    Policy,
    StaticPolicy,
    ThresholdPolicy,
)
from vllm_tide.control.step_times import StepTimes
from vllm_tide.control.time_model import TimeModel

STATIC = (1, 3, 5, 7)
ARMS = (
    "none",
    *(f"static{length}" for length in STATIC),
    "threshold",
    "tide_gate",
    "vllm_dynamic",
    "one_depth",
    "adaspec",
)
CLAIRVOYANT = "clairvoyant"
SUITES = ("published", "quick")


@dataclass(frozen=True, slots=True)
class Options:
    """What is the same in every cell.

    Attributes:
        seed: Seed of everything that is drawn.
        top: num_speculative_tokens of the arms that adapt.
        server: Limits of the simulated engine.
        mismatch: What policies are told wrongly of the time model.
        by_progress: Requests arrive when as many tokens are written as plain decoding
            had written at their time of arrival, so all arms meet the same load;
            otherwise at their exact times.
        truth: A key of `sim.acceptance.TRUTHS`.
    """

    seed: int = 0
    top: int = 7
    server: Server = Server()
    mismatch: Mismatch = Mismatch()
    by_progress: bool = False
    truth: str = "family"


@dataclass(frozen=True, slots=True)
class Cell:
    """One row of the results.

    Attributes:
        model: Name of the time model.
        time: The true time model.
        trace: Requests.
        regime: A key of `sim.acceptance.REGIMES`.
    """

    model: str
    time: TimeModel
    trace: Trace
    regime: str


def suite_cells(
    suite: str,
    traces: Sequence[Trace],
    models: dict[str, TimeModel] | None = None,
    regimes: Sequence[str] = tuple(REGIMES),
) -> list[Cell]:
    """The cells of a suite.

    Args:
        suite: One of `SUITES`: `published` has every published model on every trace,
            `quick` the first of both.
        traces: Traces to replay.
        models: Time models by name in place of the published ones.
        regimes: Keys of `REGIMES`.

    Raises:
        SimError: There is no such suite or regime.
    """
    if suite not in SUITES:
        raise SimError(f"no suite {suite!r}; there are {', '.join(SUITES)}")
    for regime in regimes:
        if regime not in REGIMES:
            raise SimError(f"no regime {regime!r}; there are {', '.join(REGIMES)}")
    if models is None:
        models = {name: published(name) for name in MODELS}
    chosen = list(models.items())
    if suite == "quick":
        chosen, traces = chosen[:1], traces[:1]
    return [
        Cell(name, time, trace, regime)
        for trace in traces
        for regime in regimes
        for name, time in chosen
    ]


def run_cells(
    cells: Sequence[Cell],
    arms: Sequence[str],
    options: Options,
    processes: int = 1,
) -> Iterator[dict[str, Any]]:
    """Run every arm on every cell; yields rows in the cells' order.

    Args:
        cells: What to run.
        arms: Names among `ARMS`; the clairvoyant policy is always run.
        options: What is the same in every cell.
        processes: Processes to use.
    """
    if options.truth not in TRUTHS:
        raise SimError(f"no truth {options.truth!r}; there are {', '.join(TRUTHS)}")
    for arm in arms:
        if arm not in ARMS:
            raise SimError(f"no arm {arm!r}; there are {', '.join(ARMS)}")
    if processes <= 1:
        for cell in cells:
            yield run_cell(cell, arms, options)
        return
    # spawn: a fork would copy the threads' locks of the numerical libraries.
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        jobs = [pool.submit(run_cell, cell, arms, options) for cell in cells]
        for job in jobs:
            yield job.result()


def run_cell(cell: Cell, arms: Sequence[str], options: Options) -> dict[str, Any]:
    """One row: `model`, `trace`, `regime`, `throughput`, `clairvoyant`, `regret`, ...

    `length` is the acceptance length of drafts of `Options.top` tokens.

    Throughput is output tokens per busy second. Requests that arrive at their exact
    times cap it for every arm that keeps up with them; `Options.by_progress` does
    not. `speed` is output tokens per second that a request is in the system, per
    request, the reciprocal of the mean latency per token: what exact times are for.
    """
    process = _process(cell.trace, cell.regime, options)
    due = None
    if options.by_progress:
        plain = run_arm("none", cell, process, options)
        due = progress_at_arrival(cell.trace, plain)
    results: dict[str, Result] = {}
    for arm in (CLAIRVOYANT, *arms):
        results[arm] = run_arm(arm, cell, process, options, due)
    best = results[CLAIRVOYANT].throughput
    row: dict[str, Any] = {
        "model": cell.model,
        "trace": cell.trace.name,
        "regime": cell.regime,
        "throughput": {arm: results[arm].throughput for arm in arms},
        "clairvoyant": best,
        "length": 1.0 + float(process.mean_survival().sum()),
        "regret": None,
        "speed": {arm: speed(result) for arm, result in results.items()},
        "pace": "progress" if options.by_progress else "time",
        "requests": len(cell.trace),
        "arms": {
            arm: _figures(result, options.server) for arm, result in results.items()
        },
    }
    if "adaspec" in results:
        row["regret"] = 1.0 - results["adaspec"].throughput / best
        row["control"] = _plain(results["adaspec"].stats)
    return row


def run_arm(
    arm: str,
    cell: Cell,
    process: Process,
    options: Options,
    due: np.ndarray | None = None,
) -> Result:
    """One arm on one cell; *due* as in `simulate`."""
    truth = Truth(cell.time, options.mismatch.noise, options.seed)
    policy = arm_policy(arm, cell, process, options)
    return simulate(cell.trace, process, truth, options.server, policy, due)


def arm_policy(
    arm: str, cell: Cell, process: Process, options: Options
) -> Policy | None:
    """The policy of an arm, fresh; None for `none`."""
    if arm == "none":
        return None
    if arm == CLAIRVOYANT:
        return ClairvoyantPolicy(cell.time)
    if arm == "vllm_dynamic":
        context = int(cell.trace.prompt.mean() + cell.trace.output.mean() / 2)
        most = options.server.max_num_seqs
        survival = process.mean_survival()
        return DynamicPolicy(tune(cell.time, survival, most, context))
    # These two decide without a time model: refining one would only cost time.
    if arm.startswith("static"):
        return StaticPolicy(int(arm.removeprefix("static")))
    if arm == "threshold":
        return ThresholdPolicy(options.top)
    believed = options.mismatch.believed(cell.time)
    if arm == "one_depth":
        from sim.one_depth import OneDepth  # which loads torch

        return OneDepth(believed, options.top, options.server)
    settings = ControlSettings(
        k_max=options.top, max_requests=options.server.max_num_seqs
    )
    times = StepTimes(believed, guessed=options.mismatch.cold)
    if arm == "tide_gate":
        return TideGatePolicy(options.top, times)
    return AdaSpecPolicy(settings, times)


def speed(result: Result) -> float:
    """Output tokens per second in the system, per request."""
    return result.output_tokens / max(float(np.nansum(result.e2e)), 1e-12)


@lru_cache(maxsize=1)
def _process(trace: Trace, regime: str, options: Options) -> Process:
    kind = TRUTHS[options.truth]
    return make_process(trace, REGIMES[regime], options.top, options.seed, kind)


def _figures(result: Result, server: Server) -> dict[str, Any]:
    tpot = result.tpot[np.isfinite(result.tpot)]
    figures = {
        "busy_s": result.busy_s,
        "steps": result.steps,
        "mean_batch": result.mean_batch,
        "output_tokens": result.output_tokens,
        "drafted": result.drafted,
        "verified": result.verified,
        "accepted": result.accepted,
        "mean_e2e_s": float(np.nanmean(result.e2e)) if len(result.e2e) else None,
        "tpot_ms_p90": float(np.percentile(tpot, 90)) * 1e3 if len(tpot) else None,
    }
    if server.slo_seconds is not None and len(tpot):
        figures["slo_attainment"] = float((tpot <= server.slo_seconds).mean())
    return figures


def _plain(value: Any) -> Any:
    """The same in types that JSON has; what is not a finite number becomes null."""
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [_plain(entry) for entry in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
