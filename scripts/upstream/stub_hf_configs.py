"""Write a Hugging Face cache with configs and a byte tokenizer, but no weights.

vLLM's CPU tests build model configs of some public models. With this cache and
HF_HUB_OFFLINE=1 they run without a network.

usage: stub_hf_configs.py HF_HOME
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

OPT: dict[str, Any] = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "activation_function": "relu",
    "bos_token_id": 2,
    "do_layer_norm_before": True,
    "eos_token_id": 2,
    "ffn_dim": 3072,
    "hidden_size": 768,
    "max_position_embeddings": 2048,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "pad_token_id": 1,
    "torch_dtype": "float16",
    "vocab_size": 50272,
    "word_embed_proj_dim": 768,
}
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "rope_theta": 500000.0,
}
DRAFT = LLAMA | {"num_hidden_layers": 1, "max_position_embeddings": 2048}
EAGLE3 = DRAFT | {
    "architectures": ["LlamaForCausalLMEagle3"],
    "draft_vocab_size": 32000,
}
# Model name, config, whether the tests need its tokenizer.
MODELS = (
    ("facebook/opt-125m", OPT, True),
    ("meta-llama/Llama-3.1-8B-Instruct", LLAMA, True),
    (
        "meta-llama/Meta-Llama-3-8B-Instruct",
        LLAMA | {"max_position_embeddings": 8192},
        True,
    ),
    ("yuhuili/EAGLE-LLaMA3.1-Instruct-8B", DRAFT, False),
    ("yuhuili/EAGLE-LLaMA3-Instruct-8B", DRAFT, False),
    ("yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", EAGLE3, False),
)


def make_tokenizer() -> str:
    """Return tokenizer.json of a byte-level tokenizer without merges."""
    vocab = {
        char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    }
    vocab["</s>"] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer.to_str()


def main() -> None:
    """Write the cache."""
    hub = Path(sys.argv[1]) / "hub"
    tokenizer = make_tokenizer()
    for name, config, has_tokenizer in MODELS:
        folder = hub / f"models--{name.replace('/', '--')}"
        revision = "0" * 40
        snapshot = folder / "snapshots" / revision
        snapshot.mkdir(parents=True, exist_ok=True)
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / "main").write_text(revision)
        (snapshot / "config.json").write_text(json.dumps(config))
        if has_tokenizer:
            (snapshot / "tokenizer.json").write_text(tokenizer)
            (snapshot / "tokenizer_config.json").write_text(
                json.dumps(
                    {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
                )
            )


if __name__ == "__main__":
    main()
