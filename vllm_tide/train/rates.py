"""How large the steps of a cycle are, and those of the next one."""

from __future__ import annotations

from vllm_tide.train.judgement import CycleResult

WARMUP_SHARE, DECAY_SHARE, FLOOR = 0.1, 0.3, 0.1
LEAST_RATE = 1 / 16
"""Share of the learning rate that is kept however often a cycle does harm."""
REGROWTH = 2.0**0.25
"""Growth of the learning rate after a cycle that neither helped nor did harm."""


def cycle_lr_scale(step: int, total: int) -> float:
    """Linear warm-up, plateau, linear decay, so that a cycle ends at a quiet point."""
    warm = max(1, round(total * WARMUP_SHARE))
    if step < warm:
        return (step + 1) / (warm + 1)
    tail = max(1, round(total * DECAY_SHARE))
    left = total - step
    return 1.0 if left > tail else FLOOR + (1 - FLOOR) * left / (tail + 1)


def next_rate(rate: float, result: CycleResult, *, harm: bool) -> float:
    """Share of the learning rate for the next cycle.

    A draft that already fits its traffic is thrown off by steps that a shift needs, and
    takes many cycles to come back; those are cycles in which a shift is not learnt
    either. Steps grow again with every cycle that does no harm. Not with a shift: a
    gate that pauses after a useless cycle sees the shift again right after, and would
    have every cycle start over with steps that are too large.

    Args:
        rate: Of the last cycle.
        result: Of the last cycle.
        harm: Whether it counts as having done harm.
    """
    if harm:
        return max(LEAST_RATE, 0.5 * rate)
    helped = result.improved and result.gain > 0
    return min(1.0, rate * (2.0 if helped else REGROWTH))
