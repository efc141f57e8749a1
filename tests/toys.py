"""Tiny models made from a config: no download, seconds to load, real architectures."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

HIDDEN, LAYERS, VOCAB, HEADS = 64, 4, 320, 2
AUX_LAYERS = (1, 2, 3)


def make_tokenizer(path: Path) -> None:
    """Byte-level tokenizer without merges: token i < 256 is a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: i for i, char in enumerate(alphabet)}
    vocab |= {f"<unused{i}>": i for i in range(len(vocab), VOCAB - 1)}
    vocab["<eos>"] = VOCAB - 1
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    fast.save_pretrained(path)


def make_target(path: Path, seed: int = 0) -> Path:
    """A random Llama with varied greedy text (weights larger than usual)."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        vocab_size=VOCAB,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=VOCAB - 1,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(parameter, std=0.12)
    model.to(torch.bfloat16).save_pretrained(path)
    make_tokenizer(path)
    return path


def make_draft(path: Path, target: Path, seed: int = 1, **overrides: object) -> Path:
    """A random EAGLE-3 draft in the Hugging Face form."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * 0.05).to(torch.bfloat16)

    config = json.loads((target / "config.json").read_text())
    config |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": VOCAB,
        "eagle_aux_hidden_state_layer_ids": list(AUX_LAYERS),
    }
    config |= overrides
    head_dim = HIDDEN // HEADS
    width = HEADS * head_dim
    tensors = {
        "fc.weight": random(HIDDEN, len(AUX_LAYERS) * HIDDEN),
        "norm.weight": torch.ones(HIDDEN, dtype=torch.bfloat16),
        "lm_head.weight": random(VOCAB, HIDDEN) * 8,
    }
    for name in ("q", "k", "v"):
        tensors[f"midlayer.self_attn.{name}_proj.weight"] = random(width, 2 * HIDDEN)
    tensors["midlayer.self_attn.o_proj.weight"] = random(HIDDEN, width)
    for name in ("gate", "up"):
        tensors[f"midlayer.mlp.{name}_proj.weight"] = random(128, HIDDEN)
    tensors["midlayer.mlp.down_proj.weight"] = random(HIDDEN, 128)
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        tensors[f"midlayer.{name}.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors")
    return path
