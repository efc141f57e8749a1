"""Cells (model, trace, acceptance regime), and runs of every arm on every cell."""

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
    """Options of all cells.

    Attributes:
        seed: Seed of all random numbers.
        top: num_speculative_tokens of the adaptive arms.
        server: Limits of the simulated engine.
        mismatch: Errors of the policies' initial time model.
        by_progress: A request arrives when the arm has written as many tokens as plain
            decoding at its arrival time, so all arms have the same load; otherwise at
            its exact time.
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
    """Return the cells of a suite.

    Args:
        suite: One of `SUITES`: `published` has every published model on every trace,
            `quick` the first of both.
        traces: Traces to replay.
        models: Time models by name in place of the published ones.
        regimes: Keys of `REGIMES`.

    Raises:
        SimError: Unknown suite or regime.
    """
    if suite not in SUITES:
        raise SimError(f"unknown suite {suite!r}; choose from {', '.join(SUITES)}")
    for regime in regimes:
        if regime not in REGIMES:
            raise SimError(
                f"unknown regime {regime!r}; choose from {', '.join(REGIMES)}"
            )
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
    """Run every arm on every cell; yield rows in the order of the cells.

    Args:
        cells: The cells to run.
        arms: Names from `ARMS`; the clairvoyant policy is always run.
        options: Options of all cells.
        processes: Number of processes.
    """
    if options.truth not in TRUTHS:
        raise SimError(
            f"unknown truth {options.truth!r}; choose from {', '.join(TRUTHS)}"
        )
    for arm in arms:
        if arm not in ARMS:
            raise SimError(f"unknown arm {arm!r}; choose from {', '.join(ARMS)}")
    if processes <= 1:
        for cell in cells:
            yield run_cell(cell, arms, options)
        return
    # Use spawn: a fork would copy locks of the numerical libraries' threads.
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        jobs = [pool.submit(run_cell, cell, arms, options) for cell in cells]
        for job in jobs:
            yield job.result()


def run_cell(cell: Cell, arms: Sequence[str], options: Options) -> dict[str, Any]:
    """Run a cell; return `model`, `trace`, `regime`, `throughput`, `regret`, ...

    `length` is the acceptance length of drafts of `Options.top` tokens.

    Throughput is output tokens per busy second. With exact arrival times it is limited
    by the arrivals for every arm that keeps up with them, unlike with
    `Options.by_progress`. `speed` is output tokens per second in the system, per
    request: the reciprocal of the mean latency per token, for runs with exact times.
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
    """Run one arm on one cell; `due` as in `simulate`."""
    truth = Truth(cell.time, options.mismatch.noise, options.seed)
    policy = arm_policy(arm, cell, process, options)
    return simulate(cell.trace, process, truth, options.server, policy, due)


def arm_policy(
    arm: str, cell: Cell, process: Process, options: Options
) -> Policy | None:
    """Create the policy of an arm; None for `none`."""
    if arm == "none":
        return None
    if arm == CLAIRVOYANT:
        return ClairvoyantPolicy(cell.time)
    if arm == "vllm_dynamic":
        context = int(cell.trace.prompt.mean() + cell.trace.output.mean() / 2)
        most = options.server.max_num_seqs
        survival = process.mean_survival()
        return DynamicPolicy(tune(cell.time, survival, most, context))
    # These two policies need no time model, so none is refined.
    if arm.startswith("static"):
        return StaticPolicy(int(arm.removeprefix("static")))
    if arm == "threshold":
        return ThresholdPolicy(options.top)
    initial = options.mismatch.initial_model(cell.time)
    if arm == "one_depth":
        from sim.one_depth import OneDepth  # imports torch

        return OneDepth(initial, options.top, options.server)
    settings = ControlSettings(
        k_max=options.top, max_requests=options.server.max_num_seqs
    )
    times = StepTimes(initial, guessed=options.mismatch.cold)
    if arm == "tide_gate":
        return TideGatePolicy(options.top, times)
    return AdaSpecPolicy(settings, times)


def speed(result: Result) -> float:
    """Return output tokens per second in the system, per request."""
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
    """Return the value in JSON types; numbers that are not finite become None."""
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [_plain(entry) for entry in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
