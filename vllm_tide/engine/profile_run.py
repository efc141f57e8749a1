"""An engine in this process, to measure its forward times (`vllm-tide profile`)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from vllm_tide.engine.profiler import facts, measure

if TYPE_CHECKING:
    from vllm_tide.control.online_time import RoundSample


def measure_engine(
    model: str,
    draft: str,
    *,
    num_speculative_tokens: int,
    dtype: str = "auto",
    quick: bool = False,
    seconds: float | None = None,
    serve_args: Sequence[str] = (),
) -> tuple[list[RoundSample], dict[str, Any]]:
    """Start an engine in this process, measure it and stop it.

    Args:
        model: The target.
        draft: Its EAGLE-3 draft.
        num_speculative_tokens: Longest speculative length.
        dtype: As in `vllm serve`.
        quick: Few shapes.
        seconds: Time to spend; None: by `quick`.
        serve_args: Further arguments of `vllm serve`.

    Returns:
        The measured rounds of the leading rank, and the facts they hold for.
    """
    arguments = ["--dtype", dtype, *serve_args]
    with open_engine(model, draft, num_speculative_tokens, arguments) as engine:
        ranks = engine.collective_rpc(
            measure_worker, args=(quick, num_speculative_tokens, seconds)
        )
    samples, facts = ranks[0]
    return samples, facts


@contextmanager
def open_engine(
    model: str, draft: str, num_speculative_tokens: int, serve_args: Sequence[str]
) -> Iterator[Any]:
    """A controlled vLLM engine in this process, as `LLMEngine`.

    Args:
        model: The target.
        draft: Its EAGLE-3 draft.
        num_speculative_tokens: Longest speculative length.
        serve_args: Further arguments of `vllm serve`.
    """
    # The engine core in this process: the worker is reached without serialisation.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.llm_engine import LLMEngine

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog="vllm-tide profile"))
    engine_args = EngineArgs.from_cli_args(
        parser.parse_args(["--model", model, *serve_args])
    )
    engine_args.speculative_config = {
        "method": "eagle3",
        "model": draft,
        "num_speculative_tokens": num_speculative_tokens,
        "tide": {
            "capture": {"enabled": False},
            "swap": {"enabled": False},
            # Needs no times, so that it starts on Model Runner V2 too.
            "control": {"policy": "threshold"},
        },
    }
    engine = LLMEngine.from_engine_args(engine_args)
    try:
        yield engine
    finally:
        engine.engine_core.shutdown()


def measure_worker(
    worker: Any, quick: bool, num_speculative_tokens: int, seconds: float | None
) -> tuple[list[RoundSample], dict[str, Any]]:
    """Measure inside a worker; arguments as in `measure_engine`."""
    samples = measure(
        worker,
        quick=quick,
        num_speculative_tokens=num_speculative_tokens,
        budget_s=seconds,
    )
    return samples, facts(worker)
