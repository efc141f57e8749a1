"""Mixes of loss terms as the command line names them: `forward_kl+discard:0.5`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

from vllm_tide.config import LossTerm

from .control_arms import BenchError

MIXES = (
    "forward_kl",
    "reverse_kl",
    "forward_kl+next_token",
    "forward_kl+discard",
    "reverse_kl+discard",
    "lk_hybrid",
    "nla",
    "tv",
)
"""What the issue asks for."""
USUAL_WEIGHT: Mapping[str, float] = {"next_token": 0.1, "discard": 0.5}
"""Of a term beside the first one, where no number is given."""


def parse_mix(text: str) -> dict[str, float]:
    """Return the weight of each term of a mix.

    Args:
        text: Terms joined by `+`, each with `:weight` if it is not the usual one.

    Raises:
        BenchError: A term is unknown, named twice, or its weight is no number >= 0.
    """
    known = get_args(LossTerm)
    weights: dict[str, float] = {}
    for part in text.split("+"):
        name, _, number = part.strip().partition(":")
        if name not in known:
            raise BenchError(
                f"--losses: {text!r} has the term {name!r}; known: {', '.join(known)}"
            )
        if name in weights:
            raise BenchError(f"--losses: {text!r} names {name} twice")
        try:
            usual = USUAL_WEIGHT.get(name, 1.0) if weights else 1.0
            weights[name] = float(number) if number else usual
        except ValueError:
            weights[name] = -1.0
        if not 0 <= weights[name] < float("inf"):
            raise BenchError(f"--losses: {text!r}: the weight of {name} is no number")
    if not any(weights.values()):
        raise BenchError(f"--losses: {text!r} has no weight above 0")
    return weights
