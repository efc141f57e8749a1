"""Training of a DFlash draft on rows that an engine captured."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from tests.engine.shared_engine import DEMO, Served
from vllm_tide.config import TrainConfig
from vllm_tide.draft import TargetRows, load_draft, save_draft
from vllm_tide.train.assemble import Assembler
from vllm_tide.train.packing import pack
from vllm_tide.train.sample import Sample
from vllm_tide.train.step import TrainStep

DEPTH = 4
TEXTS = [[*b"one two three ", i, *b" four"] for i in range(24)]


def documents(served: Served, records: list[Any]) -> list[Sample]:
    size = len(served.manifest.aux_layer_ids) * served.manifest.hidden_size
    assembler = Assembler(size, served.manifest.feature_dtype)
    done = [s for r in records for s in assembler.add(r, time.monotonic())]
    return [*done, *assembler.flush()]


def learn(served: Served, records: list[Any], folder: Path, steps: int) -> Path:
    """Train the engine's first draft on captured rows of `TEXTS`."""
    target = TargetRows.load(DEMO / "target")
    draft = load_draft(served.manifest.draft_path, target)
    step = TrainStep(draft, target, TrainConfig(ttt_steps=DEPTH, learning_rate=3e-3))
    samples = documents(served, records)
    torch.manual_seed(0)
    for i in range(steps):
        some = samples[i % 3 :: 3]
        known = [s.in_vocabulary(draft.vocab.t2d) for s in some]
        assert step.run(pack(known, branches=False)) is not None
    save_draft(draft, folder, torch.float32)
    return folder
