"""Measurements and plans of the TIDE paper (arXiv 2602.05145), for a check.

Relative rates per GPU, MI250 = 1 (figure 11): gpt-oss-120b served by SGLang without
speculation, and an EAGLE-3 draft trained by PyTorch. Figures 10 and 12 show the
throughput of some GPUs serving at a speed-up s while others train, over all serving
without speculation: s times the share of the serving GPUs' rate.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_tide.plan.throughput import Accelerators, Case, Learning, SpeedUp

SERVES = {"H100": 6.76, "MI300X": 4.42, "MI250": 1.0}
TRAINS = {"H100": 2.44, "MI300X": 1.77, "MI250": 1.0}
WITHIN = 0.012


@dataclass(frozen=True)
class Published:
    """A bar of a figure: one class serves, another trains."""

    figure: str
    serving: tuple[str, int]
    training: tuple[str, int]
    speed_up: float
    value: float

    def computed(self) -> float:
        """Return the value from the formulas of `vllm_tide.plan`."""
        speed = SpeedUp.of_step_cost(1.0)
        groups = self.serving, self.training
        classes = tuple(
            Accelerators(name, count, SERVES[name], TRAINS[name], 0.0, 1, speed)
            for name, count in groups
        )
        learning = Learning(self.speed_up, self.speed_up, 1.0, 0.0)
        case = Case(classes, learning, every=1.0)
        return case.mean((0.0, float(self.training[1]))) / case.plain


PRINTED = (
    Published("10, ShareGPT", ("H100", 8), ("MI250", 4), 1.15, 1.08),
    Published("10, Science", ("H100", 8), ("MI250", 4), 1.30, 1.22),
    Published("12, H100 4:1", ("H100", 16), ("MI250", 4), 1.30, 1.26),
    Published("12, MI300X 2:1", ("MI300X", 8), ("MI250", 4), 1.10, 0.99),
)
