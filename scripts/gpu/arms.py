"""Control arms at real widths: the demo models padded to a large model's shapes."""

from __future__ import annotations

import gzip
import json
import sys
import tempfile
from pathlib import Path

from inprocess import Engine
from place import DEMO, ROOT, Place
from safetensors.torch import load_file, save_file
from torch.nn.functional import pad

K = 5
BATCHES, SECONDS = (8, 64), 4.0
SERVING_S = len(BATCHES) * 1.25 * SECONDS
"""Seconds of a step without the start of its engine."""
GRAPHS = {"max_cudagraph_capture_size": 1024}
LIMITS = {"max_num_seqs": 128, "max_num_batched_tokens": 8192, "max_model_len": 2048}
_INPUT = ("embed_tokens", "q_proj", "k_proj", "v_proj", "gate_proj",
          "up_proj", "lm_head", "fc")  # fmt: skip
_OUTPUT = ("o_proj", "down_proj", "fc")


def widen(source: Path, to: Path, new: int) -> None:
    """Write a demo model with zero-padded hidden states, which computes the same."""
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    old, tensors = config["hidden_size"], load_file(source / "model.safetensors")
    for name, tensor in tensors.items():
        part = name.split(".")[-2] if "." in name else ""
        if part.endswith("norm"):  # the mean is over more elements
            tensor = pad(tensor * (old / new) ** 0.5, (0, new - old))
        if part in _INPUT:  # for one to three concatenated hidden states
            tensor = pad(tensor.unflatten(1, (-1, old)), (0, new - old)).flatten(1)
        if part in _OUTPUT:
            tensor = pad(tensor, (0, 0, 0, new - old))
        tensors[name] = tensor.contiguous()
    config["rms_norm_eps"] *= old / new
    config |= {k: new for k in ("hidden_size", "target_hidden_size") if k in config}
    to.mkdir(parents=True, exist_ok=True)
    for path in source.glob("*.json"):
        (to / path.name).write_bytes(path.read_bytes())
    (to / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})


def wide(place: Place) -> tuple[Path, Path]:
    """Return target and draft at real widths, created once per machine."""
    sys.path.insert(0, str(ROOT / "scripts"))
    from inflate_model import inflate

    hidden, mlp, layers = (1024, 480, 0) if place.dry else (4096, 14336, 10)
    root = Path(tempfile.gettempdir()) / f"tide-wide-{hidden}"
    if not (root / "done").exists():
        widen(DEMO / "draft", root / "draft", hidden)
        widen(DEMO / "target", root / "narrow", hidden)
        inflate(root / "narrow", root / "target", mlp, layers)
        (root / "done").touch()
    return root / "target", root / "draft"


def prompts(domain: str = "python") -> list[list[int]]:
    """Return prompts of the demo as token ids."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(DEMO / "target")
    with gzip.open(DEMO / "prompts" / f"{domain}.jsonl.gz", "rt") as lines:
        return [tokenizer.encode(json.loads(line)["prompt"])[:512] for line in lines]


def arm(place: Place) -> None:
    """Measure the policy in the step's name at some batch sizes."""
    name, tide = place.data["stage"], None
    if name.startswith("adaspec"):
        tide = {"capture": {"enabled": False}, "control": {"policy": "adaspec"}}
    engine = Engine(
        place, wide(place), 3 if name == "static3" else K, tide, **LIMITS,
        compilation_config=GRAPHS, gpu_memory_utilization=0.8,
        adaptive={"enable_adaptive_verification": name.endswith("adaptive")},
    )  # fmt: skip
    token_ids, seconds = prompts(), 2 if place.dry else SECONDS
    place.part("start_s", lambda: engine.start_s)
    for batch in (2,) if place.dry else BATCHES:
        engine.serve(token_ids, batch, seconds / 4)  # warm-up
        run = lambda b=batch: engine.serve(token_ids, b, seconds)  # noqa: E731
        place.part(f"batch {batch}", run)
