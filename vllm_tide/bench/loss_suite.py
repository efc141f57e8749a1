"""The loss suite: every mix of loss terms, trained on one captured stream.

The stream is captured once with a real server. Then each mix is trained with each
lookahead and seed for the same number of steps, and evaluated on held-out requests;
workers share the cores, one thread each. Seeds are the outer loop, so that a run cut
short has compared all mixes on fewer seeds.
"""

from __future__ import annotations

import math
import multiprocessing
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .control_arms import BenchError
from .learning_capture import capture
from .learning_options import SuiteOptions
from .learning_samples import (
    held_out_every,
    load_samples,
    num_tokens,
    num_trained,
    save_samples,
)
from .learning_session import OutOfTimeError, Session, StoppedError, run_suite
from .learning_stream import read_domains, shift_stream
from .loss_job import LossJob, LossTask, prepare, run_job, run_start
from .loss_mixes import MIXES, parse_mix
from .stream import StreamRequest
from .summary import acceptance_length

FORMS = ("greedy", "mass", "argmax_mass")


@dataclass(frozen=True, kw_only=True)
class LossOptions(SuiteOptions):
    """Options of the loss suite.

    Attributes:
        losses: Mixes, see `loss_mixes`.
        lookaheads: Training-time-test steps.
        seeds: Seeds of each mix and lookahead.
        steps: Optimizer steps of each training.
        batch_tokens: Rows of a step.
        holdout_every: Every n-th request is held out.
        start: `draft` goes on from `--draft`, `fresh` from a random layer of its shape.
        samples: Captured documents to use; captured anew when None.
        workers: Processes that train; one per core when None.
    """

    domains: tuple[str, ...] = ("c", "docs_en")
    requests: tuple[int, ...] = (90, 110)
    output_tokens: int = 128
    concurrency: tuple[int, ...] = (8,)
    num_speculative_tokens: int = 5
    losses: tuple[str, ...] = MIXES
    lookaheads: tuple[int, ...] = (5, 10)
    seeds: tuple[int, ...] = (0, 1, 2)
    steps: int = 60
    batch_tokens: int = 1024
    holdout_every: int = 5
    start: str = "draft"
    samples: Path | None = None
    workers: int | None = None

    def check(self) -> None:
        """See `SuiteOptions`."""
        super().check()
        for text in self.losses:
            parse_mix(text)
        if not self.losses or not self.lookaheads or not self.seeds:
            raise BenchError("--losses, --lookaheads and --seeds each need a value")
        if not all(1 <= steps <= 16 for steps in self.lookaheads):
            raise BenchError("--lookaheads are whole numbers from 1 to 16")
        for option, number, least in (
            ("--steps", self.steps, 1),
            ("--batch-tokens", self.batch_tokens, 64),
            ("--holdout-every", self.holdout_every, 2),
            ("--workers", self.workers or 1, 1),
        ):
            if number < least:
                raise BenchError(f"{option} is at least {least}")
        if self.start not in ("draft", "fresh"):
            raise BenchError("--start is draft or fresh")

    def may_differ(self) -> tuple[str, ...]:
        """More mixes and seeds may be measured in a further run."""
        return ("losses", "lookaheads", "seeds", "workers")


def jobs_of(options: LossOptions) -> list[LossJob]:
    """Return what is to be trained, seeds outermost."""
    return [
        LossJob(mix, steps, seed)
        for seed in options.seeds
        for steps in options.lookaheads
        for mix in options.losses
    ]


def run(options: LossOptions) -> int:
    """Run the suite; return the exit status.

    Raises:
        BenchError: The options are no good.
    """
    options.check()
    stream = shift_stream(
        read_domains(options.prompts, options.domains),
        options.counts(),
        options.output_tokens,
        options.concurrency,
        options.seed,
    )

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
        "max_sample_tokens": min(512, options.batch_tokens),
        **options.tide.get("train", {}),
    }
    return {**own, "batch_tokens": options.batch_tokens}


def _samples(
    session: Session, options: LossOptions, stream: Sequence[StreamRequest]
) -> tuple[Path, dict[str, Any]]:
    """Return the file of captured documents and what is known of them."""
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
    """Return mean and spread over seeds of each mix and lookahead, best first.

    `gain` is over the draft that every training began with; `spread` the standard
    deviation over seeds (None for one seed), `error` the mean standard error over
    held-out requests, which all mixes share.
    """
    groups: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for record in records:
        groups.setdefault((record["mix"], record["lookahead"]), []).append(record)
    out = []
    for (mix, lookahead), found in groups.items():
        row: dict[str, Any] = {"mix": mix, "lookahead": lookahead, "seeds": len(found)}
        for form in FORMS:
            values = [record[form] for record in found if record[form] is not None]
            errors = [
                record[f"{form}_error"]
                for record in found
                if record.get(f"{form}_error") is not None
            ]
            began = (start or {}).get(form)
            mean = statistics.fmean(values) if values else None
            row[form] = {
                "mean": None if mean is None else round(mean, 4),
                "spread": round(statistics.stdev(values), 4)
                if len(values) > 1
                else None,
                "error": round(statistics.fmean(errors), 4) if errors else None,
                "gain": None
                if mean is None or began is None
                else round(mean - began, 4),
            }
        row["train_s"] = round(statistics.fmean(r["train_s"] for r in found), 2)
        out.append(row)
    return sorted(out, key=lambda row: -(row["greedy"]["mean"] or -math.inf))


def table(summary: Sequence[Mapping[str, Any]]) -> str:
    """Return the closing table."""
    lines = [f"{'mix':26}{'ahead':>6}{'seeds':>6}{'greedy':>16}{'mass':>16}{'s':>8}"]
    for row in summary:
        cells = "".join(
            f"{_cell(row[form]['mean'])} +- {_cell(row[form]['spread'])}".rjust(16)
            for form in ("greedy", "mass")
        )
        lines.append(
            f"{row['mix']:26}{row['lookahead']:>6}{row['seeds']:>6}{cells}"
            f"{row['train_s']:>8.1f}"
        )
    return "\n".join(lines)


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
