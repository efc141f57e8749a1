"""A small target and a draft that fits it, as files: no torch, milliseconds."""

import json

import numpy as np
from safetensors.numpy import save_file

from vllm_tide.config import parse_tide
from vllm_tide.doctor.run import Subject, examine

HIDDEN, LAYERS, VOCAB = 64, 4, 320

TARGET = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "vocab_size": VOCAB,
    "torch_dtype": "bfloat16",
}
DRAFT = TARGET | {
    "architectures": ["LlamaForCausalLMEagle3"],
    "num_hidden_layers": 1,
    "draft_vocab_size": VOCAB,
    "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
}


def write_model(folder, config):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def draft_tensors():
    shapes = {
        "fc.weight": (HIDDEN, 3 * HIDDEN),
        "norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCAB, HIDDEN),
        "midlayer.self_attn.o_proj.weight": (HIDDEN, HIDDEN),
        "midlayer.mlp.down_proj.weight": (HIDDEN, 128),
    }
    for name in ("q", "k", "v"):
        shapes[f"midlayer.self_attn.{name}_proj.weight"] = (HIDDEN, 2 * HIDDEN)
    for name in ("gate", "up"):
        shapes[f"midlayer.mlp.{name}_proj.weight"] = (128, HIDDEN)
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        shapes[f"midlayer.{name}.weight"] = (HIDDEN,)
    return {name: np.zeros(shape, np.float16) for name, shape in shapes.items()}


def write_draft(folder, tensors=None, **overrides):
    write_model(folder, DRAFT | overrides)
    save_file(tensors or draft_tensors(), folder / "model.safetensors")
    return folder


def make_subject(tmp_path, section=None, *, draft=None, model=None, **fields):
    """Return a subject with a `tide` section, as if read from a file."""
    speculative = {"tide": section or {}}
    if draft is not None:
        speculative["model"] = str(draft)
    return Subject(
        run_dir=tmp_path / "run",
        source="tide.json",
        speculative=speculative,
        tide=parse_tide(section or {}),
        model=str(model) if model is not None else None,
        **fields,
    )


def examined(subject, check):
    """Return the one finding of one check."""
    (finding,) = examine(subject, (check,))
    return finding
