"""One training of the loss suite, in a worker process of its own."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vllm_tide.draft.checkpoint import load_draft
from vllm_tide.draft.eagle3 import Eagle3Draft
from vllm_tide.draft.target import TargetRows
from vllm_tide.train.sample import Sample

from .learning_fit import acceptance, acceptance_figures, fit, train_config
from .learning_samples import held_out_every, load_samples
from .loss_mixes import parse_mix


@dataclass(frozen=True, slots=True)
class LossJob:
    """What is trained.

    Attributes:
        mix: Loss terms, see `parse_mix`.
        ttt_steps: Lookahead.
        seed: Of the order of documents, and of a fresh head.
    """

    mix: str
    ttt_steps: int
    seed: int

    @property
    def name(self) -> str:
        """Key in the report."""
        return f"{self.mix} @{self.ttt_steps} #{self.seed}"


@dataclass(frozen=True)
class LossTask:
    """What all jobs have in common.

    Attributes:
        samples: File of captured documents.
        target: Folder of the target.
        draft: Folder of the draft to go on from; None begins with a fresh layer of the
            shape of `shape`.
        shape: Folder of the draft whose shape a fresh one has.
        holdout_every: Every n-th request is held out.
        steps: Optimizer steps.
        depth: Draft depth of the evaluation.
        train: Knobs of `tide.train`.
        shared: Tensors of `draft` that are the target's own, not trained.
    """

    samples: Path
    target: Path
    draft: Path | None
    shape: Path
    holdout_every: int
    steps: int
    depth: int
    train: dict[str, Any]
    shared: tuple[str, ...] = ()


_loaded: tuple[TargetRows, list[Sample], list[Sample]] | None = None


def prepare(task: LossTask, cpus: tuple[int, ...]) -> None:
    """Make this process a worker: one thread.

    Args:
        task: Its documents are read now, once for all jobs.
        cpus: Cores of the workers.
    """
    global _loaded
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent says when it is over
    torch.set_num_threads(1)
    os.sched_setaffinity(0, cpus)
    _loaded = _load(task)


def _load(task: LossTask) -> tuple[TargetRows, list[Sample], list[Sample]]:
    parts, _ = load_samples(task.samples)
    every = [sample for part in parts.values() for sample in part]
    return TargetRows.load(task.target), *held_out_every(every, task.holdout_every)


def first_draft(task: LossTask, target: TargetRows, seed: int) -> Eagle3Draft:
    """Return the draft a job begins with."""
    if task.draft is not None:
        return load_draft(task.draft, target, task.shared)
    shape = load_draft(task.shape, target)
    return Eagle3Draft.initialise(
        shape.config, target.embed_tokens, target.lm_head, shape.vocab, seed
    )


def run_job(task: LossTask, job: LossJob) -> dict[str, Any]:
    """Train, evaluate on the held-out requests, and return the record."""
    target, train, held = _loaded or _load(task)
    torch.manual_seed(job.seed)
    draft = first_draft(task, target, job.seed)
    config = train_config(
        {
            **task.train,
            "loss": parse_mix(job.mix),
            "ttt_steps": job.ttt_steps,
            "seed": job.seed,
        }
    )
    done = fit(draft, target, train, config, task.steps)
    return {
        "mix": job.mix,
        "lookahead": job.ttt_steps,
        "seed": job.seed,
        "steps": done.steps,
        "train_s": round(done.seconds, 2),
        "tokens": done.tokens,
        "loss": round(done.loss, 4) if done.loss == done.loss else None,
        **acceptance_figures(acceptance(draft, target, held, task.depth, config)),
    }


def run_start(task: LossTask) -> dict[str, Any]:
    """Evaluate the draft that jobs begin with."""
    target, _, held = _loaded or _load(task)
    draft = first_draft(task, target, 0)
    config = train_config(task.train)
    return acceptance_figures(acceptance(draft, target, held, task.depth, config))
