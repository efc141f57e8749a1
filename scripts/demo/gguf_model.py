"""Conversion of SmolLM2-135M-Instruct from GGUF to Hugging Face's format.

`fetch_model.py` uses it. The package `gguf` is needed and not part of the environment.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

# GGUF token type of special tokens.
SPECIAL = 3
HEADS, KV_HEADS = 9, 3
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": 64,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
TOKEN_IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<|im_start|>",
    "eos_token": "<|im_end|>",
    "pad_token": "<|im_end|>",
    "unk_token": "<|endoftext|>",
    "model_max_length": 8192,
    "clean_up_tokenization_spaces": False,
}
# Layer parts: GGUF's names to Transformers' names.
PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def unpermute(weight: Any, num_heads: int) -> Any:
    """Undo llama.cpp's row order, which has the two rows of a RoPE pair adjacent."""
    pairs = weight.reshape(num_heads, -1, 2, weight.shape[1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def tensor_name(name: str) -> str:
    """Return the Transformers name of a GGUF tensor."""
    if name in ("token_embd.weight", "output_norm.weight"):
        return f"model.{'norm' if 'norm' in name else 'embed_tokens'}.weight"
    _, layer, part, _ = name.split(".")
    return f"model.layers.{layer}.{PARTS[part]}.weight"


def convert(source: Path, folder: Path) -> None:
    """Write bfloat16 weights, tokenizer and configurations of a GGUF file."""
    from gguf import GGUFReader
    from gguf.quants import dequantize

    reader = GGUFReader(source)
    tensors = {}
    for item in reader.tensors:
        weight = dequantize(item.data, item.tensor_type).astype(np.float32)
        if ".attn_q." in item.name or ".attn_k." in item.name:
            heads = HEADS if ".attn_q." in item.name else KV_HEADS
            weight = np.ascontiguousarray(unpermute(weight, heads))
        tensors[tensor_name(item.name)] = torch.from_numpy(weight).bfloat16()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    fields = {
        name: reader.fields[f"tokenizer.{name}"].contents()
        for name in ("ggml.tokens", "ggml.token_type", "ggml.merges", "chat_template")
    }
    save_tokenizer(fields, folder / "tokenizer.json")
    template = {"chat_template": fields["chat_template"]}
    for name, content in (
        ("config.json", CONFIG | TOKEN_IDS),
        ("generation_config.json", TOKEN_IDS),
        ("tokenizer_config.json", TOKENIZER_CONFIG | template),
    ):
        (folder / name).write_text(json.dumps(content, indent=1) + "\n")


def save_tokenizer(fields: dict[str, Any], path: Path) -> None:
    """Write the byte-level BPE of a GGUF file's `smollm` tokenizer."""
    tokens = fields["ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["ggml.merges"]]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(tokens, fields["ggml.token_type"], strict=True)
    special = [token for token, kind in kinds if kind == SPECIAL]
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special]
    )
    tokenizer.save(str(path))
