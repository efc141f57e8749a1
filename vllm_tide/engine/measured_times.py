"""A time model from the costs that vLLM measures for its adaptive verification.

vLLM times a step of each size when it captures graphs, and makes two tables of that:
the target's forward by its tokens, and the whole draft by its requests. They stand in
for a profile where there is none. What they do not say is learnt while it serves: what
is spent around the forwards, and what context costs (all was measured at one length,
`VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN`, and is taken for the price of the
tokens).
"""

from __future__ import annotations

import numpy as np

from vllm_tide.control.time_model import ForwardModel, TimeModel

# Of the dearest step: a slope that changes by less is rounding.
_BEND = 1e-6


def times_of_tables(
    draft_ms: np.ndarray, target_ms: np.ndarray, passes: int
) -> TimeModel:
    """The model that says what vLLM's tables of costs say.

    Args:
        draft_ms: float64 [1 + most requests], ms of all draft passes by requests.
        target_ms: float64 [1 + most tokens], ms of the target's forward by tokens;
            neither falls.
        passes: Draft passes that were measured, num_speculative_tokens.
    """
    each = draft_ms / passes
    return TimeModel(
        target=_forward(target_ms),
        # Its first pass also runs the rows that were drafted before.
        draft_first=_forward(each, rows=1 + passes),
        draft_next=_forward(each),
    )


def _forward(costs_ms: np.ndarray, rows: int = 1) -> ForwardModel:
    """Knots where a table bends: exact, stairs too. `rows` of the pass per entry."""
    seconds = np.maximum.accumulate(costs_ms[1:]) / 1e3
    bends = np.ones(len(seconds), bool)
    bends[1:-1] = np.abs(np.diff(seconds, 2)) > _BEND * seconds[-1]
    at = np.flatnonzero(bends)
    knots = (rows * (at + 1)).tolist()
    return ForwardModel(tuple(knots), tuple(seconds[at].tolist()), alpha=0.0)
