"""Choice of the worker's part of TIDE by vLLM's model runner."""

from __future__ import annotations

from typing import Any

from vllm_tide.config import parse_tide
from vllm_tide.engine.worker import WorkerTide


def make_worker(worker: Any) -> WorkerTide[Any]:
    """Create the worker's part of TIDE, with the configuration's section `tide`.

    Args:
        worker: vLLM's `Worker` after `load_model`; sets the attribute `tide`, which the
            patches read, of its runner and of the runner's draft proposer.
    """
    made: type[WorkerTide[Any]]
    if worker.use_v2_model_runner:
        from vllm_tide.engine.worker_v2 import WorkerTideV2 as made
    else:
        from vllm_tide.engine.worker_v1 import WorkerTideV1 as made
    tide = made(worker, parse_tide(worker.vllm_config.speculative_config.tide))
    tide.attach()
    return tide
