"""Run of a suite: report, target, clock and arms.

The report is written after every step. A failed arm is recorded as a problem in the
report, and the suite continues.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.harness.arm import ArmOptions, ArmRun, run_arm
from bench.harness.client import RequestResult
from bench.harness.common import (
    BenchError,
    OutOfTimeError,
    Progress,
    StoppedError,
    clock_text,
    draft_method,
    environment,
    write_json,
)
from bench.harness.identity import identity_of, identity_problems
from bench.harness.models import Target, targets_of
from bench.harness.options import CommonOptions, SuiteOptions
from bench.harness.server import BROKEN, ServerOptions, sentence
from bench.harness.stream import StreamRequest
from bench.harness.summary import learning_figures
from bench.harness.trainers import TrainerWatch
from vllm_tide.speculative import merged

SCHEMA = 1
ARM_LIMIT_S = 3600.0
MAX_SEQS = 8


class Document:
    """JSON report under construction; `write` replaces the file atomically."""

    def __init__(
        self, path: Path, suite: str, options: dict[str, Any], body: dict[str, Any]
    ) -> None:
        self.path = path
        self.data: dict[str, Any] = {
            "schema": SCHEMA,
            "suite": suite,
            "complete": False,
            "stopped": None,
            **body,
            "problems": [],
            "options": options,
            "environment": {},
        }

    def section(self, name: str) -> dict[str, Any]:
        """Return a section of the results of a suite that trains."""
        section: dict[str, Any] = self.data["results"].setdefault(name, {})
        return section

    def problem(self, text: str) -> None:
        if text not in self.data["problems"]:
            self.data["problems"].append(text)

    def write(self) -> None:
        write_json(self.path, self.data)


def draft_config(
    options: SuiteOptions,
    model: str,
    tide: Mapping[str, Any] | None = None,
    num_tokens: int | None = None,
) -> dict[str, Any]:
    """Return the object for `--speculative-config`; plain vLLM's without `tide`."""
    config: dict[str, Any] = {
        "method": draft_method(model),
        "model": model,
        "num_speculative_tokens": num_tokens or options.num_speculative_tokens,
    }
    return config if tide is None else {**config, "tide": dict(tide)}


def trained_section(
    options: SuiteOptions, run_dir: Path, changes: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the `tide` section of a trained arm; the user's knobs override it."""
    section: dict[str, Any] = {
        "run_dir": str(run_dir),
        "train": {
            "cpus": list(options.other_cpus),
            "batch_tokens": 1024,
            "min_new_tokens": 512,
            "steps_per_cycle": 12,
            "holdout_share": 0.15,
        },
    }
    return merged(merged(section, changes or {}), options.tide)


def server_options(
    options: SuiteOptions,
    target: Path,
    name: str,
    config: Mapping[str, Any] | None,
    engine_cpus: tuple[int, ...] | None = None,
    other_cpus: tuple[int, ...] | None = None,
) -> ServerOptions:
    """Return an arm's server options; write its configuration to the work folder."""
    path: Path | None = None
    if config is not None:
        path = options.work / "configs" / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return ServerOptions(
        venv=options.venv,
        model=target,
        log_path=options.work / "logs" / f"server-{name}.log",
        speculative_config=None if path is None else str(path),
        dtype=options.dtype,
        engine_cpus=engine_cpus or options.engine_cpus,
        other_cpus=other_cpus or options.other_cpus,
        max_model_len=options.max_model_len,
        max_num_seqs=max(MAX_SEQS, *options.concurrency),
        enforce_eager=not options.compile,
        extra_args=options.serve_args,
    )


@contextlib.contextmanager
def all_cores(options: SuiteOptions) -> Iterator[None]:
    """Allow this process the engine's cores as well, while no server runs."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {*options.engine_cpus, *options.other_cpus})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@dataclass
class Session:
    """One run of a suite that trains; `outputs` has the requests of every arm."""

    options: SuiteOptions
    target: Target
    document: Document
    progress: Progress
    outputs: dict[str, list[RequestResult]] = field(default_factory=dict)
    began_s: float = field(default_factory=time.monotonic)

    def left_s(self) -> float:
        if self.options.max_minutes is None:
            return ARM_LIMIT_S
        left = self.began_s + 60 * self.options.max_minutes - time.monotonic()
        if left <= 0:
            raise OutOfTimeError(f"--max-minutes {self.options.max_minutes:g} is over")
        return left

    @contextlib.contextmanager
    def run_dir(self, name: str) -> Iterator[Path]:
        """Create a short-path run directory (mode 0700); copy it to the work folder."""
        archive = self.options.work / "run" / name
        run_dir = Path(tempfile.mkdtemp(prefix="vllm_tide_bench_"))
        try:
            yield run_dir
        finally:
            shutil.rmtree(archive, ignore_errors=True)
            with contextlib.suppress(OSError, shutil.Error):
                shutil.copytree(run_dir, archive)
            shutil.rmtree(run_dir, ignore_errors=True)

    def arm(
        self,
        name: str,
        config: Mapping[str, Any] | None,
        stream: Sequence[StreamRequest],
    ) -> ArmRun | None:
        """Serve a stream; return None after a failure, recorded as a problem."""
        limit_s = self.left_s()
        self.progress.log(f"arm {name}: {len(stream)} requests")
        server = server_options(self.options, self.target.path, name, config)
        try:
            return run_arm(ArmOptions(name, server, None, limit_s), stream)
        except TimeoutError:
            self.document.problem(
                f"{name}: stopped after its limit of {clock_text(limit_s)}"
            )
        except BROKEN as error:
            self.document.problem(f"{name}: {sentence(error)}")
        return None

    def keep(
        self,
        name: str,
        run: ArmRun,
        stream: Sequence[StreamRequest],
        watch: TrainerWatch,
    ) -> dict[str, Any]:
        """Add the figures of an arm to the report."""
        figures = learning_figures(run, stream, watch)
        self.outputs[name] = run.results
        self.document.section("arms")[name] = figures
        self.document.write()
        return figures

    def compare(self) -> dict[str, Any]:
        """Compare outputs with those of `none`; record the problems of each arm."""
        arms = dict(sorted(self.outputs.items(), key=lambda arm: arm[0] != "none"))
        with all_cores(self.options):
            identity = identity_of(arms, self.target.path, self.options.dtype)
        for problem in identity_problems(identity):
            self.document.problem(problem)
        for name, arm in self.document.section("arms").items():
            if failed := arm["failed_requests"]:
                self.document.problem(f"{name}: {failed} requests failed")
            for problem in arm["problems"]:
                self.document.problem(f"{name}: {problem}")
        return identity


def conduct(
    document: Document,
    options: CommonOptions,
    facts: Callable[[], dict[str, Any]],
    measure: Callable[[], None],
    log: Callable[[str], None],
) -> int:
    """Run `measure` and write the report; return the exit status.

    Args:
        document: Written before, after, and by `measure`.
        options: Options of the suite.
        facts: Facts for the environment section.
        measure: May raise StoppedError, which ends the run early.
        log: Progress, one line.
    """
    began = time.monotonic()

    def write() -> None:
        seconds = round(time.monotonic() - began, 1)
        run_facts = {**facts(), "wall_clock_s": seconds}
        document.data["environment"] |= environment(run_facts)
        document.write()

    write()
    # The client runs on the other cores, the engine's cores are reserved.
    os.sched_setaffinity(0, options.other_cpus)
    # On SIGTERM, stop the servers too, also those under SIGSTOP.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    status = 0
    try:
        measure()
        document.data["complete"] = True
    except StoppedError as error:
        document.data["stopped"] = str(error)
    except KeyboardInterrupt:
        document.data["stopped"] = "interrupted"
        status = 130
    except BenchError as error:
        document.data["stopped"] = str(error)
        raise
    finally:
        write()
    if status:
        return status
    wrong = [f"problem: {text}" for text in document.data["problems"]]
    if document.data["stopped"]:
        wrong.append(f"stopped early: {document.data['stopped']}")
    for line in wrong:
        log(line)
    log(f"{clock_text(time.monotonic() - began)}: {document.path}")
    return int(bool(wrong))


def run_suite(
    options: SuiteOptions,
    measure: Callable[[Session], None],
    close: Callable[[Session], None] = lambda _: None,
) -> int:
    """Run a suite that trains; call `close` after complete or partial results."""
    options.check()
    began = time.monotonic()
    values = json.loads(json.dumps(options.to_json()))
    document = Document(options.json, options.suite, values, {"results": {}})
    progress = Progress()
    (target,) = targets_of(
        options.target, options.model_sizes, options.work / "models", progress.log
    )
    session = Session(options, target, document, progress, began_s=began)

    def facts() -> dict[str, Any]:
        return {
            "target": {"name": target.name, **target.facts},
            "target_dtype": options.dtype,
            "draft": options.draft.name,
            "engine_cpus": list(options.engine_cpus),
            "client_api_trainer_cpus": list(options.other_cpus),
            "enforce_eager": not options.compile,
            "prefix_caching": "as vLLM has it",
            "seed": options.seed,
        }

    def measure_and_close() -> None:
        try:
            measure(session)
        except StoppedError:
            close(session)
            raise
        close(session)

    return conduct(document, options, facts, measure_and_close, progress.log)
