"""Properties of the served models that a trainer needs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vllm_tide.train.gpu import gpu_uuid


@dataclass(frozen=True, slots=True)
class DraftFacts:
    """Properties of the served target and draft.

    Attributes:
        aux_layer_ids: Captured layers in vLLM's convention: id L is the residual
            stream that enters layer L. Ascending, as the model returns them.
        gpu_uuids: GPUs of all ranks; empty on a CPU.
    """

    target_path: str
    draft_path: Path
    target_dtype: str
    hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    aux_layer_ids: tuple[int, ...]
    num_speculative_tokens: int
    gpu_uuids: list[str]


def _directory(model: str, revision: str | None, **options: Any) -> Path:
    path = Path(model)
    if path.is_dir():
        return path.resolve()
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model, revision=revision, **options))


def local_dir(model: str, revision: str | None = None) -> Path:
    """Return the directory of a checkpoint: a path, or its local hub snapshot."""
    return _directory(model, revision, local_files_only=True)


WEIGHTS = "*.safetensors"


def weights_dir(
    model: str, revision: str | None = None, pattern: str = WEIGHTS
) -> Path:
    """Return `local_dir` after downloading the weights and JSON files if necessary.

    Args:
        pattern: Of the names of the weights' files.

    Raises:
        OSError: Neither the hub nor its local cache has the model.
        ValueError: The name is not a valid model name.
    """
    # vLLM loads the same files from the same cache later.
    return _directory(model, revision, allow_patterns=[pattern, "*.json"])


def draft_facts(worker: Any) -> DraftFacts:
    """Read the properties of a worker's models."""
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
        gpu_uuids=_gpus_of_ranks(getattr(worker, "device", None)),
    )


def _gpus_of_ranks(device: torch.device | None) -> list[str]:
    """Return the UUIDs of all ranks' GPUs; each rank calls this."""
    from vllm.distributed import get_tp_group

    group, own = get_tp_group(), gpu_uuid(device)
    if not own or group.world_size == 1:
        return [own] if own else []
    uuids: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(uuids, own, group=group.cpu_group)
    return sorted(set(uuids))
