"""Run vLLM's own DFlashQwen3ForCausalLM on given rows; only attention is ours.

    python tests/draft/vllm_dflash_oracle.py TARGET DRAFT OTHER IN OUT

IN: features fp32 [n, A*H] and positions int64 [n] of the context, slots int64 [B] and
places int64 [B] of one block, embed [V, H]. OUT: logits [B, V] of DRAFT (`first`), of
OTHER in another model (`other`), and of OTHER after our installation into the
model of DRAFT (`installed`). Prints a line for each mutant that `verify_installed`
accepts.
"""

from __future__ import annotations

import os
import sys
import tempfile
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from safetensors.torch import load_file, save_file


def _attend(self, query, key, value, output_shape=None):  # noqa: ANN001, ANN202
    """Plain attention to the stored context and the whole block."""
    del output_shape
    n, group = query.shape[0], self.num_heads // self.num_kv_heads
    stored_k, stored_v = self.stored
    q = query.view(n, self.num_heads, -1).transpose(0, 1)
    k = torch.cat([stored_k, key.view(n, self.num_kv_heads, -1)]).transpose(0, 1)
    v = torch.cat([stored_v, value.view(n, self.num_kv_heads, -1)]).transpose(0, 1)
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    out = F.scaled_dot_product_attention(q, k, v)
    return out.transpose(0, 1).reshape(n, -1)


class _Store:
    """The place of an attention backend, which stores keys and values."""

    def do_kv_cache_update(self, layer, key, value, cache, slots) -> None:  # noqa: ANN001
        layer.stored = (key.clone(), value.clone())


def main(target: str, draft: str, other: str, inputs: str, out: str) -> None:
    """Load and run."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.model_loader.reload.layerwise import (
        record_metadata_for_reloading,
    )
    from vllm.model_executor.model_loader.utils import process_weights_after_loading
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3ForCausalLM

    from vllm_tide.engine.install import install, verify_installed
    from vllm_tide.engine.staged_draft import DraftRefused

    config = EngineArgs(
        model=target,
        dtype="float32",
        enforce_eager=True,
        max_model_len=128,
        skip_tokenizer_init=True,
        speculative_config={
            "method": "dflash",
            "model": draft,
            "num_speculative_tokens": 4,
        },
    ).create_engine_config()
    Attention.forward = _attend
    torch.set_default_dtype(torch.float32)
    data = load_file(inputs)
    tensors = {name: load_file(f"{name}/model.safetensors") for name in (draft, other)}

    def build(folder: str) -> Any:
        model: Any = DFlashQwen3ForCausalLM(vllm_config=config).float()
        record_metadata_for_reloading(model)  # as vLLM's loader does
        model.load_weights(tensors[folder].items())
        process_weights_after_loading(model, config.model_config, torch.device("cpu"))
        model.model.embed_tokens.weight.data.copy_(data["embed"])
        for layer in model.model.layers:
            layer.self_attn.attn.impl = _Store()
        return model

    def logits(model: Any) -> torch.Tensor:
        context = model.combine_hidden_states(data["features"])
        slots = torch.arange(len(context))
        model.precompute_and_store_context_kv(context, data["positions"], slots)
        return model.compute_logits(model(data["slots"], data["places"])).contiguous()

    with set_current_vllm_config(config), torch.no_grad():
        init_distributed_environment(1, 0, f"file://{tempfile.mktemp()}", 0, "gloo")
        initialize_model_parallel(1, 1)
        model = build(draft)
        results = {"first": logits(model)}
        config.compilation_config.static_forward_context.clear()
        results["other"] = logits(build(other))
        inner = model.model
        before = inner._fused_kv_weight, inner._k_norm_weights.clone()
        old, address = before[0].clone(), before[0].data_ptr()
        install(model, config, tensors[other], frozenset({"embed_tokens.weight"}))
        results["installed"] = logits(model)
        assert inner._fused_kv_weight.data_ptr() == address, "not replaced in place"
        verify_installed(model, tensors[other])
        new = inner._fused_kv_weight.clone()
        by_part = new.view(len(inner.layers), 2, -1, new.shape[1])
        mutants = {
            "stale": old,
            "keys and values swapped": by_part.flip(1).reshape(new.shape),
            "layers swapped": by_part.flip(0).reshape(new.shape),
        }
        for name, mutant in mutants.items():
            inner._fused_kv_weight.copy_(mutant)
            try:
                verify_installed(model, tensors[other])
                print(f"accepted: {name}")
            except DraftRefused:
                pass
        inner._fused_kv_weight.copy_(new)
        inner._k_norm_weights.copy_(before[1])
        try:
            verify_installed(model, tensors[other])
            print("accepted: stale norms")
        except DraftRefused:
            pass
    save_file(results, out)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
