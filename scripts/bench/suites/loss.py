"""The loss suite: every mix of loss terms, trained on one captured stream.

The stream is captured once with a real server. Then each mix is trained with each
lookahead and seed for the same number of steps, and evaluated on held-out requests;
workers share the cores, one thread each. Seeds are the outer loop, so that a run cut
short has compared all mixes on fewer seeds.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch

from bench.harness.common import BenchError, OutOfTimeError, StoppedError, rounded
from bench.harness.options import SuiteOptions, option
from bench.harness.samples import (
    acceptance,
    acceptance_figures,
    capture,
    fit,
    held_out_every,
    load_samples,
    num_tokens,
    num_trained,
    save_samples,
)
from bench.harness.session import Session, run_suite
from bench.harness.stream import StreamRequest, shift_stream_of
from bench.harness.summary import acceptance_length
from vllm_tide.config import LossTerm, TrainConfig
from vllm_tide.draft.checkpoint import load_draft
from vllm_tide.draft.eagle3 import Eagle3Draft
from vllm_tide.draft.target import TargetRows
from vllm_tide.train.sample import Sample

MIXES = (
    "forward_kl",
    "reverse_kl",
    "forward_kl+next_token",
    "forward_kl+discard",
    "reverse_kl+discard",
    "lk_hybrid",
    "nla",
    "tv",
)
"""Fields of the report that others read."""
USUAL_WEIGHT: Mapping[str, float] = {"next_token": 0.1, "discard": 0.5}
"""Of a term beside the first one, where no number is given."""


def parse_mix(text: str) -> dict[str, float]:
    known = get_args(LossTerm)
    weights: dict[str, float] = {}
    for part in text.split("+"):
        name, _, number = part.strip().partition(":")
        if name not in known:
            raise BenchError(
                f"--losses: {text!r} has the term {name!r}; known: {', '.join(known)}"
            )
        if name in weights:
            raise BenchError(f"--losses: {text!r} names {name} twice")
        try:
            usual = USUAL_WEIGHT.get(name, 1.0) if weights else 1.0
            weights[name] = float(number) if number else usual
        except ValueError:
            weights[name] = -1.0
        if not 0 <= weights[name] < float("inf"):
            raise BenchError(f"--losses: {text!r}: the weight of {name} is no number")
    if not any(weights.values()):
        raise BenchError(f"--losses: {text!r} has no weight above 0")
    return weights


@dataclass(frozen=True, slots=True)
class LossJob:
    """One training."""

    mix: str  # loss terms, see `parse_mix`
    ttt_steps: int  # lookahead
    seed: int  # of the order of documents, and of a fresh head

    @property
    def name(self) -> str:
        return f"{self.mix} @{self.ttt_steps} #{self.seed}"


@dataclass(frozen=True)
class LossTask:
    """Settings that all trainings share."""

    samples: Path  # file of captured documents
    target: Path  # folder of the target
    # Folder of the draft to go on from; None begins with a fresh layer of the shape of
    # `shape`.
    draft: Path | None
    shape: Path  # folder of the draft whose shape a fresh one has
    holdout_every: int  # every n-th request is held out
    steps: int  # optimizer steps
    depth: int  # draft depth of the evaluation
    train: dict[str, Any]  # knobs of `tide.train`
    # Tensors of `draft` that are the target's own, not trained.
    shared: tuple[str, ...] = ()


_loaded: tuple[TargetRows, list[Sample], list[Sample]] | None = None


def prepare(task: LossTask, cpus: tuple[int, ...]) -> None:
    """Makes this process a worker: one thread."""
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
    if task.draft is not None:
        return load_draft(task.draft, target, task.shared)
    shape = load_draft(task.shape, target)
    return Eagle3Draft.initialise(
        shape.config, target.embed_tokens, target.lm_head, shape.vocab, seed
    )


def run_job(task: LossTask, job: LossJob) -> dict[str, Any]:
    """Trains, evaluates on the held-out requests, and returns the record."""
    target, train, held = _loaded or _load(task)
    torch.manual_seed(job.seed)
    draft = first_draft(task, target, job.seed)
    config = TrainConfig.model_validate(
        {
            **task.train,
            "loss": parse_mix(job.mix),
            "ttt_steps": job.ttt_steps,
        }
    )
    done = fit(draft, target, train, config, task.steps, seed=job.seed)
    return {
        "mix": job.mix,
        "lookahead": job.ttt_steps,
        "seed": job.seed,
        "steps": done.steps,
        "train_s": round(done.seconds, 2),
        "tokens": done.tokens,
        "loss": rounded(done.loss),
        **acceptance_figures(acceptance(draft, target, held, task.depth, config)),
    }


def run_start(task: LossTask) -> dict[str, Any]:
    """Evaluates the draft that jobs begin with."""
    target, _, held = _loaded or _load(task)
    draft = first_draft(task, target, 0)
    config = TrainConfig.model_validate(task.train)
    return acceptance_figures(acceptance(draft, target, held, task.depth, config))


FORMS = ("greedy", "mass", "argmax_mass")


@dataclass(frozen=True, kw_only=True)
class LossOptions(SuiteOptions):
    """Options of the loss suite."""

    domains: tuple[str, ...] = ("c", "docs_en")
    requests: tuple[int, ...] = (90, 110)
    output_tokens: int = 128
    concurrency: tuple[int, ...] = (8,)
    num_speculative_tokens: int = 5
    losses: tuple[str, ...] = option(MIXES, "forward_kl+discard:0.5,...")
    lookaheads: tuple[int, ...] = option((5, 10), "training-time-test steps")
    seeds: tuple[int, ...] = option((0, 1, 2), "of each mix and lookahead")
    steps: int = option(60, "of each training")
    batch_tokens: int = option(1024, "of a step")
    holdout_every: int = option(5, "every n-th request is held out")
    start: str = option("draft", "draft, or fresh: a random layer of its shape")
    samples: Path | None = option(None, "captured before")
    workers: int | None = option(None, "processes; default: one per core")

    def check(self) -> None:
        super().check()
        for text in self.losses:
            parse_mix(text)
        if not self.losses or not self.lookaheads or not self.seeds:
            raise BenchError("--losses, --lookaheads and --seeds each need a value")
        if not all(1 <= steps <= 16 for steps in self.lookaheads):
            raise BenchError("--lookaheads are whole numbers from 1 to 16")
        self.at_least(
            {"steps": 1, "batch_tokens": 64, "holdout_every": 2, "workers": 1}
        )
        if self.start not in ("draft", "fresh"):
            raise BenchError("--start is draft or fresh")

    def may_differ(self) -> tuple[str, ...]:
        return ("losses", "lookaheads", "seeds", "workers")


def jobs_of(options: LossOptions) -> list[LossJob]:
    """Jobs of a run, seeds outermost."""
    return [
        LossJob(mix, steps, seed)
        for seed in options.seeds
        for steps in options.lookaheads
        for mix in options.losses
    ]


def run(options: LossOptions) -> int:
    options.check()
    stream = shift_stream_of(options)

    def measure(session: Session) -> None:
        path, facts = _samples(session, options, stream)
        task = LossTask(
            samples=path,
            target=options.target,
            draft=options.draft if options.start == "draft" else None,
            shape=options.draft,
            holdout_every=options.holdout_every,
            steps=options.steps,
            depth=options.num_speculative_tokens,
            train=_train(options),
            shared=tuple(facts.get("shared", ())),
        )
        try:
            _train_all(session, options, task)
        finally:
            session.document.results["summary"] = summarise(
                session.document.section("jobs").values(),
                session.document.results.get("start"),
            )
        print(table(session.document.results["summary"]), flush=True)

    return run_suite(options, measure)


def _train(options: LossOptions) -> dict[str, Any]:
    own = {
        "learning_rate": 1e-3,
        **options.tide.get("train", {}),
    }
    return {**own, "batch_tokens": options.batch_tokens}


def _samples(
    session: Session, options: LossOptions, stream: Sequence[StreamRequest]
) -> tuple[Path, dict[str, Any]]:
    path = options.samples or options.work / "samples.safetensors"
    if options.samples is None and not (session.document.resumed and path.exists()):
        began = time.monotonic()
        captured = capture(session, stream, "capture", str(options.draft))
        if captured is None:
            raise StoppedError("the stream could not be captured")
        parts = captured.run.segments
        save_samples(
            path,
            captured.parts,
            {
                "shared": list(captured.manifest.shared),
                "lost": captured.lost,
                "failed_requests": sum(not r.ok for r in captured.run.results),
                "served_acceptance_length": acceptance_length(
                    [(part.start, part.end) for part in parts]
                ),
                "capture_s": round(time.monotonic() - began, 1),
            },
        )
    found, facts = load_samples(path)
    every = [sample for part in found.values() for sample in part]
    train, held = held_out_every(every, options.holdout_every)
    session.document.results["stream"] = {
        **{key: value for key, value in facts.items() if key != "shared"},
        "requests": len({sample.key for sample in every}),
        "rows": num_tokens(every),
        "branches": sum(len(sample.branches) for sample in every),
        "branch_rows": sum(b.tokens.numel() for s in every for b in s.branches),
        "train_rows_with_loss": num_trained(train),
        "holdout_rows_with_loss": num_trained(held),
    }
    session.document.write()
    if not train or not held:
        raise BenchError("too little was captured to hold a request out")
    session.say(f"captured {num_tokens(every)} rows of {len(every)} documents")
    return path, facts


def _train_all(session: Session, options: LossOptions, task: LossTask) -> None:
    kept = session.document.section("jobs")
    ahead = [job for job in jobs_of(options) if job.name not in kept]
    cpus = tuple(sorted({*options.engine_cpus, *options.other_cpus}))
    workers = max(1, min(options.workers or len(cpus), len(ahead)))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        workers, context, initializer=prepare, initargs=(task, cpus)
    ) as pool:
        if "start" not in session.document.results:
            session.document.results["start"] = pool.submit(run_start, task).result()
        running: dict[Future[dict[str, Any]], LossJob] = {}
        seconds: list[float] = []
        while ahead or running:
            expected_s = statistics.fmean(seconds) if seconds else 0.0
            late = bool(ahead) and session.time_left_s() < expected_s
            while ahead and not late and len(running) < workers:
                job = ahead.pop(0)
                running[pool.submit(run_job, task, job)] = job
            if not running:
                raise OutOfTimeError(f"{len(ahead)} trainings are left for --resume")
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                job = running.pop(future)
                record = future.result()
                seconds.append(record["train_s"])
                kept[job.name] = record
                session.document.write()
                session.say(
                    f"{job.name}: greedy {record['greedy']}, mass {record['mass']}, "
                    f"{record['train_s']} s; {len(ahead) + len(running)} left"
                )


def summarise(
    records: Iterable[Mapping[str, Any]], start: Mapping[str, Any] | None
) -> list[dict[str, Any]]:
    """Mean and spread over seeds of each mix and lookahead, best first."""
    groups: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for record in records:
        groups.setdefault((record["mix"], record["lookahead"]), []).append(record)
    out = []
    for (mix, lookahead), found in groups.items():
        row: dict[str, Any] = {"mix": mix, "lookahead": lookahead, "seeds": len(found)}
        for form in FORMS:
            values = [record[form] for record in found if record[form] is not None]
            errors = [record.get(f"{form}_error") for record in found]
            known = [error for error in errors if error is not None]
            began = (start or {}).get(form)
            mean = statistics.fmean(values) if values else None
            gain = None if mean is None or began is None else mean - began
            row[form] = {
                "mean": rounded(mean),
                "spread": rounded(statistics.stdev(values))
                if len(values) > 1
                else None,
                "error": rounded(statistics.fmean(known)) if known else None,
                "gain": rounded(gain),
            }
        row["train_s"] = round(statistics.fmean(r["train_s"] for r in found), 2)
        out.append(row)
    return sorted(out, key=lambda row: -(row["greedy"]["mean"] or -math.inf))


def table(summary: Sequence[Mapping[str, Any]]) -> str:
    lines = [f"{'mix':26}{'ahead':>6}{'seeds':>6}{'greedy':>16}{'mass':>16}{'s':>8}"]
    for row in summary:
        cells = "".join(
            f"{_cell3(row[form]['mean'])} +- {_cell3(row[form]['spread'])}".rjust(16)
            for form in ("greedy", "mass")
        )
        lines.append(
            f"{row['mix']:26}{row['lookahead']:>6}{row['seeds']:>6}{cells}"
            f"{row['train_s']:>8.1f}"
        )
    return "\n".join(lines)


def _cell3(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
