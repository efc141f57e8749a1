"""One run of a learning suite: target, report, clock, and arms that may fail."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .arm import NO_HOOKS, ArmOptions, Hooks, run_arm
from .arm_servers import BROKEN, sentence
from .control_arms import BenchError
from .document import commit
from .learning_document import Outputs, SuiteDocument
from .learning_options import SuiteOptions
from .learning_server import server_options
from .progress import Progress, clock_text
from .report import environment
from .sizes import Target, targets_of
from .stream import StreamRequest
from .summary import ArmRun

ARM_LIMIT_S = 3600.0


class StoppedError(RuntimeError):
    """The suite cannot go on; what was measured is in the report."""


class OutOfTimeError(StoppedError):
    """`--max-minutes` is over."""


@dataclass
class Session:
    """What a suite works with.

    Attributes:
        options: Of the suite.
        target: What is served.
        document: The report.
        progress: Progress lines.
        outputs: Token ids of every arm.
        began_s: Monotonic clock at the start.
    """

    options: SuiteOptions
    target: Target
    document: SuiteDocument
    progress: Progress
    outputs: Outputs
    began_s: float = field(default_factory=time.monotonic)

    def say(self, text: str) -> None:
        """Print a progress line."""
        self.progress.say(text)

    def time_left_s(self) -> float:
        """Return the seconds left, below zero if `--max-minutes` is over."""
        if self.options.max_minutes is None:
            return ARM_LIMIT_S
        return self.began_s + 60 * self.options.max_minutes - time.monotonic()

    def left_s(self) -> float:
        """Return the seconds left.

        Raises:
            OutOfTimeError: There are none.
        """
        left = self.time_left_s()
        if left <= 0:
            raise OutOfTimeError(f"--max-minutes {self.options.max_minutes:g} is over")
        return left

    def arm(
        self,
        name: str,
        config: Mapping[str, Any] | None,
        stream: Sequence[StreamRequest],
        *,
        run_dir: Path | None = None,
        trained: bool = False,
        hooks: Hooks = NO_HOOKS,
        target: Path | None = None,
    ) -> ArmRun | None:
        """Serve a stream once; None if that failed, which is noted as a problem.

        Args:
            name: Of the arm.
            config: For `--speculative-config`; None without speculation.
            stream: What is sent.
            run_dir: Where a trainer reports.
            trained: A trainer is started with the server.
            hooks: What the suite does meanwhile.
            target: Instead of the session's.

        Raises:
            OutOfTimeError: `--max-minutes` is over.
        """
        limit_s = self.left_s()
        self.say(f"arm {name}: {len(stream)} requests")
        server = server_options(self.options, target or self.target.path, name, config)
        arm = ArmOptions(name, server, run_dir, limit_s, trained)
        try:
            return run_arm(arm, stream, hooks)
        except TimeoutError:
            self.document.problem(f"{name}: cut off, {clock_text(limit_s)} are over")
        except BROKEN as error:
            self.document.problem(f"{name}: {sentence(error)}")
        return None


def _facts(options: SuiteOptions, target: Target, began_s: float) -> dict[str, Any]:
    return environment(
        {
            **commit(),
            "target": {"name": target.name, **target.facts},
            "target_dtype": options.dtype,
            "draft": options.draft.name,
            "engine_cpus": list(options.engine_cpus),
            "client_api_trainer_cpus": list(options.other_cpus),
            "enforce_eager": not options.compile,
            "prefix_caching": "as vLLM has it; off where documents are captured",
            "seed": options.seed,
            "wall_clock_s": round(time.monotonic() - began_s, 1),
        }
    )


@contextlib.contextmanager
def all_cores(options: SuiteOptions) -> Iterator[None]:
    """Compute on every core while no server runs; the client has its own only."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {*options.engine_cpus, *options.other_cpus})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def run_suite(options: SuiteOptions, measure: Callable[[Session], None]) -> int:
    """Run a suite; return 0 only if it was complete and nothing was wrong.

    Args:
        options: Checked here.
        measure: The suite: fills `session.document.results` and notes problems.

    Raises:
        BenchError: The options are no good; nothing was measured.
    """
    options.check()
    began = time.monotonic()
    document = SuiteDocument(options)
    progress = Progress()
    (target,) = targets_of(
        options.target, options.model_sizes, options.work / "models", progress.say
    )
    outputs = Outputs(options.work / "outputs")
    session = Session(options, target, document, progress, outputs, began)
    if options.resume:
        session.say("resuming" if document.resumed else "nothing to resume: new run")
    document.data["environment"] = _facts(options, target, began)
    document.write()
    # The client shares the cores given to it; the engine's own are left alone.
    os.sched_setaffinity(0, options.other_cpus)
    signal.signal(signal.SIGTERM, _interrupt)
    status = 0
    try:
        measure(session)
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
        document.data["environment"] |= _facts(options, target, began)
        document.write()
    return status or _verdict(document, progress, time.monotonic() - began)


def _verdict(document: SuiteDocument, progress: Progress, seconds: float) -> int:
    for problem in document.data["problems"]:
        progress.say(f"problem: {problem}")
    if document.data["stopped"]:
        progress.say(f"stopped early: {document.data['stopped']}")
    progress.say(f"{clock_text(seconds)}: {document.path}")
    return int(bool(document.data["problems"] or document.data["stopped"]))
