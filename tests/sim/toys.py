"""Small traces, processes and policies for the simulator's tests."""

from __future__ import annotations

import numpy as np

from sim.acceptance import Process
from sim.arrivals import Trace
from vllm_tide.control.batch import Batch, Outcome, Plan
from vllm_tide.control.time_model import ForwardModel, TimeModel

# T(n) = 10 ms + 0.1 ms a token, a draft pass 1 ms.
TARGET = ForwardModel((1, 1001), (0.0101, 0.1101), 0.0)
DRAFT = ForwardModel((1,), (0.001,), 0.0)
MODEL = TimeModel(TARGET, DRAFT, DRAFT)


def trace(*requests: tuple[float, int, int]) -> Trace:
    arrival, prompt, output = zip(*requests, strict=True)
    return Trace(
        "toy",
        np.array(arrival, np.float64),
        np.array(prompt, np.int64),
        np.array(output, np.int64),
    )


def process(of: Trace, runs: int, top: int, survival: float = 0.5) -> Process:
    """Every draft has *runs* accepted tokens."""
    length = of.output + top
    rows = int(length.sum())
    return Process(
        start=np.cumsum(length) - length,
        survival=np.tile(
            np.float32(survival) ** np.arange(1, top + 1, dtype=np.float32), (rows, 1)
        ),
        confidence=np.full((rows, top), 0.7, np.float32),
        run=np.full(rows, runs),
        top=top,
    )


class Scripted:
    """Follows its script and records its observations."""

    def __init__(self, *steps: int, stop: int = 99) -> None:
        self.script = list(steps)
        self.stop = stop
        self.batches: list[Batch] = []
        self.outcomes: list[Outcome] = []
        self.calls: list[str] = []
        self.steps = 0

    def plan(self, batch: Batch, now: float) -> Plan:
        self.calls.append("plan")
        self.batches.append(batch)
        steps = self.script[min(len(self.batches), len(self.script)) - 1]
        self.steps = 0
        return Plan(steps)

    def go_on(self, step: int, confidence: np.ndarray) -> bool:
        self.calls.append(f"go_on{step}")
        assert confidence.shape == self.batches[-1].slots.shape
        self.steps = step
        return step < self.stop

    def choose(self) -> np.ndarray:
        self.calls.append("choose")
        return np.minimum(self.batches[-1].caps, self.steps)

    def observe(self, outcome: Outcome) -> None:
        self.calls.append("observe")
        self.outcomes.append(outcome)

    def add(self, slot: int, sampled: bool, now: float) -> None:
        self.calls.append(f"add{slot}")

    def draft_swapped(self) -> None:
        raise AssertionError

    def stats(self) -> dict[str, int]:
        return {"plans": len(self.batches)}
