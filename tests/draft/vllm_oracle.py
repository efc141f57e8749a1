"""Run vLLM's own Eagle3LlamaForCausalLM on given rows; only attention is ours.

    python tests/draft/vllm_oracle.py TARGET DRAFT INPUTS.safetensors OUT.safetensors

INPUTS: tokens int64 [n] (already shifted), positions int64 [n], features fp32 [n, A*H].
OUT: logits fp32 [n, V] over target ids, and the fed-back hidden state [n, H].
"""

from __future__ import annotations

import os
import sys
import tempfile

import torch
import torch.nn.functional as F  # noqa: N812
from safetensors.torch import load_file, save_file


def _attend(self, query, key, value, output_shape=None):  # noqa: ANN001, ANN202
    """Plain causal attention in place of vLLM's paged kernels."""
    del output_shape
    n, group = query.shape[0], self.num_heads // self.num_kv_heads
    q = query.view(n, self.num_heads, -1).transpose(0, 1)
    k = key.view(n, self.num_kv_heads, -1).transpose(0, 1)
    v = value.view(n, self.num_kv_heads, -1).transpose(0, 1)
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return out.transpose(0, 1).reshape(n, -1)


def main(target: str, draft: str, inputs: str, out: str) -> None:
    """Load and run."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.model_loader.utils import process_weights_after_loading
    from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM

    config = EngineArgs(
        model=target,
        dtype="float32",
        enforce_eager=True,
        max_model_len=128,
        skip_tokenizer_init=True,
        speculative_config={
            "method": "eagle3",
            "model": draft,
            "num_speculative_tokens": 2,
        },
    ).create_engine_config()
    Attention.forward = _attend
    torch.set_default_dtype(torch.float32)
    rendezvous = tempfile.mktemp()
    with set_current_vllm_config(config), torch.no_grad():
        init_distributed_environment(1, 0, f"file://{rendezvous}", 0, "gloo")
        initialize_model_parallel(1, 1)
        model = Eagle3LlamaForCausalLM(vllm_config=config).float()
        model.load_weights(load_file(f"{draft}/model.safetensors").items())
        process_weights_after_loading(model, config.model_config, torch.device("cpu"))
        data = load_file(inputs)
        if not model.has_own_embed_tokens:
            model.model.embed_tokens.weight.data.copy_(data["embed"])
        hidden = model.combine_hidden_states(data["features"])
        normed, carried = model(data["tokens"], data["positions"], hidden)
        logits = model.compute_logits(normed)
    save_file({"logits": logits.contiguous(), "hidden": carried.contiguous()}, out)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
