"""State of the simulated engine's requests: a column per request, property rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

# Rows of the state, an int64 array [8, n]: the request's index in the trace; its slot;
# the acceptance process's row of its next token; remaining output tokens; tokens in the
# target's KV cache; drafts sent to the next step; tokens missing in the draft's KV
# cache; remaining prompt tokens to prefill.
REQUEST, SLOT, AT, LEFT, CACHED, SENT, MISSING, TODO = range(8)


def empty() -> np.ndarray:
    """Return the state without a request, int64 [8, 0]."""
    return np.zeros((8, 0), np.int64)


@dataclass(frozen=True, slots=True)
class Server:
    """Configuration of the simulated engine.

    Attributes:
        max_num_seqs: Maximum running requests.
        max_num_batched_tokens: Maximum rows of a target step, including prompts.
        slo_seconds: Limit of a request's time per output token; None for none.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    slo_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """One target step that has just run.

    Attributes:
        requests: Number of requests, including prefilling ones.
        context: Tokens in the KV cache before the step, summed.
        verified: Draft tokens verified.
        rows: Rows of the target.
        target_s: Seconds of the target.
        accepted: [n] int64 drafts accepted.
        emitted: [n] int64 tokens written; 0 for an incomplete prompt.
        committed: [n] int64 committed rows, which the draft has to process.
        emitting: Requests expected to write a token in the next step.
        ended: Whether a request wrote its last token.
        continues: Whether the engine was busy since the previous step.
    """

    requests: int
    context: int
    verified: int
    rows: int
    target_s: float
    accepted: np.ndarray
    emitted: np.ndarray
    committed: np.ndarray
    emitting: int
    ended: bool
    continues: bool


@dataclass(frozen=True, slots=True)
class Result:
    """Result of one arm on a trace.

    Attributes:
        output_tokens: Tokens written.
        busy_s: Simulated seconds with a running step.
        steps: Engine steps.
        mean_batch: Requests of a step, averaged over time.
        drafted: Draft tokens drafted.
        verified: Draft tokens sent to the target.
        accepted: Draft tokens accepted.
        e2e: [R] float64 seconds from arrival to the last token.
        tpot: [R] float64 seconds per output token after the first; nan for one token.
        stats: Statistics of the policy.
        timeline: End of each step (s), and tokens written until then.
    """

    output_tokens: int
    busy_s: float
    steps: int
    mean_batch: float
    drafted: int
    verified: int
    accepted: int
    e2e: np.ndarray
    tpot: np.ndarray
    stats: dict[str, Any]
    timeline: tuple[np.ndarray, np.ndarray]

    @property
    def throughput(self) -> float:
        """Output tokens per busy second."""
        return self.output_tokens / self.busy_s if self.busy_s else 0.0
