"""What a profile holds for: everything about a worker that changes its timing."""

from __future__ import annotations

import os
from typing import Any

import torch

from vllm_tide.engine.machine_facts import (
    cpu_name,
    digest,
    patch_digest,
    preloaded_libraries,
)


def facts(worker: Any) -> dict[str, Any]:
    """Everything that changes a worker's timing, JSON-able, for `profile_key`.

    Always as it was when it was first asked for: vLLM settles some of it later, and a
    server must find what was measured after that.

    Args:
        worker: vLLM's worker after `load_model`, with our `tide`.
    """
    tide = worker.model_runner.tide
    if tide.timing_facts is None:
        tide.timing_facts = _facts(worker)
    return dict(tide.timing_facts)


def _facts(worker: Any) -> dict[str, Any]:
    import vllm

    config = worker.vllm_config
    target, speculative = config.model_config, config.speculative_config
    compilation, scheduler = config.compilation_config, config.scheduler_config
    graphs = str(getattr(compilation.cudagraph_mode, "name", "NONE"))
    sizes = compilation.cudagraph_capture_sizes or []
    runner = "v1"
    if worker.use_v2_model_runner:
        runner = "v2-async" if scheduler.async_scheduling else "v2"
    return {
        "runner": runner,
        "target": _model_digest(target),
        "draft": _model_digest(speculative.draft_model_config),
        "method": speculative.method,
        "dtype": str(target.dtype).removeprefix("torch."),
        "quantization": [
            target.quantization,
            speculative.draft_model_config.quantization,
        ],
        "kv_cache_dtype": str(config.cache_config.cache_dtype),
        "block_size": config.cache_config.block_size,
        "tensor_parallel_size": config.parallel_config.tensor_parallel_size,
        "device": _device(config.device_config.device_type),
        "threads": torch.get_num_threads(),
        "preloaded": preloaded_libraries(os.environ.get("LD_PRELOAD", "")),
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "patches": patch_digest(),
        "graphs": graphs,
        "graph_sizes": [] if graphs == "NONE" else sorted(int(n) for n in sizes),
        "eager": bool(target.enforce_eager),
        "compilation": int(compilation.mode or 0),
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
    }


def _model_digest(model_config: Any) -> str:
    """Digest of a model's shape; where it lies and who saved it do not matter."""
    shape = model_config.hf_config.to_dict()
    for name in ("_name_or_path", "name_or_path", "transformers_version"):
        shape.pop(name, None)
    return digest(shape)


def _device(kind: str) -> str:
    """Name of the device the models run on."""
    return str(torch.cuda.get_device_name()) if kind == "cuda" else cpu_name()
