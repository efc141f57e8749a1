"""Draft stage: an EAGLE-3 draft of the demo target, trained on a few domains.

The draft knows Python, JSON and diffs.  Traffic that moves to a domain the draft
has not seen is what online training is for, so the loss of acceptance there is
reported beside the figures on those three, not hidden.

Trains with the project's own trainer code (`vllm_tide.draft`, `vllm_tide.train`).
"""

import hashlib
import json
import math
import shutil
import sys
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from vllm_tide.config import TrainConfig
from vllm_tide.draft import (
    Eagle3Config,
    Eagle3Draft,
    TargetRows,
    export_tensors,
    save_draft,
)
from vllm_tide.draft.config import Rope
from vllm_tide.train.evaluate import evaluate
from vllm_tide.train.packing import pack, take_batch
from vllm_tide.train.sample import Sample
from vllm_tide.train.step import TrainStep

from .generate import Generator
from .target import machine
from .traces import Trace, collect

AUX_LAYER_IDS = (1, 3, 5)  # early, middle and last layer of six
INTERMEDIATE_SIZE = 512
EXPECTED_DEPTH = 5


@dataclass(frozen=True)
class DraftOptions:
    """Settings of one run; temperatures are those of the traces.

    The numbers of traces are per domain.
    """

    domains: tuple[str, ...] = ("python", "json", "diffs")
    minutes: float = 30.0
    num_greedy: int = 900
    num_sampled: int = 1100
    temperature: float = 0.6
    num_tokens: int = 96
    learning_rate: float = 2e-3
    batch_tokens: int = 2048
    held_out_prompts: int = 64
    report_domains: tuple[str, ...] = ("python", "sql", "json", "logs", "diffs", "c")
    seed: int = 0


def draft_config(target: dict[str, object]) -> Eagle3Config:
    """Return the draft's shape: 1.97M parameters, 3.9 MB in bf16."""
    rope = target.get("rope_parameters") or {}
    theta = float(rope.get("rope_theta") or target.get("rope_theta") or 10000.0)
    return Eagle3Config(
        hidden_size=target["hidden_size"],
        intermediate_size=INTERMEDIATE_SIZE,
        num_attention_heads=target["num_attention_heads"],
        num_key_value_heads=target["num_key_value_heads"],
        head_dim=target["head_dim"],
        vocab_size=target["vocab_size"],
        draft_vocab_size=target["vocab_size"],
        aux_layer_ids=AUX_LAYER_IDS,
        target_hidden_size=target["hidden_size"],
        rms_norm_eps=target["rms_norm_eps"],
        rope=Rope(theta=theta),
        max_position_embeddings=target["max_position_embeddings"],
    )


def as_samples(traces: Iterable[Trace]) -> list[Sample]:
    """Turn traces into training documents."""
    return [
        Sample.offline(
            trace.tokens,
            trace.features,
            trace.hidden,
            num_prompt_tokens=trace.num_prompt_tokens,
            key=key,
        )
        for key, trace in enumerate(traces)
    ]


def training_samples(
    work: Path, generator: Generator, options: DraftOptions
) -> list[Sample]:
    """Generate the training traces: greedy and sampled, different prompts."""
    traces: list[Trace] = []
    for domain in options.domains:
        skip = 0
        for count, temperature in (
            (options.num_greedy, 0.0),
            (options.num_sampled, options.temperature),
        ):
            traces += collect(
                work,
                generator,
                domain,
                "train",
                AUX_LAYER_IDS,
                num_prompts=count,
                num_tokens=options.num_tokens,
                temperature=temperature,
                skip=skip,
            )
            skip += count
    return as_samples(traces)


def fit(
    draft: Eagle3Draft,
    target: TargetRows,
    samples: list[Sample],
    options: DraftOptions,
) -> dict[str, float]:
    """Train the draft in place for ``options.minutes``."""
    config = TrainConfig(
        learning_rate=options.learning_rate,
        batch_tokens=options.batch_tokens,
    )
    step = TrainStep(draft, target, config)
    rng = np.random.default_rng(options.seed)
    queue: deque[Sample] = deque()
    begin = time.monotonic()
    budget_s = options.minutes * 60.0
    num_steps, passes, loss = 0, 0, math.nan
    while (elapsed := time.monotonic() - begin) < budget_s:
        if len(queue) < 32:
            queue.extend(samples[i] for i in rng.permutation(len(samples)))
            passes += 1
        progress = elapsed / budget_s
        warm = min(1.0, progress / 0.03)
        scale = warm * (0.02 + 0.98 * 0.5 * (1.0 + math.cos(math.pi * progress)))
        batch = pack(take_batch(queue, options.batch_tokens))
        result = step.run(batch, max(scale, 1e-3))
        if result is None:
            continue
        num_steps += 1
        loss = result.loss
        if num_steps % 50 == 0:
            means = " ".join(f"{value:.3f}" for value in result.step_losses)
            sys.stdout.write(f"step {num_steps} time {elapsed:.0f} s KL {means}\n")
            sys.stdout.flush()
    return {"steps": num_steps, "passes": passes, "last_loss": round(loss, 4)}


def _expected(
    draft: Eagle3Draft,
    target: TargetRows,
    generator: Generator,
    work: Path,
    options: DraftOptions,
) -> dict[str, dict[str, float]]:
    """Expected acceptance length per domain, on greedy held-out continuations."""
    report = {}
    for domain in options.report_domains:
        traces = collect(
            work,
            generator,
            domain,
            "held_out",
            draft.config.aux_layer_ids,
            num_prompts=options.held_out_prompts,
            num_tokens=options.num_tokens,
            temperature=0.0,
        )
        result = evaluate(draft, target, as_samples(traces), EXPECTED_DEPTH)
        report[domain] = {
            "expected": round(result.acceptance("greedy"), 3),
            "standard_error": round(result.standard_error("greedy"), 3),
        }
        sys.stdout.write(f"{domain}: {json.dumps(report[domain])}\n")
        sys.stdout.flush()
    return report


def make(work: Path, target_folder: Path, options: DraftOptions) -> dict[str, object]:
    """Generate traces, train, evaluate, and export to ``work/draft``."""
    begin = time.monotonic()
    generator = Generator(target_folder)
    target = TargetRows.load(target_folder)
    samples = training_samples(work, generator, options)
    generation_s = time.monotonic() - begin
    config = draft_config(target.config)
    draft = Eagle3Draft.initialise(
        config, target.embed_tokens, target.lm_head, seed=options.seed
    )
    trained = fit(draft, target, samples, options)
    expected = _expected(draft, target, generator, work, options)
    weights = (target_folder / "model.safetensors").read_bytes()
    provenance: dict[str, object] = {
        "what": "demo EAGLE-3 draft of vllm_tide",
        "target_sha256": hashlib.sha256(weights).hexdigest(),
        "aux_layer_ids": list(config.aux_layer_ids),
        "options": vars(options),
        "machine": machine(),
        "parameters": sum(t.numel() for t in export_tensors(draft).values()),
        "train_traces": len(samples),
        "train_tokens": sum(s.num_tokens for s in samples),
        "generation_s": round(generation_s, 1),
        "wall_s": round(time.monotonic() - begin, 1),
        **trained,
        "expected_depth": EXPECTED_DEPTH,
        "expected_acceptance_length": expected,
    }
    staging = work / "draft.new"
    shutil.rmtree(staging, ignore_errors=True)
    save_draft(draft, staging, torch.bfloat16)
    (staging / "model.safetensors").chmod(0o644)  # saved readable by owner only
    (staging / "provenance.json").write_text(json.dumps(provenance, indent=1))
    folder = work / "draft"
    shutil.rmtree(folder, ignore_errors=True)
    staging.rename(folder)
    return provenance
