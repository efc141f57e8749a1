"""Installation of a staged draft into vLLM's draft model, between two steps.

Layer-wise reload (`model_loader/reload`) loads into the existing tensors, so CUDA-graph
addresses stay valid. It runs `process_weights_after_loading`, which updates the CPU
backend's packed oneDNN weights. On a GPU an unquantised draft uses its parameters as
loaded, so its weights are only copied in place, on the current stream and without extra
memory. Modules shared with the target are removed from the draft during the reload,
because the reload must not change the target.

A DFlash draft also holds the key and value weights of all layers in one tensor, for its
context. Upstream builds it once, in `load_weights`; here its values are replaced in
place, as captured graphs have its address.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

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

from vllm_tide.draft.kind import canonical
from vllm_tide.draft.module import rms_norm
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
        _context_weights_unchanged(draft),
    ):
        if loads_in_place(draft):
            draft.load_weights(weights)
        else:
            initialize_layerwise_reload(draft)
            try:
                draft.load_weights(weights)
            finally:
                # Also after a failure: restores every layer that was not loaded.
                finalize_layerwise_reload(draft, model_config)
    _fill_context_weights(draft, tensors)


_BUILD = "_build_fused_kv_buffers"


@contextmanager
def _context_weights_unchanged(draft: nn.Module) -> Iterator[None]:
    """Keep `load_weights` from building new tensors for a DFlash draft's context."""
    model = getattr(draft, "model", None)
    if not hasattr(model, _BUILD):
        yield
        return
    setattr(model, _BUILD, lambda: None)
    try:
        yield
    finally:
        delattr(model, _BUILD)


def _fill_context_weights(
    draft: nn.Module, tensors: Mapping[str, torch.Tensor]
) -> None:
    """Copy the published weights of the context into a DFlash draft's own tensors."""
    model: Any = getattr(draft, "model", None)
    if not hasattr(model, _BUILD):
        return
    if model._fused_kv_weight is None:
        raise DraftRefused("install", "the draft's weights are quantised.")
    named, places = canonical(tensors), model._fused_kv_weight.split(model._kv_size)
    for i, layer in enumerate(model.layers):
        attention, prefix = layer.self_attn, f"layers.{i}.self_attn."
        projection = attention.qkv_proj
        first = projection.tp_rank // projection.num_kv_head_replicas
        first *= attention.kv_size
        own = slice(first, first + attention.kv_size)
        for part, place in zip("kv", places[2 * i : 2 * i + 2], strict=True):
            place.copy_(named[f"{prefix}{part}_proj.weight"][own])
        model._k_norm_weights[i].copy_(named[f"{prefix}k_norm.weight"])
    model._hidden_norm_weight.copy_(named["hidden_norm.weight"])


def _probed(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the weight of each linear layer of the draft by the layer's path."""
    out = {"model.fc": tensors["fc.weight"]}
    prefixes = [
        name.removesuffix(_O_PROJ) for name in tensors if name.endswith(_O_PROJ)
    ]
    for prefix in prefixes:
        number = prefix.split(".")[1] if prefix.startswith("layers.") else "0"
        for path, parts in _LAYER.items():
            names = [f"{prefix}{part}.weight" for part in parts]
            out[f"model.layers.{number}.{path}"] = torch.cat(
                [tensors[n] for n in names]
            )
    return out


_O_PROJ = "self_attn.o_proj.weight"
_LAYER = {
    "self_attn.qkv_proj": [f"self_attn.{part}_proj" for part in "qkv"],
    "self_attn.o_proj": ["self_attn.o_proj"],
    "mlp.gate_up_proj": ["mlp.gate_proj", "mlp.up_proj"],
    "mlp.down_proj": ["mlp.down_proj"],
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
    modules, named = dict(draft.named_modules()), canonical(tensors)
    for path, weight in _probed(named).items():
        module = modules.get(path)
        if module is None:
            continue
        dtype = getattr(module, "params_dtype", torch.float32)
        parameter = next(module.parameters(), weight)  # gives the module's device
        probe = _ramp(weight.shape[1], dtype)
        got = module(probe.to(parameter.device))
        got = got[0] if isinstance(got, tuple) else got
        _compare(path, got, probe, weight)
    _verify_context(getattr(draft, "model", None), named)


def _verify_context(model: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Check the keys and values that a DFlash draft computes for its context."""
    if not hasattr(model, _BUILD):
        return
    count, heads, dim = len(model.layers), model._num_kv_heads, model._head_dim
    norm, eps = tensors["hidden_norm.weight"], model._rms_norm_eps
    dtype, device = model._fused_kv_weight.dtype, model._fused_kv_weight.device
    probe = _ramp(norm.numel(), dtype)
    keys, values = model._project_context_kv(probe.to(device), 1, count, heads, dim)
    normed = rms_norm(probe, norm.to(dtype), eps)
    for i in range(count):
        for part, got in (("k", keys[i]), ("v", values[i])):
            name = f"layers.{i}.self_attn.{part}_proj.weight"
            _compare(
                f"{name} of the context", got.flatten()[None], normed, tensors[name]
            )
        want = tensors[f"layers.{i}.self_attn.k_norm.weight"].to("cpu", dtype)
        if not torch.equal(model._k_norm_weights[i].cpu(), want):
            raise DraftRefused("install", f"k_norm of layer {i} is the old one.")


def _ramp(size: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a probe [1, size] that does not use the engine's random state."""
    return torch.linspace(-1, 1, size).to(dtype)[None]


def _compare(
    path: str, got: torch.Tensor, probe: torch.Tensor, weight: torch.Tensor
) -> None:
    dtype = probe.dtype
    expect = probe.float() @ weight.to("cpu", dtype).float().T
    scale = expect.abs().max().clamp(min=1e-6)
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    if not bool(((got.float().cpu() - expect).abs() <= tolerance * scale).all()):
        raise DraftRefused("install", f"layer {path} does not use the new weights.")
