"""Captured documents on disk, and their split into training and held-out requests."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from vllm_tide.train.sample import Branch, Sample, TopK

from .control_arms import BenchError

FORMAT = 1
_UNREADABLE = (OSError, SafetensorError, KeyError, TypeError, ValueError)
Tensors = dict[str, torch.Tensor]


def save_samples(
    path: Path, parts: dict[str, list[Sample]], facts: dict[str, Any]
) -> None:
    """Write documents by part of the stream, and JSON-able facts, atomically.

    One safetensors file: tensors by number, everything else as JSON in its header.
    """
    tensors: Tensors = {}
    data = {
        "format": FORMAT,
        "facts": facts,
        "parts": {
            name: [_record(sample, tensors) for sample in part]
            for name, part in parts.items()
        },
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".part")
    save_file(tensors, partial, metadata={"samples": json.dumps(data)})
    os.replace(partial, path)


def load_samples(path: Path) -> tuple[dict[str, list[Sample]], dict[str, Any]]:
    """Read what `save_samples` wrote: documents by part, and facts.

    Raises:
        BenchError: The file is none of it.
    """
    try:
        with safe_open(path, framework="pt") as archive:
            data = json.loads((archive.metadata() or {})["samples"])
            tensors = {name: archive.get_tensor(name) for name in archive.keys()}  # noqa: SIM118 - not a mapping
        if data["format"] != FORMAT:
            raise ValueError(f"format {data['format']}")
        parts = {
            name: [_sample(record, tensors) for record in part]
            for name, part in data["parts"].items()
        }
        return parts, dict(data["facts"])
    except _UNREADABLE as error:
        why = str(error).split("\n", 1)[0]
        raise BenchError(f"{path} holds no captured samples ({why})") from None


def num_tokens(samples: Sequence[Sample]) -> int:
    """Return the rows of some documents."""
    return sum(sample.num_tokens for sample in samples)


def num_trained(samples: Sequence[Sample]) -> int:
    """Return the rows with a loss at step 0."""
    return sum(sample.num_trained for sample in samples)


def held_out_every(
    samples: Sequence[Sample], every: int
) -> tuple[list[Sample], list[Sample]]:
    """Split by request: every n-th in order of appearance is held out.

    Args:
        samples: Documents; those of one request stay together.
        every: n, at least 2.
    """
    order = {key: n for n, key in enumerate(dict.fromkeys(s.key for s in samples))}
    held = {key for key, n in order.items() if n % every == every - 1}
    train = [sample for sample in samples if sample.key not in held]
    return train, [sample for sample in samples if sample.key in held]


def _record(item: Sample | Branch | TopK, tensors: Tensors) -> dict[str, Any]:
    """Fields as JSON; a tensor is put into `tensors` and becomes its number."""
    out: dict[str, Any] = {}
    for entry in fields(item):
        value = getattr(item, entry.name)
        if isinstance(value, TopK):
            value = _record(value, tensors)
        elif entry.name == "branches":
            value = [_record(branch, tensors) for branch in value]
        elif isinstance(value, torch.Tensor):
            number = len(tensors)
            # A clone: a view would write the whole it is a part of.
            tensors[str(number)] = value.clone(memory_format=torch.contiguous_format)
            value = {"tensor": number}
        out[entry.name] = value
    return out


def _sample(record: dict[str, Any], tensors: Tensors) -> Sample:
    found = _with_tensors(record, tensors)
    branches = [_with_tensors(branch, tensors) for branch in found["branches"]]
    return Sample(**{**found, "branches": tuple(Branch(**b) for b in branches)})


def _with_tensors(record: dict[str, Any], tensors: Tensors) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, dict) and "tensor" in value:
            out[name] = tensors[str(value["tensor"])]
        elif isinstance(value, dict):
            out[name] = TopK(**_with_tensors(value, tensors))
        else:
            out[name] = value
    return out
