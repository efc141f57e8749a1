"""The description of a cluster: accelerators, draft and workload."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_tide.config import PRINTABLE, ConfigError, TrainConfig, Whole, explained
from vllm_tide.plan.throughput import Accelerators, Case, Learning, SpeedUp

_HOUR = 3600.0

Rate = Annotated[float, Field(ge=0, le=1e9)]  # tokens per second of one accelerator
Length = Annotated[float, Field(ge=1, le=32)]  # tokens per verify step
Cost = Annotated[float, Field(ge=1, le=100)]  # time of a verify step over a plain one
Seconds = Annotated[float, Field(ge=0, le=1e6)]


class _Strict(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False
    )


class ClassFile(_Strict):
    """One class of accelerators; rates and price are per accelerator."""

    name: Annotated[str, Field(pattern=PRINTABLE)]
    count: Annotated[Whole, Field(ge=0, le=100_000)]
    serve_tokens_per_s: Rate
    train_tokens_per_s: Rate = 0.0
    usd_per_hour: Annotated[float, Field(ge=0, le=1e4)] = 0.0
    gpus_per_instance: Annotated[Whole, Field(ge=1, le=1024)] = 1
    step_cost: Cost | None = None


class DraftFile(_Strict):
    """Acceptance length before and after training, its rate, cost of a verify step."""

    length_before: Length
    length_after: Length
    tokens_to_63_percent: Annotated[float, Field(ge=1e2, le=1e12)]
    step_cost: Cost
    passes: Annotated[float, Field(ge=1, le=1e3)] = float(
        TrainConfig.model_fields["max_passes"].default
    )


class WorkloadFile(_Strict):
    """Rate of shifts, share of captured requests, and demand in tokens/s."""

    shift_every_hours: Annotated[float, Field(ge=1e-3, le=1e5)]
    prefill_share: Annotated[float, Field(ge=0, le=0.99)] = 0.0
    captured_share: Annotated[float, Field(ge=0, le=1)] = 1.0
    demand_tokens_per_s: Annotated[float, Field(gt=0, le=1e12)] | None = None


class ClusterFile(_Strict):
    """The file of `vllm-tide plan --cluster`."""

    classes: Annotated[list[ClassFile], Field(min_length=1, max_length=4)]
    draft: DraftFile
    workload: WorkloadFile
    deploy_seconds: Seconds = 60.0
    switch_seconds: Seconds = 300.0

    def case(self) -> Case:
        """Return the input of the formulas."""
        draft, workload = self.draft, self.workload
        return Case(
            classes=tuple(
                Accelerators(
                    name=group.name,
                    count=group.count,
                    serves=group.serve_tokens_per_s,
                    trains=group.train_tokens_per_s,
                    usd_per_hour=group.usd_per_hour,
                    step=group.gpus_per_instance,
                    speed=SpeedUp.of_step_cost(
                        group.step_cost or draft.step_cost, workload.prefill_share
                    ),
                )
                for group in self.classes
            ),
            learning=Learning(
                before=draft.length_before,
                after=draft.length_after,
                tokens=draft.tokens_to_63_percent,
                delay=self.deploy_seconds,
            ),
            every=_HOUR * workload.shift_every_hours,
            captured=workload.captured_share * draft.passes,
            switch=self.switch_seconds,
            demand=workload.demand_tokens_per_s or math.inf,
        )


EXAMPLE = {
    "classes": [
        {
            "name": "H100",
            "count": 8,
            "usd_per_hour": 2.5,
            "serve_tokens_per_s": 1650,
            "train_tokens_per_s": 14000,
            "gpus_per_instance": 4,
        },
        {
            "name": "MI250",
            "count": 4,
            "usd_per_hour": 0.9,
            "serve_tokens_per_s": 244,
            "train_tokens_per_s": 5700,
            "gpus_per_instance": 4,
        },
    ],
    "draft": {
        "length_before": 1.9,
        "length_after": 2.5,
        "tokens_to_63_percent": 2e7,
        "step_cost": 1.6,
        "passes": 3,
    },
    "workload": {"shift_every_hours": 18, "prefill_share": 0.1},
}


def read_cluster(path: Path) -> ClusterFile:
    """Read and check a cluster file.

    Raises:
        ConfigError: One line per mistake.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path}: cannot be read as JSON ({reason}).") from None
    try:
        file = ClusterFile.model_validate(content)
    except ValidationError as error:
        sentences = explained(error, ClusterFile)
        lines = (f"{path}: {sentence.removeprefix(': ')}" for sentence in sentences)
        raise ConfigError("\n".join(lines)) from None
    if all(g.count * g.serve_tokens_per_s < 1e-6 for g in file.classes):
        reason = "none can serve; set count and serve_tokens_per_s of one above 0."
        raise ConfigError(f"{path}: classes: {reason}")
    return file
