"""Swaps by the size of the head: copy and verify, then install in a running engine.

A head of a size is the demo's with its MLP padded with zeros: the same function.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
from place import DEMO, Place
from safetensors.torch import load_file, save_file

from vllm_tide.swap.stage import Stager
from vllm_tide.swap.verify import DraftContract
from vllm_tide.transport import WeightsSegment, WeightsWriter

SIZES_GB = (0.1, 0.25, 0.5, 1.0)
TINY_GB = (0.006, 0.012)
VERSIONS = 5
_PADDED = {"gate_proj": 0, "up_proj": 0, "down_proj": 1}


def swap(place: Place) -> None:
    """Staging alone for every size, then installing for every size."""
    sizes = TINY_GB if place.cpu else SIZES_GB
    for gigabytes in sizes:
        place.part(f"stage {gigabytes:g} GB", lambda g=gigabytes: _stage(g))
    for gigabytes in sizes:
        place.part(f"install {gigabytes:g} GB", lambda g=gigabytes: _install(place, g))


def padded(num_bytes: float) -> dict[str, torch.Tensor]:
    """The demo's head in bfloat16, its MLP padded until it has so many bytes."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted((DEMO / "draft").glob("*.safetensors")):
        tensors |= load_file(path)
    tensors = {
        name: tensor.bfloat16() if tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
    }
    held = sum(tensor.nbytes for tensor in tensors.values())
    hidden = next(t.shape[1] for n, t in tensors.items() if "gate_proj" in n)
    more = max(int(num_bytes - held) // (3 * 2 * hidden), 0) // 64 * 64
    for name, tensor in tensors.items():
        for part, dim in _PADDED.items():
            if f".{part}." in name:
                shape = list(tensor.shape)
                shape[dim] = more
                tensors[name] = torch.cat([tensor, tensor.new_zeros(shape)], dim)
    return tensors


def _stage(gigabytes: float) -> dict[str, Any]:
    """What the engine's thread does with a publication: copy, hash, check."""
    tensors = padded(gigabytes * 1e9)
    size = sum(tensor.nbytes for tensor in tensors.values())
    given = {
        name: (
            str(tensor.dtype).removeprefix("torch."),
            tuple(tensor.shape),
            tensor.contiguous().view(-1).view(torch.uint8).numpy(),
        )
        for name, tensor in tensors.items()
    }
    segment = WeightsSegment.create(size + (4 << 20))
    writer = WeightsWriter.attach(segment.name)
    stager = Stager(segment, DraftContract(tensors, 10.0))
    publish, stage = [], []
    for version in range(1, VERSIONS + 1):
        began = time.perf_counter()
        writer.publish(given, version=version, parent_version=version - 1, meta={})
        published = time.perf_counter()
        stager.check_now()
        assert stager.staged_version == version, stager.last_refusal
        publish.append(published - began)
        stage.append(time.perf_counter() - published)
    writer.close()
    segment.close()
    return {"bytes": size, "publish_s": publish, "stage_s": stage}


def _install(place: Place, gigabytes: float) -> dict[str, Any]:
    """The pause of serving: install in an engine, as it measures that itself."""
    folder = place.work / f"draft-{gigabytes:g}"
    size = _write(folder, gigabytes * 1e9)
    speculative = {
        "method": "eagle3",
        "model": str(folder),
        "num_speculative_tokens": 3,
        "tide": {
            "run_dir": str(place.work / "run"),
            "train": {"autostart": False},
            "capture": {"enabled": False},
            "control": {"policy": "static"},  # each step drafts, whatever the head
        },
    }
    heads = 2 if place.cpu else VERSIONS
    case = {"speculative": speculative, "batch": 2, "tokens": 16, "heads": heads}
    found = place.child({**case, "dtype": "bfloat16"}, f"install-{gigabytes:g}")
    return {"bytes": size, "runner": found["runner"], "swaps": found["swaps"]}


def _write(folder: Path, num_bytes: float) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    tensors = padded(num_bytes)
    config = json.loads((DEMO / "draft" / "config.json").read_text(encoding="utf-8"))
    config["intermediate_size"] = next(
        tensor.shape[0] for name, tensor in tensors.items() if ".gate_proj." in name
    )
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return sum(tensor.nbytes for tensor in tensors.values())
