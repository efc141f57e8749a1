"""Facts that a profile holds for (all that changes a worker's timing), or a trainer."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_tide.patching import load_manifest, patches_root


def digest(value: Any) -> str:
    """Short SHA-256 of a value's JSON."""
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def patch_digest() -> str:
    return digest(sorted(load_manifest(patches_root())["patches"].items()))


def preloaded_libraries(value: str) -> list[str]:
    """Names of the libraries of an LD_PRELOAD; where they lie does not matter."""
    return sorted(Path(name).name for name in value.split(":"))


def cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor() or platform.machine()
    names = [
        line.partition(":")[2].strip()
        for line in text.splitlines()
        if line.startswith(("model name", "Model"))
    ]
    return names[0] if names else platform.machine()


def facts(worker: Any) -> dict[str, Any]:
    """Everything that changes a worker's timing, JSON-able, for `profile_key`.

    Always as it was when it was first asked for: vLLM settles some of it later, and a
    server must find what was measured after that.
    """
    tide = worker.model_runner.tide
    if tide.timing_facts is None:
        tide.timing_facts = _facts(worker)
    return dict(tide.timing_facts)


def _facts(worker: Any) -> dict[str, Any]:
    import torch
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
    import torch

    return str(torch.cuda.get_device_name()) if kind == "cuda" else cpu_name()


@dataclass(frozen=True, slots=True)
class DraftFacts:
    """Facts of a served target and draft.

    Attributes:
        aux_layer_ids: Captured layers, vLLM's convention: id L is the residual
            stream entering layer L; ascending, as the model returns them.
    """

    target_path: str
    draft_path: Path
    target_dtype: str
    hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    aux_layer_ids: tuple[int, ...]
    num_speculative_tokens: int


def _directory(model: str, revision: str | None, **options: Any) -> Path:
    path = Path(model)
    if path.is_dir():
        return path.resolve()
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model, revision=revision, **options))


def local_dir(model: str, revision: str | None = None) -> Path:
    """Directory of a checkpoint: itself, or its snapshot in the local hub cache."""
    return _directory(model, revision, local_files_only=True)


def weights_dir(model: str, revision: str | None = None) -> Path:
    """Like `local_dir`, but fetches the weights and what describes them if need be.

    Raises:
        OSError: The hub or its cache has no such model.
        ValueError: The name is none of a model.
    """
    # vLLM loads the same files from the same cache a moment later.
    return _directory(model, revision, allow_patterns=["*.safetensors", "*.json"])


def draft_facts(worker: Any) -> DraftFacts:
    config = worker.vllm_config
    speculative = config.speculative_config
    draft, target = speculative.draft_model_config, config.model_config
    runner = worker.model_runner
    if worker.use_v2_model_runner:
        from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import (
            get_eagle3_aux_layers_from_config,
        )

        ids = get_eagle3_aux_layers_from_config(speculative)
    else:
        ids = runner._get_eagle3_aux_layers_from_config()
    if not ids:
        ids = runner.get_model().get_eagle3_default_aux_hidden_state_layers()
    draft_vocab = getattr(draft.hf_config, "draft_vocab_size", None)
    return DraftFacts(
        target_path=str(local_dir(target.model, target.revision)),
        draft_path=local_dir(draft.model, draft.revision),
        target_dtype=str(target.dtype).removeprefix("torch."),
        hidden_size=target.get_hidden_size(),
        vocab_size=target.get_vocab_size(),
        draft_vocab_size=draft_vocab or target.get_vocab_size(),
        aux_layer_ids=tuple(sorted(set(ids))),
        num_speculative_tokens=speculative.num_speculative_tokens,
    )
