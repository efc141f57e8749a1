"""The learning suite: the same stream served without and with a draft that learns.

Five arms: no speculation, the frozen draft, a trainer that always trains, TIDE's gate,
and the gate by groups. Two kinds of traffic: domains one after the other, and the same
requests mixed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .arm import Hooks
from .control_arms import BenchError
from .learning_arms import ARM_NAMES, LearningArm, arms_of, config_of
from .learning_compare import compare_arms, table, verdicts
from .learning_events import TrainerWatch
from .learning_identity import identity_of, identity_problems
from .learning_options import SuiteOptions
from .learning_server import private_run_dir
from .learning_session import OutOfTimeError, Session, all_cores, run_suite
from .learning_stream import (
    MIXED,
    SHIFT,
    TRAFFIC,
    mixed_stream,
    read_domains,
    shift_stream,
    stretches,
)
from .learning_summary import arm_figures
from .stream import StreamRequest


@dataclass(frozen=True, kw_only=True)
class LearningOptions(SuiteOptions):
    """Options of the learning suite.

    Attributes:
        traffic: `shift`, `mixed` or `both`.
        arms: In order; outputs are compared with the first.
        window_s: Width of the windows of the curves (s).
    """

    model_sizes: tuple[str, ...] = ("90m",)
    domains: tuple[str, ...] = ("python", "c", "charmaps", "markup")
    requests: tuple[int, ...] = (16, 48, 40, 28)
    output_tokens: int = 96
    traffic: str = SHIFT
    arms: tuple[str, ...] = ARM_NAMES
    window_s: float = 10.0

    def check(self) -> None:
        """See `SuiteOptions`."""
        super().check()
        arms_of(self.arms)
        if self.traffic not in (*TRAFFIC, "both"):
            raise BenchError(f"--traffic is one of {', '.join(TRAFFIC)}, both")
        if len(self.domains) < 2:
            raise BenchError("--domains: a shift needs two domains, such as python,c")
        if self.window_s <= 0:
            raise BenchError("--window-s is too small")

    def may_differ(self) -> tuple[str, ...]:
        """Arms and traffic may be measured in several runs."""
        return ("arms", "traffic")

    def kinds(self) -> tuple[str, ...]:
        """Return the kinds of traffic to serve."""
        return TRAFFIC if self.traffic == "both" else (self.traffic,)


def streams_of(options: LearningOptions) -> dict[str, list[StreamRequest]]:
    """Return the stream of each kind of traffic.

    Raises:
        BenchError: Prompts are missing or too few.
    """
    prompts = read_domains(options.prompts, options.domains)
    shifted = shift_stream(
        prompts,
        options.counts(),
        options.output_tokens,
        options.concurrency,
        options.seed,
    )
    every = {
        SHIFT: shifted,
        MIXED: mixed_stream(shifted, options.concurrency, options.seed),
    }
    return {kind: every[kind] for kind in options.kinds()}


def run(options: LearningOptions) -> int:
    """Run the suite; return the exit status.

    Raises:
        BenchError: The options are no good.
    """
    options.check()
    streams = streams_of(options)

    def measure(session: Session) -> None:
        for kind, stream in streams.items():
            try:
                for arm in arms_of(options.arms):
                    _one(session, options, kind, stream, arm)
            except OutOfTimeError:
                _close(session, kind)
                raise
            _close(session, kind)

    return run_suite(options, measure)


def _one(
    session: Session,
    options: LearningOptions,
    kind: str,
    stream: Sequence[StreamRequest],
    arm: LearningArm,
) -> None:
    kept = session.document.section(kind)
    if arm.name in kept:
        session.say(f"{kind}, {arm.name}: measured before")
        return
    name = f"{kind}-{arm.name}"
    with private_run_dir(options.work / "run" / name) as run_dir:
        watch = TrainerWatch(run_dir if arm.mode else None)
        run = session.arm(
            name,
            config_of(arm, options, run_dir),
            stream,
            run_dir=run_dir if arm.mode else None,
            trained=arm.mode is not None,
            hooks=Hooks(on_sample=watch.on_sample),
        )
        if run is None:
            return
        figures = arm_figures(run, stream, stretches(stream), watch, options.window_s)
    session.outputs.save(name, run.results)
    kept[arm.name] = figures
    session.document.write()
    session.say(
        f"{name}: {figures['output_tokens_per_s']} tokens/s, shifted part "
        f"{figures['shifted']['output_tokens_per_s']}, acceptance length "
        f"{figures['acceptance_length']}, trained {figures['training_s']} s"
    )


def _close(session: Session, kind: str) -> None:
    """Compare the arms of one kind of traffic, those of earlier runs included."""
    results, options = session.document.results, session.options
    places = {name: place for place, name in enumerate(ARM_NAMES)}
    # Stable: arms of one kind but another spacing stay as they were given.
    order = sorted(results[kind], key=lambda name: places[name.partition("@")[0]])
    arms = {name: results[kind][name] for name in order}
    results[kind] = arms
    outputs = {name: session.outputs.load(f"{kind}-{name}") for name in arms}
    with all_cores(options):
        identity = identity_of(outputs, session.target.path, options.dtype)
    comparison = compare_arms(arms)
    session.document.section("comparison")[kind] = comparison
    session.document.section("goals")[kind] = verdicts(comparison)
    session.document.section("identity")[kind] = identity
    for problem in identity_problems(identity, f"{kind}, "):
        session.document.problem(problem)
    for name, figures in arms.items():
        if figures["failed_requests"]:
            session.document.problem(
                f"{kind}, {name}: {figures['failed_requests']} requests failed"
            )
        for problem in figures["problems"]:
            session.document.problem(f"{kind}, {name}: {problem}")
    session.document.write()
    print(f"{kind}\n{table(arms)}\n{comparison}", flush=True)
