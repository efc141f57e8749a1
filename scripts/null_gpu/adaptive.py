"""Adaptive verification on the null GPU: step times, what is sure, what a cut costs.

Values mean nothing there, and unwritten memory read as a confidence may be NaN, so what
is decided from is told: upstream's manager how sure each request's drafts are, our
controller that they are sure and were all accepted. What follows is the code's own: the
controller's prices, their way through the scheduler, the tables, the budget, the cut.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from vllm_tide.control.step_times import StepSample
from vllm_tide.control.time_model import ForwardModel, TimeModel

# Not 1: the controller takes its log-odds.
SURE, UNSURE = 0.99, 0.05
# Between any two events of the null GPU lies a millisecond. Each row of the target has
# a price of its own, so that an unsure draft is not worth its row: at 32 rows 1 ms.
PASS = ForwardModel((1, 64), (1e-3, 1e-3), 0.0)
TIMES = TimeModel(ForwardModel((1, 64), (3.1e-5, 2e-3), 0.0), PASS, PASS, host=1e-3)

COSTS = ([(1, 1.0)], [(rows, rows / 32) for rows in range(1, 65)])
"""The same for upstream's own manager: milliseconds by requests, and by rows."""


class Confidence:
    """What upstream's manager reads in the place of the device's confidences.

    Attributes:
        sure: Share of the requests whose drafts are sure.
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
        """Drafted and verified tokens per step since this was asked last."""
        steps, self.budget = self.budget, []
        return np.mean(steps, axis=0).round(2).tolist()


class Prices:
    """Counts the steps of which the workers were told prices, and those that used them.

    A price counts where every cost it makes is a positive number.
    """

    def __init__(self) -> None:
        from vllm_tide.engine.verification import StepCostVerification

        self.steps = self.told = self.used = 0
        order, costs = StepCostVerification.begin_step, StepCostVerification._costs

        def ordered(manager: Any, scheduler_output: Any, version: int) -> None:
            order(manager, scheduler_output, version)
            self.steps += 1
            self.told += manager._step_costs is not None

        def costed(manager: Any, *shape: int) -> Any:
            found = costs(manager, *shape)
            drafting, verifying, _ = found
            finite = np.isfinite(verifying).all() and np.isfinite(drafting)
            dear = drafting > 0 and verifying.min() > 0
            theirs = verifying.base is manager._measured[1]
            self.used += bool(finite and dear and not theirs)
            return found

        StepCostVerification.begin_step, StepCostVerification._costs = ordered, costed

    def read(self) -> dict[str, int]:
        """Steps, those told prices, those that verified at them; since the last."""
        found = {"steps": self.steps, "told": self.told, "used": self.used}
        self.steps = self.told = self.used = 0
        return found


def say_what_was_measured() -> None:
    """To the controller only: vLLM's own measurement, where no kernel takes time."""
    from vllm_tide.engine import verification

    verification.times_of_tables = lambda *_: TIMES


def say_how_confident() -> None:
    """To the controller only: confidences, whatever they are, are enough and right."""
    from vllm_tide.control import policies
    from vllm_tide.control.acceptance import Acceptance, RequestIntercepts

    def logits(belief: Acceptance, confidence: np.ndarray, *_: Any) -> np.ndarray:
        return np.asarray(np.log(confidence) - np.log1p(-confidence))

    policies.THRESHOLD = 1e-9
    RequestIntercepts.learn = lambda *_: None  # type: ignore[method-assign]
    Acceptance.logits = logits  # type: ignore[method-assign]


def say_what_is_learnt() -> None:
    """To the controller only: drafts were sure and accepted, kernels took time.

    Time passes for it as `TIMES` says: on a busy machine drafting may look dear.
    """
    from vllm_tide.capture.step import Step
    from vllm_tide.engine import control_v2

    learn, clock = control_v2.ControlV2.learn, SimpleNamespace(now=0.0)

    def learnt(control: control_v2.ControlV2, step: Step) -> None:
        emitted, drafts = step.emitted, step.drafts - step.padding
        step.confidence[:] = SURE
        if step.timing is not None:
            step.timing.read = partial(_as_told, step.timing.read)
        clock.now += _seconds(step)
        step.emitted = emitted + drafts
        learn(control, step)
        step.emitted = emitted

    control_v2.ControlV2.learn = learnt
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


def _as_told(read: Any) -> StepSample | None:
    sample = read()
    if sample is None:
        return None
    rows = sample.requests + sample.verified + sample.prefill
    return replace(sample, target_s=TIMES.target(rows, sample.context))


def cuts(
    manager: Any, confidence: Confidence, prices: Prices | None, bench: Any
) -> dict[str, Any]:
    """Counts of a step that verifies all, half and none of what was drafted.

    Args:
        manager: Upstream's or ours, over a decoding batch.
        confidence: Says which requests are sure.
        prices: Of ours; None: upstream's own.
        bench: Steps the engine.

    Returns:
        By what is verified: the counts, with `drafted` and `verified` tokens.
    """
    if prices is None:
        manager.set_cost_curves(*COSTS)
    else:
        manager._steps_since_swap = 10 * 100  # no longer young: it cuts
    found = {}
    for name, sure in (("all", 1.0), ("half", 0.5), ("none", 0.0)):
        confidence.sure = sure
        bench.step(20)  # until the controller drafts as deep again
        confidence.verified()
        if prices is not None:
            prices.read()
        found[name] = bench.window(10)
        drafted, verified = confidence.verified()
        found[name] |= {"drafted": drafted, "verified": verified}
        if prices is not None:
            found[name]["prices"] = prices.read()
    confidence.sure = 1.0
    bench.step(6)
    return found
