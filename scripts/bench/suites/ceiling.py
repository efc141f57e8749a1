"""The ceiling of day 0: the same first draft, trained offline to convergence."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from bench.harness.samples import (
    acceptance,
    acceptance_figures,
    fit,
    held_out_every,
    num_tokens,
)
from vllm_tide.config import FreshConfig, TrainConfig
from vllm_tide.draft.checkpoint import build_draft, canonical_name, save_draft
from vllm_tide.draft.config import Eagle3Config, read_config
from vllm_tide.draft.eagle3 import Eagle3Draft
from vllm_tide.draft.fresh import build_fresh
from vllm_tide.draft.target import TargetRows
from vllm_tide.train.sample import Sample
from vllm_tide.transport.publication import Publication
from vllm_tide.transport.rendezvous import read_manifests
from vllm_tide.transport.weights import WeightsRefused, WeightsSegment

LEARN, FINAL = "0 learn", "1 final"
"""Segments of the stream: what is learnt from, and what is not."""
EVALUATIONS = 8
"""Points of the fit's curve."""
CONVERGED = 0.01
"""Relative gain of the last of them below which the fit counts as converged."""
HELD_OUT_EVERY = 8


@dataclass(frozen=True)
class CeilingOptions:
    """Options of the training of the ceiling."""

    target: Path  # folder of the target, not inflated
    fresh: Mapping[str, Any]  # `tide.fresh` of the first head
    train: Mapping[str, Any]  # `tide.train`
    steps: int  # optimizer steps
    depth: int  # draft depth of the evaluations
    dtype: str  # served type


def train_ceiling(
    parts: Mapping[str, Sequence[Sample]],
    options: CeilingOptions,
    folder: Path,
    online: Path,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Trains the ceiling on the first part of the stream; writes a draft folder."""
    target = TargetRows.load(options.target)
    dtype = getattr(torch, options.dtype)
    draft = build_fresh(
        options.target, FreshConfig.model_validate(options.fresh), dtype
    )
    config = TrainConfig.model_validate(options.train)
    train, held = held_out_every(parts[LEARN], HELD_OUT_EVERY)

    def judge(which: Eagle3Draft, samples: Sequence[Sample]) -> dict[str, Any]:
        found = acceptance(which, target, samples, options.depth, config)
        return acceptance_figures(found)

    record: dict[str, Any] = {
        "trained_on_rows": num_tokens(train),
        "first_head": judge(draft, parts[FINAL]),
    }
    curve: list[dict[str, Any]] = []

    def on_step(done: int) -> None:
        if done % max(1, options.steps // EVALUATIONS) == 0:
            curve.append({"steps": done, **judge(draft, held)})
            say(f"ceiling: step {done}, held-out {curve[-1]['greedy']}")

    done = fit(draft, target, train, config, options.steps, on_step)
    save_draft(draft, folder, dtype)
    lengths = [p["greedy"] for p in curve if p["greedy"] is not None]
    served = _online_head(online, folder, target)
    return record | {
        "steps": done.steps,
        "seconds": round(done.seconds, 1),
        "curve": curve,
        "converged": len(lengths) > 1 and lengths[-1] / lengths[-2] - 1 < CONVERGED,
        "ceiling": judge(draft, parts[FINAL]),
        "day0": None if served is None else judge(served, parts[FINAL]),
    }


def keep_published(run_dir: Path, path: Path) -> bool:
    """Writes the newest draft published to a live engine; False if none was."""
    for manifest in read_manifests(run_dir):
        segment = WeightsSegment.attach(manifest.weights)
        try:
            save_file(_tensors(segment.read()), path)
            return True
        except WeightsRefused:
            continue
        finally:
            segment.close()
    return False


def _tensors(publication: Publication) -> dict[str, torch.Tensor]:
    return {
        canonical_name(name): torch.from_numpy(item.data.copy())
        .view(getattr(torch, item.dtype))
        .view(item.shape)
        for name, item in publication.tensors.items()
    }


def _online_head(path: Path, folder: Path, target: TargetRows) -> Eagle3Draft | None:
    if not path.exists():
        return None
    tensors = load_file(path)
    config = Eagle3Config.from_json(read_config(folder), target.config)
    found: Eagle3Draft = build_draft(config, tensors, target)
    return found
