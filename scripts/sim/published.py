"""Published time models: the TIDE paper's Table 5.

T(n) is the time of one target step of n tokens, and D0 the time of one draft step,
measured by the paper's authors on H100 nodes with tensor parallelism. The table has
neither a context term nor a cost per draft row, so these models have none. Beyond the
last row T is extrapolated with the last slope, also for prompts.
"""

from __future__ import annotations

from vllm_tide.control.time_model import ForwardModel, TimeModel

_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
# Milliseconds of each row; Qwen3's last two rows are blank in the paper.
# fmt: off
_TARGET_MS = {
    "gpt-oss-120b":
        (3.416, 3.844, 4.341, 5.236, 6.123, 7.637, 9.345, 11.79, 15.50, 21.50),
    "Qwen3-235B-A22B":
        (9.057, 10.07, 11.86, 14.68, 17.84, 23.47, 26.68, 31.46),
    "Llama-4-Scout-17B-16E":
        (6.461, 7.953, 8.932, 11.01, 13.61, 16.82, 19.58, 23.82, 27.89, 40.86),
    "Llama-3.3-70B-Instruct":
        (15.50, 16.00, 16.11, 16.36, 17.10, 18.45, 19.00, 21.38, 27.54, 64.76),
}
# fmt: on
_DRAFT_MS = {
    "gpt-oss-120b": 0.393,
    "Qwen3-235B-A22B": 0.137,
    "Llama-4-Scout-17B-16E": 0.330,
    "Llama-3.3-70B-Instruct": 0.843,
}

MODELS = tuple(_TARGET_MS)


def table_model(
    knots: tuple[int, ...],
    seconds: tuple[float, ...],
    draft_step_seconds: float,
    host: float = 0.0,
) -> TimeModel:
    """Return a time model of a table of T(n) and a constant draft step D0.

    Source: the TIDE paper's Table 5, which has no context term.

    Args:
        draft_step_seconds: D0, the seconds of every draft pass.
        host: Seconds per step outside of target and draft.
    """
    draft = ForwardModel((1,), (draft_step_seconds,), 0.0)
    target = ForwardModel(tuple(knots), tuple(seconds), 0.0)
    return TimeModel(target, draft_first=draft, draft_next=draft, host=host)


def published(name: str) -> TimeModel:
    """Return the time model of one of `MODELS`.

    Source: the TIDE paper, Table 5.
    """
    milliseconds = _TARGET_MS[name]
    return table_model(
        _TOKENS[: len(milliseconds)],
        tuple(value / 1000.0 for value in milliseconds),
        _DRAFT_MS[name] / 1000.0,
    )
