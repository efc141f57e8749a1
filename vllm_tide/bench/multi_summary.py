"""Several servers and one trainer in figures: who improved, and who waited for whom."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from .learning_events import Look, number
from .learning_summary import rounded
from .scrape import GENERATED, SWAPS, Scrape
from .summary import acceptance_length


def before_first_swap(samples: Sequence[Scrape]) -> float | None:
    """Return the acceptance length of the first head; None if nothing was drafted."""
    ordered = sorted(samples, key=lambda sample: sample.t_s)
    if not ordered:
        return None
    first = ordered[0].value(SWAPS)
    under = [sample for sample in ordered if sample.value(SWAPS) == first]
    return rounded(acceptance_length([(under[0], under[-1])]))


def install_lags(looks: Sequence[Look], engine: str) -> list[float]:
    """Return how long each head that an engine was sent took to be installed (s).

    Known to about a second, the period of the looks. A head that a newer one overtook
    counts as installed with it.

    Args:
        looks: At the trainers' status, in order of time.
        engine: Its id.
    """
    sent: dict[int, float] = {}
    lags: list[float] = []
    for look in looks:
        told = look.engines.get(engine, {})
        published, installed = (
            number(told.get(key)) for key in ("published", "installed")
        )
        if published:
            sent.setdefault(int(published), look.t_s)
        for version in [v for v in sent if installed is not None and v <= installed]:
            lags.append(round(look.t_s - sent.pop(version), 2))
    return lags


def stretch_figures(
    samples: Sequence[Scrape], start_s: float, end_s: float
) -> dict[str, Any]:
    """Return what a server did between two moments.

    Args:
        samples: Its readings.
        start_s: Seconds since its run's start.
        end_s: Seconds since its run's start.

    Returns:
        `seconds` between the readings used, `output_tokens_per_s`, `swaps`, and
        `longest_pause_s`: the longest time between two readings without a token.
    """
    inside = sorted(
        (sample for sample in samples if start_s <= sample.t_s <= end_s),
        key=lambda sample: sample.t_s,
    )
    if len(inside) < 2:
        return {
            "seconds": None,
            "output_tokens_per_s": None,
            "swaps": None,
            "longest_pause_s": None,
        }
    first, last = inside[0], inside[-1]
    seconds = last.t_s - first.t_s
    longest = waited = 0.0
    for before, after in pairwise(inside):
        still = after.value(GENERATED) <= before.value(GENERATED)
        waited = waited + after.t_s - before.t_s if still else 0.0
        longest = max(longest, waited)
    generated = last.value(GENERATED) - first.value(GENERATED)
    return {
        "seconds": round(seconds, 2),
        "output_tokens_per_s": round(generated / seconds, 2) if seconds > 0 else None,
        "swaps": int(last.value(SWAPS) - first.value(SWAPS)),
        "longest_pause_s": round(longest, 2),
    }
