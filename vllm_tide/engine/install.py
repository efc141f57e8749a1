"""Installation of a staged draft into vLLM's draft model, between two steps.

Layer-wise reload (`model_loader/reload`) loads into the existing tensors, so CUDA-graph
addresses stay valid. It runs `process_weights_after_loading`, which updates the CPU
backend's packed oneDNN weights. On a GPU an unquantised draft uses its parameters as
loaded, so its weights are only copied in place, on the current stream and without extra
memory. Modules shared with the target are removed from the draft during the reload,
because the reload must not change the target.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import (
    UnquantizedEmbeddingMethod,
)
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.platforms import current_platform

from vllm_tide.draft.config import DraftError, Eagle3Config, read_config
from vllm_tide.draft.probe import probe_rows
from vllm_tide.engine.staged_draft import DraftRefused

_SHARED = {"embed_tokens.weight": "model.embed_tokens", "lm_head.weight": "lm_head"}


def shared_with_target(draft: nn.Module, target: nn.Module) -> frozenset[str]:
    """Return the checkpoint names of the draft's tensors that are the target's."""
    of_target = {id(module) for module in target.modules()}
    names = set()
    for name, path in _SHARED.items():
        try:
            module = draft.get_submodule(path)
        except AttributeError:
            continue
        if id(module) in of_target:
            names.add(name)
    return frozenset(names)


def _computed(draft: nn.Module) -> list[str]:
    """Return the paths of modules with computed buffers only (RoPE caches)."""
    return [
        path
        for path, module in draft.named_modules()
        if path
        and any(True for _ in module.buffers(recurse=False))
        and not any(True for _ in module.parameters())
    ]


@contextmanager
def _without(draft: nn.Module, shared: frozenset[str]) -> Iterator[None]:
    """Remove modules from `draft` and restore them on exit, also after an error.

    They are the modules shared with the target and those without checkpoint tensors.
    """
    flags = {
        name: getattr(draft, name)
        for name in ("has_own_embed_tokens", "has_own_lm_head")
        if hasattr(draft, name)
    }
    removed = []
    try:
        paths = _computed(draft) + [_SHARED[name] for name in shared]
        for path in paths:
            parent, _, leaf = path.rpartition(".")
            owner = draft.get_submodule(parent)
            removed.append((owner, leaf, owner._modules.pop(leaf)))
        yield
    finally:
        for owner, leaf, module in removed:
            owner._modules[leaf] = module
        for name, value in flags.items():
            setattr(draft, name, value)


def loads_in_place(draft: nn.Module) -> bool:
    """Return whether the draft uses its parameters as loaded, without processing."""
    plain = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod, type(None))
    return current_platform.is_cuda_alike() and all(
        isinstance(getattr(module, "quant_method", None), plain)
        for module in draft.modules()
    )


def install(
    draft: nn.Module,
    vllm_config: VllmConfig,
    tensors: Mapping[str, torch.Tensor],
    shared: frozenset[str],
) -> None:
    """Load `tensors` into the running draft model.

    `d2t`, the vocabulary of a pruned draft, is loaded too.

    Args:
        tensors: Full (unsharded) tensors by checkpoint name.
        shared: Names that belong to the target and are not loaded.

    Raises:
        Exception: Any error of the loader. The draft may then be partly loaded, and the
            caller must install the last good draft again.
    """
    model_config = vllm_config.speculative_config.draft_model_config
    weights = [(k, v) for k, v in tensors.items() if k not in shared]
    with (
        set_current_vllm_config(vllm_config),
        torch.device(vllm_config.device_config.device),
        _without(draft, shared),
    ):
        if loads_in_place(draft):
            draft.load_weights(weights)
            return
        initialize_layerwise_reload(draft)
        try:
            draft.load_weights(weights)
        finally:
            # Also after a failure: restores every layer that was not loaded.
            finalize_layerwise_reload(draft, model_config)


def overflow_check(
    checkpoint: Path, vllm_config: VllmConfig
) -> Callable[[Mapping[str, torch.Tensor]], None] | None:
    """Return a check that runs a published draft on a few rows, on the host.

    Args:
        checkpoint: Directory of the draft that the server started with.

    Returns:
        A function that raises `DraftRefused` if logits are not finite; None if the
        trainer does not support the draft.
    """
    layers = vllm_config.model_config.get_total_num_hidden_layers()
    dtype = vllm_config.speculative_config.draft_model_config.dtype
    try:
        raw = read_config(checkpoint)
        config = Eagle3Config.from_json(raw, {"num_hidden_layers": layers})
    except DraftError:
        return None

    def check(tensors: Mapping[str, torch.Tensor]) -> None:
        if not bool(probe_rows(config, tensors, dtype).isfinite().all()):
            raise DraftRefused("not_finite", "the logits overflow.")

    return check


def _expected(tensors: Mapping[str, torch.Tensor], names: list[str]) -> torch.Tensor:
    parts = []
    for name in names:
        for prefix in ("midlayer.", "layers.0."):
            if prefix + name in tensors:
                parts.append(tensors[prefix + name].float())
    return torch.cat(parts) if parts else torch.empty(0)


_PROBED = {
    "model.fc": [],
    "model.layers.0.self_attn.qkv_proj": [
        f"self_attn.{part}_proj.weight" for part in "qkv"
    ],
    "model.layers.0.self_attn.o_proj": ["self_attn.o_proj.weight"],
    "model.layers.0.mlp.gate_up_proj": [
        "mlp.gate_proj.weight",
        "mlp.up_proj.weight",
    ],
    "model.layers.0.mlp.down_proj": ["mlp.down_proj.weight"],
}


def verify_installed(draft: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Check that the modules' outputs match the new weights.

    Packed weights cannot be read back, so each linear layer is run on a fixed probe.
    The vocabulary mapping is read back. Only for an unsharded draft (tensor parallel
    size 1).

    Raises:
        DraftRefused: A layer does not use the new weights.
    """
    mapping = getattr(draft, "draft_id_to_target_id", None)
    if mapping is not None and "d2t" in tensors:
        want = tensors["d2t"].to("cpu", mapping.dtype)
        if not torch.equal(mapping.cpu(), want):
            raise DraftRefused("install", "the draft's vocabulary (d2t) is unchanged.")
    modules = dict(draft.named_modules())
    for path, names in _PROBED.items():
        module = modules.get(path)
        want = tensors["fc.weight"].float() if not names else _expected(tensors, names)
        if module is None or want.numel() == 0:
            continue
        dtype = getattr(module, "params_dtype", torch.float32)
        # A fixed ramp, so that the engine's random state is not used.
        probe = torch.linspace(-1, 1, want.shape[1]).to(dtype)[None]
        weight = next(module.parameters(), probe)  # gives the module's device
        got = module(probe.to(weight.device))
        got = (got[0] if isinstance(got, tuple) else got).float().cpu()
        expect = probe.float() @ want.to(dtype).float().T
        scale = expect.abs().max().clamp(min=1e-6)
        tolerance = 1e-4 if dtype == torch.float32 else 2e-2
        if not bool(((got - expect).abs() <= tolerance * scale).all()):
            raise DraftRefused("install", f"layer {path} does not use the new weights.")
