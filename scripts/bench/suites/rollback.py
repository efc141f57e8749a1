"""The rollback suite: planted bad drafts on a real server, and the time to rollback.

Each planted draft has a segment of the stream: requests with the good draft, then the
publication under load, then requests until the verdict. Outputs must equal those of a
server without speculation, and no request may fail.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.harness.arm import (
    ArmRun,
    Hooks,
    LiveView,
    SegmentRun,
    drive,
    finish,
    stop,
    wait_for_trainer,
)
from bench.harness.client import RequestResult
from bench.harness.common import BenchError, number
from bench.harness.options import SuiteOptions, option
from bench.harness.server import BROKEN, VllmServer, sentence
from bench.harness.session import Session, draft_config, run_suite, server_options
from bench.harness.stream import StreamRequest, read_domains, segment_name, shift_stream
from bench.harness.trainers import TrainerWatch, trainer_process, trainer_statuses
from bench.suites import planting as rollback_trainer
from bench.suites.planting import NAN, PERMUTED, order, parse_plant
from vllm_tide.speculative import merged

_OUTCOMES = {"refused": "refused", "rollback": "rolled_back", "keep": "kept"}


def trials_of(
    events: Sequence[Mapping[str, Any]], results: Sequence[RequestResult]
) -> list[dict[str, Any]]:
    """Return a record per planted draft, in order.

    Args:
        events: From `TrainerWatch.events`, with `t_s`.
        results: Results of the arm's requests.

    Returns:
        `plant`, `version`; `outcome`: refused, rolled_back, kept or undecided, with the
        `reason`; `requests_until`: requests that ended between the publication and the
        decision; `requests_on_it`: requests that began with the planted draft, by the
        trainer's count; `decided_after_s`: from publication to decision;
        `restored_version`: version that republished the good draft.
    """
    ends = sorted(r.end_s for r in results if r.end_s is not None)
    out = []
    for place, event in enumerate(events):
        if event.get("event") != "planted":
            continue
        version = event.get("version")
        # The `publish` event is right before the `planted` event.
        began = _time_of(events[: place + 1], "publish", version) or number(
            event.get("t_s")
        )
        verdict = _verdict(events[place + 1 :], version)
        decided = number(verdict.get("t_s"))
        until: int | None = None
        if began is not None and decided is not None:
            until = sum(began < end <= decided for end in ends)
        back = [
            e.get("version")
            for e in events[place + 1 :]
            if e.get("event") == "publish" and e.get("rollback_of") == version
        ]
        out.append(
            {
                "plant": event.get("plant"),
                "version": version,
                "outcome": _OUTCOMES.get(str(verdict.get("event")), "undecided"),
                "reason": verdict.get("reason"),
                "published_s": began,
                "decided_after_s": None
                if began is None or decided is None
                else round(decided - began, 2),
                "requests_until": until,
                "requests_on_it": verdict.get("requests"),
                "restored_version": back[0] if back else None,
            }
        )
    return out


def trial_problems(
    trials: Sequence[Mapping[str, Any]], plants: Sequence[str]
) -> list[str]:
    """Return sentences on NaN drafts not refused and permuted drafts not rolled back.

    A slightly worse draft may stay, because it may be within the tolerance.
    """
    problems = [
        f"{plant}: was never published"
        for plant in plants
        if plant not in [trial["plant"] for trial in trials]
    ]
    for trial in trials:
        outcome = trial["outcome"]
        if trial["plant"] == NAN and outcome != "refused":
            problems.append(f"{NAN}: {outcome}, not refused")
        if trial["plant"] == PERMUTED and outcome not in ("refused", "rolled_back"):
            problems.append(f"{PERMUTED}: {outcome}, not rolled back")
    return problems


def table(trials: Sequence[Mapping[str, Any]]) -> str:
    lines = [f"{'planted':12}{'outcome':>13}{'requests':>10}{'on it':>7}  reason"]
    for trial in trials:
        cells = [
            "-" if trial[key] is None else str(trial[key])
            for key in ("requests_until", "requests_on_it")
        ]
        lines.append(
            f"{trial['plant']!s:12}{trial['outcome']:>13}{cells[0]:>10}{cells[1]:>7}  "
            f"{trial['reason']}"
        )
    return "\n".join(lines)


def _time_of(
    events: Sequence[Mapping[str, Any]], kind: str, version: object
) -> float | None:
    for event in reversed(events):
        if event.get("event") == kind and event.get("version") == version:
            return number(event.get("t_s"))
    return None


def _verdict(events: Sequence[Mapping[str, Any]], version: object) -> Mapping[str, Any]:
    for event in events:
        if event.get("event") in _OUTCOMES and event.get("version") == version:
            return event
    return {}


@dataclass(frozen=True, kw_only=True)
class RollbackOptions(SuiteOptions):
    """Options of the rollback suite; `requests` is not used."""

    output_tokens: int = 64
    concurrency: tuple[int, ...] = (4,)
    plants: tuple[str, ...] = option(
        ("nan", "permuted", "noise0.3", "noise0.1"), "nan,permuted,noise0.1"
    )
    baseline_requests: int = option(32, "requests before a draft is planted")
    trial_requests: int = option(48, "requests after it is planted")

    def check(self) -> None:
        super().check()
        if not self.plants:
            raise BenchError("--plants: no planted draft given")
        for text in self.plants:
            parse_plant(text)
        if len(self.domains) != 1:
            raise BenchError("--domains: this suite serves one domain")
        self.at_least({"baseline_requests": 4, "trial_requests": 4})


def rollback_stream(options: RollbackOptions) -> list[StreamRequest]:
    """Build the stream, with a segment per planted draft."""
    (domain,) = options.domains
    prompts = read_domains(options.prompts, (domain,))
    per_plant = options.baseline_requests + options.trial_requests
    total = per_plant * len(options.plants)
    count = min(total, len(set(prompts[domain])))
    pool = shift_stream(
        prompts, [count], options.output_tokens, options.concurrency, options.seed
    )
    return [
        replace(
            pool[index % count],
            index=index,
            segment=segment_name(
                index // per_plant, options.plants[index // per_plant]
            ),
        )
        for index in range(total)
    ]


def run(options: RollbackOptions) -> int:
    options.check()
    stream = rollback_stream(options)

    def measure(session: Session) -> None:
        _planted_arm(session, options, stream)
        run = session.arm("none", None, stream)
        if run is not None:
            session.keep("none", run, stream, TrainerWatch(None))

    return run_suite(options, measure, lambda session: _close(session, options))


def _planted_arm(
    session: Session, options: RollbackOptions, stream: Sequence[StreamRequest]
) -> None:
    with session.run_dir("planted") as run_dir:
        watch = TrainerWatch(run_dir)
        section = merged(_section(options, run_dir), options.tide)
        config = draft_config(options, str(options.draft), section)
        run = _serve(session, options, stream, config, watch, run_dir)
        if run is None:
            return
        run.trainers = trainer_statuses(run_dir)
        figures = session.keep("planted", run, stream, watch)
    trials = trials_of(figures["events"], run.results)
    session.document.data["results"]["trials"] = trials
    session.document.write()


def _section(options: RollbackOptions, run_dir: Path) -> dict[str, Any]:
    return {
        "run_dir": str(run_dir),
        "train": {"autostart": False, "cpus": list(options.other_cpus), "nice": 10},
        # Nothing is trained, so rows of ids and counts are enough.
        "schedule": {"mode": "tide"},
    }


def _serve(
    session: Session,
    options: RollbackOptions,
    stream: Sequence[StreamRequest],
    config: dict[str, Any],
    watch: TrainerWatch,
    run_dir: Path,
) -> ArmRun | None:
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
    session.progress.log(f"arm planted: {len(stream)} requests")
    server = VllmServer(server_options(options, session.target.path, "planted", config))
    view = LiveView("planted", len(stream), run_dir)
    module = (rollback_trainer.__file__,)
    try:
        with server:
            server.wait_ready(view.starting)
            with trainer_process(
                options, "planted", config["tide"], run_dir, module
            ) as trainer:
                wait_for_trainer(run_dir, view)
                at_start = server.memory_mib().get("engine", {})
                parts, samples = asyncio.run(
                    drive(server, stream, view, hooks, limit_s)
                )
                died = trainer.poll() is not None
            run = ArmRun("planted", parts, samples, server.startup_s)
            if died:
                run.problems.append("the trainer died")
            finish(server, run, at_start)
            stop(server, run, run_dir)
            return run
    except TimeoutError:
        session.document.problem("planted: stopped, --max-minutes is over")
    except BROKEN as error:
        session.document.problem(f"planted: {sentence(error)}")
    return None


def _close(session: Session, options: RollbackOptions) -> None:
    document = session.document
    results = document.data["results"]
    results["identity"] = session.compare()
    trials = results.get("trials", [])
    for problem in trial_problems(trials, options.plants):
        document.problem(problem)
    document.write()
    print(table(trials), flush=True)
