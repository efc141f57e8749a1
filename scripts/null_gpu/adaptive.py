"""Adaptive verification on the null GPU: step times, confidences, cost of a cut.

Computed values have no meaning there, and unwritten memory read as a confidence may be
NaN, so the inputs of the decisions are replaced: the confidences in upstream's manager,
and, in our controller, high confidences with all drafts accepted. The code under test
runs unchanged: the controller's step costs, their path through the scheduler, the
tables, the budget and the cut.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from vllm_tide.control.step_times import StepSample
from vllm_tide.control.time_model import ForwardModel, TimeModel

# Below 1, because the controller computes log-odds.
SURE, UNSURE = 0.99, 0.05
# Any two events of the null GPU are a millisecond apart. The target's time grows with
# the rows (1 ms at 32 rows), so a draft of low confidence does not pay for its row.
PASS = ForwardModel((1, 64), (1e-3, 1e-3), 0.0)
TIMES = TimeModel(ForwardModel((1, 64), (3.1e-5, 2e-3), 0.0), PASS, PASS, host=1e-3)

COSTS = ([(1, 1.0)], [(rows, rows / 32) for rows in range(1, 65)])
"""The same for upstream's manager: milliseconds by requests, and by rows."""


class Confidence:
    """Replacement of the device's confidences in upstream's manager.

    Attributes:
        sure: Share of the requests with a high confidence.
    """

    def __init__(self) -> None:
        from vllm.v1.worker.gpu.spec_decode.adaptive_verification import (
            AdaptiveVerificationManager as Manager,
        )

        self.sure = 1.0
        self.budget: list[tuple[int, int]] = []
        inner = Manager.get_num_tokens

        def get_num_tokens(
            manager: Manager, tokens: dict[str, int], drafts: dict[str, list[int]]
        ) -> int:
            for confidences in manager._stale_confidences:
                confidences.np.fill(UNSURE)
                confidences.np[: round(self.sure * len(confidences.np))] = SURE
            total = inner(manager, tokens, drafts)
            drafted = sum(map(len, drafts.values()))
            self.budget.append((drafted, total - sum(tokens.values()) + drafted))
            return total

        Manager.get_num_tokens = get_num_tokens

    def verified(self) -> list[float]:
        """Return drafted and verified tokens per step since the last call."""
        steps, self.budget = self.budget, []
        return np.mean(steps, axis=0).round(2).tolist()


class Prices:
    """Counter of steps that were sent step costs, and of steps that used them.

    A step counts as using them if all resulting costs are positive and finite.
    """

    def __init__(self) -> None:
        from vllm_tide.engine.verification import StepCostVerification

        self.steps = self.sent = self.used = 0
        begin, costs = StepCostVerification.begin_step, StepCostVerification._costs

        def begin_step(manager: Any, scheduler_output: Any, version: int) -> None:
            begin(manager, scheduler_output, version)
            self.steps += 1
            self.sent += manager._step_costs is not None

        def step_costs(manager: Any, *shape: int) -> Any:
            result = costs(manager, *shape)
            drafting, verifying, _ = result
            finite = np.isfinite(verifying).all() and np.isfinite(drafting)
            positive = drafting > 0 and verifying.min() > 0
            upstreams = verifying.base is manager._measured[1]
            self.used += bool(finite and positive and not upstreams)
            return result

        StepCostVerification.begin_step = begin_step
        StepCostVerification._costs = step_costs

    def read(self) -> dict[str, int]:
        """Return and reset the counts: steps, with costs sent, with costs used."""
        counts = {"steps": self.steps, "told": self.sent, "used": self.used}
        self.steps = self.sent = self.used = 0
        return counts


def patch_measured_times() -> None:
    """Replace vLLM's measured times in the controller: null kernels take no time."""
    from vllm_tide.engine import verification

    verification.times_of_tables = lambda *_: TIMES


def patch_acceptance_model() -> None:
    """Disable threshold and calibration of confidences in the controller."""
    from vllm_tide.control import policies
    from vllm_tide.control.acceptance import Acceptance, RequestIntercepts

    def logits(model: Acceptance, confidence: np.ndarray, *_: Any) -> np.ndarray:
        return np.asarray(np.log(confidence) - np.log1p(-confidence))

    policies.THRESHOLD = 1e-9
    RequestIntercepts.learn = lambda *_: None  # type: ignore[method-assign]
    Acceptance.logits = logits  # type: ignore[method-assign]


def patch_observations() -> None:
    """Replace the controller's observations: drafts are accepted, with `TIMES`.

    Its clock advances by `TIMES` too, because drafting may be slow on a busy machine.
    """
    from vllm_tide.capture.step import Step
    from vllm_tide.engine import control_v2

    learn, clock = control_v2.ControlV2.learn, SimpleNamespace(now=0.0)

    def observe(control: control_v2.ControlV2, step: Step) -> None:
        emitted, drafts = step.emitted, step.drafts - step.padding
        step.confidence[:] = SURE
        if step.reading is not None:
            step.reading = partial(_simulated, step.reading)
        clock.now += _seconds(step)
        step.emitted = emitted + drafts
        learn(control, step)
        step.emitted = emitted

    control_v2.ControlV2.learn = observe
    control_v2.time = SimpleNamespace(monotonic=lambda: clock.now)


def _seconds(step: Any) -> float:
    requests, verified = len(step.req_ids), int(step.drafts.sum())
    return TIMES.step_seconds(
        requests=requests,
        context=0,
        verified=verified,
        prefill=step.rows - requests - verified,
        steps=max(step.steps, 1),
        first_rows=step.rows,
    )


def _simulated(read: Any) -> StepSample | None:
    sample = read()
    if sample is None:
        return None
    rows = sample.requests + sample.verified + sample.prefill
    return replace(sample, target_s=TIMES.target(rows, sample.context))


def cuts(
    manager: Any, confidence: Confidence, prices: Prices | None, bench: Any
) -> dict[str, Any]:
    """Return the counts of a step that verifies all, half and none of the drafts.

    Args:
        manager: Upstream's or ours, with a decoding batch.
        confidence: Sets the confidences.
        prices: Counter for our manager; None for upstream's.
        bench: Runs the engine's steps.

    Returns:
        Counts by case, with `drafted` and `verified` tokens.
    """
    if prices is None:
        manager.set_cost_curves(*COSTS)
    else:
        manager._steps_since_swap = 10 * 100  # cuts are off just after a swap
    result = {}
    for name, sure in (("all", 1.0), ("half", 0.5), ("none", 0.0)):
        confidence.sure = sure
        bench.step(20)  # until the controller drafts at full depth again
        confidence.verified()
        if prices is not None:
            prices.read()
        result[name] = bench.window(10)
        drafted, verified = confidence.verified()
        result[name] |= {"drafted": drafted, "verified": verified}
        if prices is not None:
            result[name]["prices"] = prices.read()
    confidence.sure = 1.0
    bench.step(6)
    return result
