"""Served models of a run: unchanged, or inflated to a size."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.harness.common import BenchError

CHECKOUT = Path(__file__).parents[3]
DEMO = CHECKOUT / "scripts" / "demo"
INFLATE = CHECKOUT / "scripts" / "inflate_model.py"
_UNITS = {"k": 1e3, "m": 1e6, "b": 1e9}
WIDTH_STEP = 64


@dataclass(frozen=True, slots=True)
class Target:
    """A model to serve."""

    name: str  # as it appears in the cells
    path: Path  # checkpoint folder
    facts: dict[str, Any]  # for the environment section of the report


def parse_size(text: str) -> float:
    """Return the number of parameters of `90m` or `1.5b`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmb])", text.lower())
    if not match:
        raise BenchError(f"--model-sizes: {text!r} is not a size such as 90m")
    return float(match[1]) * _UNITS[match[2]]


def num_parameters(folder: Path) -> int:
    """Count the parameters from the headers of the safetensors files."""
    total = 0
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        for name, entry in header.items():
            if name != "__metadata__":
                total += math.prod(entry["shape"])
    return total


def mlp_width(config: dict[str, Any], own: int, requested: float) -> int:
    """Return the MLP width that grows a model from `own` to `requested` parameters."""
    per_width = 3 * config["hidden_size"] * config["num_hidden_layers"]
    width: float = config["intermediate_size"] + (requested - own) / per_width
    return max(WIDTH_STEP, round(width / WIDTH_STEP) * WIDTH_STEP)


def read_config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BenchError(f"{folder} is not a model folder ({error})") from None
    if not isinstance(config, dict):
        raise BenchError(f"{folder}/config.json is not a JSON object")
    return config


def _facts(path: Path) -> dict[str, Any]:
    inflated = path / "inflated.json"
    config = read_config(path)
    facts = {
        "parameters": num_parameters(path),
        "num_hidden_layers": config.get("num_hidden_layers"),
        "intermediate_size": config.get("intermediate_size"),
    }
    if inflated.exists():
        report = json.loads(inflated.read_text(encoding="utf-8"))
        facts["inflated"] = {k: v for k, v in report.items() if k != "source"}
    return facts


def targets_of(
    path: Path, sizes: Sequence[str], folder: Path, log: Callable[[str], None]
) -> list[Target]:
    """Return the models to serve; inflate `path` to the larger ones of `sizes`."""
    own = num_parameters(path)
    config = read_config(path)
    if own == 0:
        raise BenchError(f"{path} has no .safetensors file")
    if not sizes:
        return [Target(path.name, path, _facts(path))]
    targets = []
    for size in sizes:
        requested = parse_size(size)
        if requested <= 2 * own:  # about the size of `path`: serve it unchanged
            targets.append(Target(size, path, _facts(path)))
            continue
        width = mlp_width(config, own, requested)
        inflated = folder / f"{path.name}-{own}-{width}"
        if not (inflated / "inflated.json").exists():
            log(f"inflating {path.name} to {size} (MLP width {width})")
            _inflate(path, inflated, width)
        targets.append(Target(size, inflated, _facts(inflated)))
    return targets


def _inflate(source: Path, destination: Path, width: int) -> None:
    command = [sys.executable, str(INFLATE), str(source), str(destination)]
    command += ["--intermediate-size", str(width)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:]
        raise BenchError(f"{source} cannot be inflated: {''.join(last)}")


def kv_cache_bytes(
    config: dict[str, Any], num_requests: int, num_tokens: int, element_bytes: int
) -> int:
    """Return the KV cache size for the largest batch, with a margin."""
    heads = config.get("num_key_value_heads", config["num_attention_heads"])
    size = config.get("head_dim") or (
        config["hidden_size"] // config["num_attention_heads"]
    )
    # One extra layer for the draft, two extra blocks of 128 tokens per request.
    per_token: int = (
        2 * (config["num_hidden_layers"] + 1) * heads * size * element_bytes
    )
    return max(128 << 20, per_token * num_requests * (num_tokens + 256))
