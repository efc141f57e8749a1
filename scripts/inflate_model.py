r"""Write a model that computes exactly the same function at a higher cost.

There are two methods, which can be combined:

* ``--intermediate-size``: pad the MLP.  The new rows of ``gate_proj`` and
  ``up_proj`` repeat the existing ones, so that a step multiplies normal numbers
  instead of zeros, with normal power draw; the new columns of ``down_proj`` are
  zero.  This adds weight bytes and arithmetic; KV cache per token is unchanged.
* ``--extra-layers``: append copies of the last layer with ``o_proj`` and
  ``down_proj`` set to zero, so each adds zero to the residual stream.  This adds
  weight bytes, arithmetic, and KV cache bytes per token.

Layers are appended at the end, never inserted: EAGLE-3 identifies its aux
features by layer indices, which must not change.  The draft's config must list
its ids (``eagle_aux_hidden_state_layer_ids``), because vLLM's default ids depend
on the number of layers.

A report of a run on such a model must state the inflation.
Example::

    python scripts/inflate_model.py demo/target /tmp/target-90m \
        --intermediate-size 16384
"""

import argparse
import json
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".gguf"}
LAYER_NAME = re.compile(r"^(.*\blayers\.)(\d+)(\..+)$")


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Read every tensor of a model folder, sharded or not."""
    tensors: dict[str, torch.Tensor] = {}
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} has no .safetensors file")
    for path in files:
        with safe_open(path, framework="pt") as handle:
            for name in handle.keys():  # noqa: SIM118 - no mapping, has only keys()
                tensors[name] = handle.get_tensor(name)
    return tensors


def pad_mlp(
    tensors: Mapping[str, torch.Tensor], intermediate_size: int
) -> dict[str, torch.Tensor]:
    """Return the tensors with every MLP widened to ``intermediate_size``."""
    out = dict(tensors)
    for name, tensor in tensors.items():
        if re.search(r"\.mlp\.(gate_proj|up_proj)\.(weight|bias)$", name):
            rows = torch.arange(intermediate_size) % tensor.shape[0]
            out[name] = tensor[rows]
        elif name.endswith(".mlp.down_proj.weight"):
            padding = tensor.new_zeros(
                tensor.shape[0], intermediate_size - tensor.shape[1]
            )
            out[name] = torch.cat([tensor, padding], dim=1)
    return out


def append_identity_layers(
    tensors: Mapping[str, torch.Tensor], num_layers: int, extra: int
) -> dict[str, torch.Tensor]:
    """Return the tensors with ``extra`` layers that add zero to the stream."""
    out = dict(tensors)
    for name, tensor in tensors.items():
        match = LAYER_NAME.match(name)
        if match is None or int(match[2]) != num_layers - 1:
            continue
        writes_stream = re.search(r"\.(o_proj|down_proj)\.(weight|bias)$", name)
        for i in range(extra):
            copy = torch.zeros_like(tensor) if writes_stream else tensor.clone()
            out[f"{match[1]}{num_layers + i}{match[3]}"] = copy
    return out


def inflate_config(
    config: Mapping[str, Any], intermediate_size: int | None, extra: int
) -> dict[str, Any]:
    """Return the config of the inflated model."""
    out = dict(config)
    if intermediate_size is not None:
        out["intermediate_size"] = intermediate_size
    out["num_hidden_layers"] = config["num_hidden_layers"] + extra
    if config.get("layer_types"):
        types = list(config["layer_types"])
        out["layer_types"] = types + [types[-1]] * extra
    return out


def kv_bytes_per_token(config: Mapping[str, Any], element_bytes: int = 2) -> int:
    """Return the KV cache bytes of one token, at ``element_bytes`` per element."""
    heads = config.get("num_key_value_heads", config["num_attention_heads"])
    head_dim = config.get("head_dim") or (
        config["hidden_size"] // config["num_attention_heads"]
    )
    return int(2 * config["num_hidden_layers"] * heads * head_dim * element_bytes)


def inflate(
    source: Path, destination: Path, intermediate_size: int | None, extra: int
) -> dict[str, Any]:
    """Write the inflated model; return counts before and after.

    Args:
        source: Model folder with ``config.json`` and safetensors weights.
        destination: Folder to write; must not be ``source``.
        intermediate_size: New MLP width, at least the current one; None: unchanged.
        extra: Identity layers to append.

    Returns:
        Parameter counts, their ratio, and KV bytes per token.

    Raises:
        ValueError: The sizes are below the current ones, or the folders are equal.
    """
    config = json.loads((source / "config.json").read_text())
    if source.resolve() == destination.resolve():
        raise ValueError("DST is SRC: the original weights would be overwritten")
    if intermediate_size is not None and intermediate_size < (
        old := config["intermediate_size"]
    ):
        raise ValueError(f"--intermediate-size {intermediate_size} is below {old}")
    if extra < 0:
        raise ValueError(f"--extra-layers {extra} is negative")
    tensors = read_tensors(source)
    before = sum(t.numel() for t in tensors.values())
    # Append identity layers first, so that they are padded like the others.
    tensors = append_identity_layers(tensors, config["num_hidden_layers"], extra)
    if intermediate_size is not None:
        tensors = pad_mlp(tensors, intermediate_size)
    after = sum(t.numel() for t in tensors.values())
    new_config = inflate_config(config, intermediate_size, extra)
    destination.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        skipped = path.suffix in WEIGHT_SUFFIXES or path.name.endswith(".index.json")
        if path.is_file() and not skipped:
            shutil.copy2(path, destination / path.name)
    weights = destination / "model.safetensors"
    save_file(tensors, weights, metadata={"format": "pt"})
    weights.chmod(0o644)  # safetensors writes mode 0600
    both = config, new_config
    report = {
        "source": str(source),
        "intermediate_size": [of["intermediate_size"] for of in both],
        "num_hidden_layers": [of["num_hidden_layers"] for of in both],
        "parameters": [before, after],
        "parameter_ratio": round(after / before, 2),
        "kv_bytes_per_token_16bit": [kv_bytes_per_token(of) for of in both],
    }
    (destination / "config.json").write_text(json.dumps(new_config, indent=2))
    (destination / "inflated.json").write_text(json.dumps(report, indent=1))
    return report


@torch.no_grad()
def logits_of_both(
    source: Path, destination: Path, num_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both models' fp32 logits [2, num_tokens, V] on the same random tokens."""
    from transformers import AutoModelForCausalLM

    logits = []
    for folder in (source, destination):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        generator = torch.Generator().manual_seed(0)
        size = (2, num_tokens)
        ids = torch.randint(model.config.vocab_size, size, generator=generator)
        logits.append(model(ids, use_cache=False).logits)
    return logits[0], logits[1]


def compare(before: torch.Tensor, after: torch.Tensor) -> tuple[float, int]:
    """Return the difference of two sets of logits [..., V] beyond rounding.

    The rounding error depends on the CPU, in proportion to the logits.

    Returns:
        Largest difference as a share of the largest logit, and the number of positions
        where the most likely token changed and its logit was lower by more than
        that difference.
    """
    largest = float((before - after).abs().max())
    scale = float(before.abs().max())
    top = after.argmax(-1, keepdim=True)
    margin = before.amax(-1) - before.gather(-1, top).squeeze(-1)
    return largest / scale if scale else largest, int((margin > largest).sum())


def main() -> int:
    """Inflate, print the counts, and check equality."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("source", type=Path, metavar="SRC")
    parser.add_argument("destination", type=Path, metavar="DST")
    parser.add_argument("--intermediate-size", type=int)
    parser.add_argument("--extra-layers", type=int, default=0)
    parser.add_argument("--proof-tokens", type=int, default=128)
    parser.add_argument(
        "--tolerance",
        type=float,
        default=1e-4,
        help="largest fp32 logit difference allowed, as a share of the largest logit",
    )
    args = parser.parse_args()
    try:
        report = inflate(
            args.source, args.destination, args.intermediate_size, args.extra_layers
        )
    except ValueError as error:
        parser.error(str(error))
    for key, value in report.items():
        sys.stdout.write(f"{key}: {value}\n")
    logits = logits_of_both(args.source, args.destination, args.proof_tokens)
    relative, flips = compare(*logits)
    equal = relative <= args.tolerance and not flips
    verdict = "identical" if relative == 0.0 else "rounding only"
    sys.stdout.write(
        f"fp32 logits differ by {relative:g} of the largest, the most likely token at "
        f"{flips} positions ({verdict if equal else 'NOT EQUAL'})\n"
    )
    if not equal:
        sys.stderr.write(
            f"inflate_model.py: the inflated model is not the same function within "
            f"--tolerance {args.tolerance:g}: run again with ATEN_CPU_CAPABILITY=avx2 "
            "ONEDNN_MAX_CPU_ISA=AVX2, and report the CPU's name if that succeeds.\n"
        )
    return int(not equal)


if __name__ == "__main__":
    sys.exit(main())
