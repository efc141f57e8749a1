"""Control at real widths: the demo's function, padded to a large model's shapes."""

from __future__ import annotations

import gzip
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from inprocess import Engine
from place import DEMO, ROOT, Place
from safetensors.torch import load_file, save_file
from torch.nn.functional import pad

K, NEAR = 5, 0.05
GRAPHS = {"max_cudagraph_capture_size": 1024}
LIMITS = {"max_num_seqs": 128, "max_num_batched_tokens": 8192, "max_model_len": 2048}
ARMS = ("static3", "vllm_adaptive", "adaspec_adaptive")
_INPUT = ("embed_tokens", "q_proj", "k_proj", "v_proj", "gate_proj",
          "up_proj", "lm_head", "fc")  # fmt: skip
_OUTPUT = ("o_proj", "down_proj", "fc")


def widen(source: Path, to: Path, new: int) -> None:
    """Write a demo model whose hidden states have zeros behind: the same function."""
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    old, tensors = config["hidden_size"], load_file(source / "model.safetensors")
    for name, tensor in tensors.items():
        part = name.split(".")[-2] if "." in name else ""
        if part.endswith("norm"):  # the mean is over more now
            tensor = pad(tensor * (old / new) ** 0.5, (0, new - old))
        if part in _INPUT:  # of one, two or three hidden states side by side
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
    """Target and draft at real widths, made once on a machine."""
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
    """Prompts of the demo, as tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(DEMO / "target")
    with gzip.open(DEMO / "prompts" / f"{domain}.jsonl.gz", "rt") as lines:
        return [tokenizer.encode(json.loads(line)["prompt"])[:512] for line in lines]


def arm(place: Place) -> None:
    """The policy that the step is named after, at three batch sizes."""
    name, tide = place.data["stage"], None
    if name.startswith("adaspec"):
        tide = {"capture": {"enabled": False}, "control": {"policy": "adaspec"}}
    engine = Engine(
        place, wide(place), 3 if name == "static3" else K, tide, **LIMITS,
        compilation_config=GRAPHS, gpu_memory_utilization=0.8,
        adaptive={"enable_adaptive_verification": name.endswith("adaptive")},
    )  # fmt: skip
    given, seconds = prompts(), 2 if place.dry else 12
    place.part("start_s", lambda: engine.start_s)
    place.part("text", lambda: _text(engine, given[: 4 if place.dry else 16]))
    for batch in (2,) if place.dry else (8, 64, 128):
        engine.serve(given, batch, seconds / 4)  # warms up, and learns
        place.part(f"batch {batch}", lambda b=batch: engine.serve(given, b, seconds))


def identity(place: Place) -> None:
    """Greedy text of all arms: where two differ first, the tokens were nearly tied."""
    files = [place.file.with_name(f"{name}.json") for name in ARMS]
    texts = [
        json.loads(file.read_text(encoding="utf-8"))["parts"].get("text")
        for file in files
        if file.exists()
    ]
    assert len(texts) == len(ARMS) and all(texts), "not all arms have a text yet"
    found = []
    for name, text in zip(ARMS, texts, strict=True):
        for i, (ours, theirs) in enumerate(zip(texts[0], text, strict=True)):
            both = zip(ours[0], theirs[0], ours[1], theirs[1], strict=True)
            gap = next((min(c, d) for a, b, c, d in both if a != b), None)
            found += [] if gap is None else [[name, i, gap]]
    place.part("differences", lambda: found)
    worst = max((gap for *_, gap in found), default=0.0)
    place.judge(worst < NEAR, f"other text than {ARMS[0]}'s, no near tie: {found}")


def _text(engine: Engine, given: list[list[int]]) -> list[Any]:
    """Greedy tokens of each prompt, and how far the best is above the second."""
    names, ended = [engine.add(prompt, 64, logprobs=2) for prompt in given], {}
    while engine.engine.has_unfinished_requests():
        ended |= {output.request_id: output.outputs[0] for output in engine.step()}
    found = []
    for output in (ended[name] for name in names):
        tops = [sorted(p.logprob for p in at.values())[-2:] for at in output.logprobs]
        gaps = [round(top[-1] - top[0], 4) for top in tops]
        found.append([list(output.token_ids), gaps])
    return found
