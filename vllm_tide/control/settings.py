"""The knobs of control that do not depend on an engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ControlSettings:
    """Settings of a policy; `vllm_tide.control.policies.make_policy` takes them.

    Attributes:
        policy: "adaspec", "static", "threshold" or "tide_gate".
        k_max: Most draft tokens of a request in a round.
        min_gain: Speculation is off unless it is predicted to raise throughput by at
            least this share.
        hysteresis: Added to `min_gain` before speculation comes on again.
        probe_share: Most share of time spent on probing: drafts while off; while on,
            half of it undrafted rounds and half of it tokens that do not pay.
        threshold: Mean confidence below which the threshold policy stops drafting.
        verify: Choose the verified set by value; False sends every drafted token
            (ablation).
        explore: Verify whole drafts now and then, within half of `probe_share`; False
            where what `choose` says is not what is verified.
        calibrate: Learn acceptance from verification results; False takes confidence
            for probability (ablation).
        half_life_tokens: Verified tokens after which an observation counts half.
        max_requests: Number of request slots.
    """

    policy: str = "adaspec"
    k_max: int = 7
    min_gain: float = 0.02
    hysteresis: float = 0.02
    probe_share: float = 0.01
    threshold: float = 0.6
    verify: bool = True
    explore: bool = True
    calibrate: bool = True
    half_life_tokens: float = 2000.0
    max_requests: int = 256

    def __post_init__(self) -> None:
        if self.k_max < 1 or self.max_requests < 1:
            raise ValueError("k_max and max_requests must be at least 1")
        if self.half_life_tokens <= 0 or not 0 <= self.probe_share < 1:
            raise ValueError("half_life_tokens must be > 0, probe_share in [0, 1)")
