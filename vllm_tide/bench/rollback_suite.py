"""The rollback suite: planted bad heads on a real server, and how soon they are gone.

Each planted head has a stretch of the stream: first requests with the good head, then
it is published under load, then the verdict is waited for. Outputs must be those of a
server without speculation, and no request may fail.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vllm_tide.speculative import merged

from .arm import Hooks, drive, finish, stop, wait_for_trainer
from .arm_servers import BROKEN, sentence
from .client import RequestResult
from .control_arms import BenchError
from .learning_events import TrainerWatch
from .learning_identity import identity_of, identity_problems
from .learning_options import SuiteOptions
from .learning_server import draft_config, private_run_dir, server_options
from .learning_session import Session, StoppedError, all_cores, run_suite
from .learning_stream import read_domains, segment_name, shift_stream, stretches
from .learning_summary import arm_figures
from .learning_trainer import trainer_process
from .live import LiveView, trainer_statuses
from .rollback_plants import parse_plant
from .rollback_trainer import order
from .rollback_trials import table, trial_problems, trials_of
from .scrape import Scrape
from .server import VllmServer
from .stream import StreamRequest
from .summary import ArmRun, SegmentRun


@dataclass(frozen=True, kw_only=True)
class RollbackOptions(SuiteOptions):
    """Options of the rollback suite; `requests` is not used.

    Attributes:
        plants: Planted heads, see `parse_plant`.
        baseline_requests: Requests that finish before each planted head is published.
        trial_requests: Requests after that.
    """

    domains: tuple[str, ...] = ("python",)
    output_tokens: int = 64
    concurrency: tuple[int, ...] = (4,)
    plants: tuple[str, ...] = ("nan", "permuted", "noise0.3", "noise0.1")
    baseline_requests: int = 32
    trial_requests: int = 48

    def check(self) -> None:
        """See `SuiteOptions`."""
        super().check()
        if not self.plants:
            raise BenchError("--plants names no planted head")
        for text in self.plants:
            parse_plant(text)
        if len(self.domains) != 1:
            raise BenchError("--domains: this suite serves one domain")
        for option, number in (
            ("--baseline-requests", self.baseline_requests),
            ("--trial-requests", self.trial_requests),
        ):
            if number < 4:
                raise BenchError(f"{option} is at least 4")


def rollback_stream(options: RollbackOptions) -> list[StreamRequest]:
    """Return the stream: a stretch for each planted head.

    Prompts come again once all were sent: the head is not trained here.

    Raises:
        BenchError: There are no prompts.
    """
    (domain,) = options.domains
    prompts = read_domains(options.prompts, (domain,))
    per_plant = options.baseline_requests + options.trial_requests
    wanted = per_plant * len(options.plants)
    count = min(wanted, len(set(prompts[domain])))
    pool = shift_stream(
        prompts, [count], options.output_tokens, options.concurrency, options.seed
    )
    return [
        replace(
            pool[index % count],
            index=index,
            phase=segment_name(index // per_plant, options.plants[index // per_plant]),
        )
        for index in range(wanted)
    ]


def run(options: RollbackOptions) -> int:
    """Run the suite; return the exit status.

    Raises:
        BenchError: The options are no good.
    """
    options.check()
    stream = rollback_stream(options)

    def measure(session: Session) -> None:
        try:
            _planted_arm(session, options, stream)
            _plain_arm(session, stream)
        except StoppedError:
            _close(session, options)
            raise
        _close(session, options)

    return run_suite(options, measure)


def _planted_arm(
    session: Session, options: RollbackOptions, stream: Sequence[StreamRequest]
) -> None:
    arms = session.document.section("arms")
    if "planted" in arms:
        session.say("planted: measured before")
        return
    with private_run_dir(options.work / "run" / "planted") as run_dir:
        watch = TrainerWatch(run_dir)
        section = merged(_section(options, run_dir), options.tide)
        config = draft_config(options, str(options.draft), section)
        run = _serve(session, options, stream, config, watch, run_dir)
        if run is None:
            return
        run.trainers = trainer_statuses(run_dir)
        figures = arm_figures(run, stream, stretches(stream), watch, 5.0)
    session.outputs.save("planted", run.results)
    arms["planted"] = figures
    trials = trials_of(figures["events"], run.results)
    session.document.results["trials"] = trials
    session.document.write()


def _section(options: RollbackOptions, run_dir: Path) -> dict[str, Any]:
    return {
        "run_dir": str(run_dir),
        "train": {"autostart": False, "cpus": list(options.other_cpus), "nice": 10},
        # Nothing is trained here: rows of ids and counts are enough.
        "schedule": {"mode": "tide", "epsilon": 1.0},
        # Each planted head is a case of its own: none waits for the one before.
        "deploy": {"backoff_cycles": 0},
    }


def _serve(
    session: Session,
    options: RollbackOptions,
    stream: Sequence[StreamRequest],
    config: dict[str, Any],
    watch: TrainerWatch,
    run_dir: Path,
) -> ArmRun | None:
    """Serve the stream with a planting trainer beside it."""
    place = finished = 0

    def on_result(_: RequestResult) -> None:
        nonlocal finished
        finished += 1
        if finished == options.baseline_requests:
            order(run_dir, place, options.plants[place], options.seed + place)

    def between(_: SegmentRun) -> None:
        nonlocal place, finished
        place, finished = place + 1, 0

    hooks = Hooks(on_sample=watch.on_sample, on_result=on_result, between=between)
    limit_s = session.left_s()
    session.say(f"arm planted: {len(stream)} requests")
    server = VllmServer(server_options(options, session.target.path, "planted", config))
    view = LiveView("planted", len(stream), run_dir)
    module = ("vllm_tide.bench.rollback_trainer",)
    try:
        with server:
            server.wait_ready(view.starting)
            with trainer_process(
                options, "planted", config["tide"], run_dir, module
            ) as trainer:
                wait_for_trainer(run_dir, view)
                at_start = server.memory_mib().get("engine", {})

                async def limited() -> tuple[list[SegmentRun], list[Scrape]]:
                    async with asyncio.timeout(limit_s):
                        return await drive(server, stream, view, hooks)

                parts, samples = asyncio.run(limited())
                died = trainer.poll() is not None
            run = ArmRun("planted", parts, samples, server.startup_s)
            if died:
                run.problems.append("the trainer died")
            finish(server, run, at_start)
            stop(server, run, run_dir)
            return run
    except TimeoutError:
        session.document.problem("planted: cut off, --max-minutes is over")
    except BROKEN as error:
        session.document.problem(f"planted: {sentence(error)}")
    return None


def _plain_arm(session: Session, stream: Sequence[StreamRequest]) -> None:
    arms = session.document.section("arms")
    if "none" in arms:
        session.say("none: measured before")
        return
    run = session.arm("none", None, stream)
    if run is None:
        return
    arms["none"] = arm_figures(run, stream, stretches(stream), TrainerWatch(None), 5.0)
    session.outputs.save("none", run.results)
    session.document.write()


def _close(session: Session, options: RollbackOptions) -> None:
    document = session.document
    arms = document.section("arms")
    names: list[str] = [name for name in ("none", "planted") if name in arms]
    outputs = {name: session.outputs.load(name) for name in names}
    with all_cores(options):
        identity = identity_of(outputs, session.target.path, options.dtype)
    document.results["identity"] = identity
    for problem in identity_problems(identity):
        document.problem(problem)
    for name, figures in arms.items():
        if figures["failed_requests"]:
            document.problem(f"{name}: {figures['failed_requests']} requests failed")
        for problem in figures["problems"]:
            document.problem(f"{name}: {problem}")
    trials = document.results.get("trials", [])
    for problem in trial_problems(trials, options.plants):
        document.problem(problem)
    document.write()
    print(table(trials), flush=True)
