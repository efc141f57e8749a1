"""SLO attainment: the share of requests whose TPOT is within a limit.

As in the AdaSpec paper, the limit is a scale x the P90 TPOT of plain decoding on the
same trace, so plain decoding itself attains 90% at scale 1 by construction.  A failed
request, or one that never ended, has not attained anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .request_figures import percentile

SCALES = (0.8, 0.9, 1.0, 1.1, 1.2)


def attained(tpots_ms: Sequence[float], failed: int, limit_ms: float) -> float | None:
    """Return the share of requests within the limit; None if there are none.

    Args:
        tpots_ms: TPOT of each finished request in ms.
        failed: Requests that failed.
        limit_ms: Largest TPOT that attains.
    """
    total = len(tpots_ms) + failed
    return sum(t <= limit_ms for t in tpots_ms) / total if total else None


def _rounded(share: float | None) -> float | None:
    return None if share is None else round(share, 4)


def attainment(
    by_arm: Mapping[str, tuple[Sequence[float], int]],
    scales: Sequence[float] = SCALES,
    baseline: str = "none",
) -> dict[str, object]:
    """Return limits and attainment of every arm on one trace.

    ``served`` is the paper's curve of a policy that knows its limit: at each scale
    the attainment of the arm (``adaspec@0.9``) that was served with that scale.

    Args:
        by_arm: TPOTs in ms and number of failed requests, all repeats together.
        scales: Factors of the baseline's P90.
        baseline: Arm whose P90 TPOT is the limit at scale 1.
    """
    if baseline not in by_arm or not by_arm[baseline][0]:
        return {"p90_tpot_ms": None, "scales": list(scales), "arms": {}, "served": {}}
    p90_ms = percentile(by_arm[baseline][0], 90)
    served: dict[str, list[float | None]] = {}
    for arm, (tpots, failed) in by_arm.items():
        policy, _, scale_text = arm.partition("@")
        for place, scale in enumerate(scales):
            if scale_text and abs(float(scale_text) - scale) < 1e-9:
                curve = served.setdefault(policy, [None] * len(scales))
                curve[place] = _rounded(attained(tpots, failed, scale * p90_ms))
    return {
        "served": served,
        "p90_tpot_ms": round(p90_ms, 4),
        "scales": list(scales),
        "arms": {
            arm: [_rounded(attained(tpots, failed, scale * p90_ms)) for scale in scales]
            for arm, (tpots, failed) in by_arm.items()
        },
    }
