"""Puts a staged draft into vLLM's draft model, between two steps.

Layer-wise reload (`model_loader/reload`) loads into the tensors that are there, so
CUDA-graph addresses stay valid, and runs `process_weights_after_loading`, so the CPU
backend's packed oneDNN weights are refreshed. On a GPU an unquantised draft computes
with its parameters as they were loaded: there loading in place is all there is to do,
copies on the current stream without memory of their own. Modules shared with the
target are taken out of the draft while it runs: reloading must never touch the target.
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
    """Checkpoint names of the draft's tensors that are the target's own modules."""
    theirs = {id(module) for module in target.modules()}
    found = set()
    for name, path in _SHARED.items():
        try:
            module = draft.get_submodule(path)
        except AttributeError:
            continue
        if id(module) in theirs:
            found.add(name)
    return frozenset(found)


def _computed(draft: nn.Module) -> list[str]:
    """Paths of modules that hold only what they computed themselves (RoPE caches)."""
    return [
        path
        for path, module in draft.named_modules()
        if path
        and any(True for _ in module.buffers(recurse=False))
        and not any(True for _ in module.parameters())
    ]


@contextmanager
def _without(draft: nn.Module, shared: frozenset[str]) -> Iterator[None]:
    """Take modules that are not loaded out of `draft`; put them back in any case.

    Those are the target's own, and those that no checkpoint has anything for.
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
    """True if the draft computes with its parameters just as they were loaded."""
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

    A pruned draft may come with another choice of tokens: its `d2t` is loaded with it.

    Args:
        tensors: Checkpoint names to full (unsharded) tensors.
        shared: Names that belong to the target and are not loaded.

    Raises:
        Exception: Whatever the loader raises; the draft may then be half loaded and
            the caller must install the last good one again.
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
            # Also after a failure: it puts every layer that was not loaded back.
            finalize_layerwise_reload(draft, model_config)


def overflow_check(
    checkpoint: Path, vllm_config: VllmConfig
) -> Callable[[Mapping[str, torch.Tensor]], None] | None:
    """Make the check that runs a published draft over a few rows, on the host.

    Args:
        checkpoint: Directory of the draft the server started with.

    Returns:
        It raises `DraftRefused` where logits are not finite, though all tensors are;
        None for a draft that nobody could train.
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
            raise DraftRefused("not_finite", "its logits overflow.")

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
    """Prove through the modules' own outputs that the new weights are what they use.

    Packed weights cannot be read back, so each linear layer is asked for its output
    on a fixed probe; the vocabulary mapping is read back. Only for an unsharded draft
    (tensor parallel size 1).

    Raises:
        DraftRefused: A layer does not compute with the new weights.
    """
    mapping = getattr(draft, "draft_id_to_target_id", None)
    if mapping is not None and "d2t" in tensors:
        want = tensors["d2t"].to("cpu", mapping.dtype)
        if not torch.equal(mapping.cpu(), want):
            raise DraftRefused("install", "the draft kept another vocabulary (d2t).")
    modules = dict(draft.named_modules())
    for path, names in _PROBED.items():
        module = modules.get(path)
        want = tensors["fc.weight"].float() if not names else _expected(tensors, names)
        if module is None or want.numel() == 0:
            continue
        dtype = getattr(module, "params_dtype", torch.float32)
        # A ramp, the same for everybody: no random state of the engine is touched.
        probe = torch.linspace(-1, 1, want.shape[1]).to(dtype)[None]
        weight = next(module.parameters(), probe)  # the probe goes to where it is
        got = module(probe.to(weight.device))
        got = (got[0] if isinstance(got, tuple) else got).float().cpu()
        expect = probe.float() @ want.to(dtype).float().T
        scale = expect.abs().max().clamp(min=1e-6)
        tolerance = 1e-4 if dtype == torch.float32 else 2e-2
        if not bool(((got - expect).abs() <= tolerance * scale).all()):
            raise DraftRefused("install", f"layer {path} kept other weights.")
