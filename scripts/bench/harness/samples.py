"""Captured samples: taken from a real server, kept on disk, trained on offline.

A suite that captures is the ring's consumer itself, in place of a trainer. An inflated
target computes the same function as its original, so streams are captured with the
original, which is many times faster. Offline training is the trainer's own step,
packing and evaluation with a fixed number of steps, warm-up and cosine.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from bench.harness.arm import ArmRun, Hooks, SegmentRun
from bench.harness.common import BenchError, ServerError
from bench.harness.options import SuiteOptions
from bench.harness.scrape import Scraper
from bench.harness.server import VllmServer
from bench.harness.session import Session, draft_config, private_run_dir
from bench.harness.stream import StreamRequest
from vllm_tide.config import TrainConfig
from vllm_tide.draft.eagle3 import Eagle3Draft
from vllm_tide.draft.target import TargetRows
from vllm_tide.speculative import merged
from vllm_tide.train.assemble import Assembler
from vllm_tide.train.evaluate import FORMS, Evaluation, evaluate
from vllm_tide.train.packing import pack, take_batch
from vllm_tide.train.reservoir import window_tokens
from vllm_tide.train.sample import Branch, Sample, TopK, split_windows
from vllm_tide.train.step import TrainStep, compute_dtype
from vllm_tide.transport.feed import RingFeed
from vllm_tide.transport.record import Record
from vllm_tide.transport.rendezvous import EngineManifest, read_manifests
from vllm_tide.transport.ring import Collect

FORMAT = 1
_UNREADABLE = (OSError, SafetensorError, KeyError, TypeError, ValueError)
Tensors = dict[str, torch.Tensor]


def save_samples(
    path: Path, parts: dict[str, list[Sample]], facts: dict[str, Any]
) -> None:
    """Writes documents by part of the stream, and JSON-able facts, atomically."""
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
    """Reads what `save_samples` wrote: documents by part, and facts."""
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
    return sum(sample.num_tokens for sample in samples)


def num_trained(samples: Sequence[Sample]) -> int:
    return sum(sample.num_trained for sample in samples)


def held_out_every(
    samples: Sequence[Sample], every: int
) -> tuple[list[Sample], list[Sample]]:
    """Splits by request: every n-th in order of appearance is held out."""
    order = {key: n for n, key in enumerate(dict.fromkeys(s.key for s in samples))}
    held = {key for key, n in order.items() if n % every == every - 1}
    train = [sample for sample in samples if sample.key not in held]
    return train, [sample for sample in samples if sample.key in held]


def _record(item: Sample | Branch | TopK, tensors: Tensors) -> dict[str, Any]:
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


WARM_UP, FLOOR = 0.05, 0.02
"""Share of the steps with a rising rate; the rate at the end (share of the peak)."""
MAX_IDLE = 64
"""Batches in a row that train nothing before the fit is given up."""


@dataclass(frozen=True)
class Fit:
    """Outcome of a fit."""

    steps: int  # optimizer steps done
    seconds: float  # time of the steps, evaluations not counted
    tokens: int  # rows trained on, repeats counted
    loss: float  # mean loss of the last tenth of the steps; NaN without any


def rate(step: int, total: int) -> float:
    """Factor on the learning rate at a step (0 to total - 1)."""
    warm = max(1, round(WARM_UP * total))
    if step < warm:
        return (step + 1) / (warm + 1)
    progress = (step - warm) / max(1, total - warm)
    return FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * progress))


def fit(
    draft: Eagle3Draft,
    target: TargetRows,
    samples: Sequence[Sample],
    config: TrainConfig,
    steps: int,
    on_step: Callable[[int], object] = lambda _: None,
    seed: int = 0,
) -> Fit:
    size = window_tokens(config)
    documents = [part for sample in samples for part in split_windows(sample, size)]
    if not documents:
        raise ValueError("no captured document has anything to train on")
    step = TrainStep(draft, target, config)
    rng = random.Random(seed)
    queue: deque[Sample] = deque()
    losses: list[float] = []
    tokens = idle = 0
    seconds = 0.0
    while len(losses) < steps and idle < MAX_IDLE:
        began = time.perf_counter()
        if not queue:
            queue.extend(rng.sample(documents, len(documents)))
        chosen = take_batch(queue, config.batch_tokens, branches=step.trains_branches)
        batch = pack(chosen, branches=step.trains_branches)
        result = step.run(batch, rate(len(losses), steps))
        seconds += time.perf_counter() - began
        idle = 0 if result is not None else idle + 1
        if result is not None:
            losses.append(result.loss)
            tokens += result.num_tokens
            on_step(len(losses))
    last = losses[-max(1, len(losses) // 10) :]
    mean = sum(last) / len(last) if last else math.nan
    return Fit(len(losses), seconds, tokens, mean)


def acceptance(
    draft: Eagle3Draft,
    target: TargetRows,
    samples: Sequence[Sample],
    depth: int,
    config: TrainConfig,
) -> Evaluation:
    """Evaluates a draft on held-out samples, in the type it is trained in."""
    dtype = compute_dtype(target.lm_head.device)
    found: Evaluation = evaluate(
        draft, target, samples, depth, capacity=config.batch_tokens, dtype=dtype
    )
    return found


def acceptance_figures(evaluation: Evaluation) -> dict[str, Any]:
    """Evaluation for the report: every form with its standard error."""
    figures: dict[str, Any] = {
        "rows": evaluation.num_rows,
        "requests": len(evaluation.requests),
    }
    for form in FORMS:
        error = evaluation.standard_error(form)
        figures[form] = _finite(evaluation.acceptance(form))
        figures[f"{form}_error"] = _finite(error)
        figures[f"{form}_conditional"] = [
            _finite(value) for value in evaluation.conditional(form)
        ]
    return figures


def _finite(value: float) -> float | None:
    return round(value, 4) if math.isfinite(value) else None


MAX_BRANCHES = 256
_POLL_S, _BATCH = 0.02, 512
_OPEN_ROWS = 1 << 20


@dataclass
class Captured:
    """Captured samples of a stream."""

    parts: dict[str, list[Sample]]  # documents by segment of the stream
    run: ArmRun  # the arm that served it
    manifest: EngineManifest  # of its engine
    lost: dict[str, int]  # rows that were not captured or not usable, by reason


@dataclass
class _Sink:
    """Reads the ring while the stream runs; builds documents between segments.

    Documents are built while nothing runs, so that the ring is never left waiting.
    """

    run_dir: Path
    parts: dict[str, list[Sample]] = field(default_factory=dict)
    manifest: EngineManifest | None = None
    lost: dict[str, int] = field(default_factory=dict)
    _feed: RingFeed | None = None
    _dropped_before: int = 0
    _records: list[Record] = field(default_factory=list)
    _assembler: Assembler | None = None

    async def read(self, _server: VllmServer, _scraper: Scraper) -> None:
        self.attach()
        while True:
            if not self._take():
                await asyncio.sleep(_POLL_S)
            await asyncio.sleep(0)

    def attach(self) -> None:
        if self._feed is not None:
            return
        found = read_manifests(self.run_dir)
        if not found:
            raise ServerError(f"no engine announced itself in {self.run_dir}")
        self.manifest = found[-1]
        self._feed = RingFeed(self.manifest)
        self._feed.set_collect(Collect.FULL)
        while self._feed.read(_BATCH):  # of the warm-up
            pass
        self._dropped_before = self._feed.stats()["dropped_rows"]
        size = self.manifest.hidden_size * len(self.manifest.aux_layer_ids)
        self._assembler = Assembler(
            size,
            self.manifest.feature_dtype,
            max_open_rows=_OPEN_ROWS,
            max_request_rows=_OPEN_ROWS,
            max_branches=MAX_BRANCHES,
        )

    def close_segment(self, segment: SegmentRun) -> None:
        while self._take():
            pass
        assert self._assembler is not None
        out: list[Sample] = []
        for record in self._records:
            out += self._assembler.add(record, time.monotonic())
        self._records = []
        self.parts[segment.name] = out + self._assembler.flush()

    def finish(self, _server: VllmServer | None = None) -> None:
        if self._feed is None or self._assembler is None:
            return
        told = self._feed.stats() | dict(self._assembler.skipped)
        told["dropped_rows"] -= self._dropped_before
        told["holes"] = self._assembler.num_holes
        told.pop("waiting_bytes", None)
        self.lost = {name: count for name, count in told.items() if count}
        self._feed.close()
        self._feed = None

    def _take(self) -> bool:
        if self._feed is None:
            return False
        self._feed.heartbeat()
        found = self._feed.read(_BATCH)
        self._records += found
        return bool(found)


def capture(
    session: Session,
    stream: Sequence[StreamRequest],
    name: str,
    model: str,
    *,
    target: Path | None = None,
    tide: Mapping[str, Any] | None = None,
) -> Captured | None:
    """Serves a stream and returns its samples; None if that failed, which is noted."""
    # What a cached prefix leaves out, and what control does, are no part of documents
    # that losses and draft shapes are compared on.
    alone = ("--no-enable-prefix-caching", *session.options.serve_args)
    options = replace(session.options, serve_args=alone)
    session = replace(session, options=options)
    with private_run_dir(options.work / "run" / name) as run_dir:
        sink = _Sink(run_dir)
        config = draft_config(options, model, _section(options, run_dir, tide or {}))
        hooks = Hooks(
            beside=sink.read, between=sink.close_segment, before_stop=sink.finish
        )
        try:
            run = session.arm(
                name,
                config,
                stream,
                run_dir=run_dir,
                hooks=hooks,
                target=target or options.target,
            )
        finally:
            sink.finish()
    if run is None or sink.manifest is None:
        return None
    for problem in run.problems:
        session.document.problem(f"{name}: {problem}")
    return Captured(sink.parts, run, sink.manifest, sink.lost)


def _section(
    options: SuiteOptions, run_dir: Path, changes: Mapping[str, Any]
) -> dict[str, Any]:
    section = {
        "run_dir": str(run_dir),
        "capture": {"teacher": "hidden"},
        "control": {"policy": "static"},
    }
    return merged(merged(section, changes), {"train": {"autostart": False}})
