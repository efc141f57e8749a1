"""``vllm-tide bench run``: targets one after the other, one JSON file."""

from __future__ import annotations

import os
import signal
import time

from .control_arms import BenchError
from .document import Document, commit
from .measure import CLIENT_NICE
from .progress import Progress, clock_text
from .report import environment
from .run_options import RunOptions
from .sizes import Target, targets_of
from .target_run import OutOfTimeError, TargetRun
from .traces import load_traces


def _environment(
    options: RunOptions, targets: list[Target], began: float
) -> dict[str, object]:
    return environment(
        {
            **commit(),
            "targets": {target.name: target.facts for target in targets},
            "target_dtype": options.dtype,
            "draft": options.draft.name,
            "engine_cpus": list(options.engine_cpus),
            "client_api_cpus": list(options.other_cpus),
            "omp_threads": len(options.engine_cpus),
            "enforce_eager": not options.compile,
            "prefix_caching": False,  # `arm_servers` says why
            "seed": options.seed,
            "waiting_servers": "stopped with SIGSTOP",
            "client_nice": f"{CLIENT_NICE} while measuring, where permitted",
            "wall_clock_s": round(time.monotonic() - began, 1),
        }
    )


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def run(options: RunOptions) -> int:
    """Run; return 0 only if it was complete and every output was right.

    Raises:
        BenchError: The options are no good; nothing was measured.
    """
    options.check()
    if options.is_replay:  # a trace that is not there is said before a server starts
        load_traces(
            options.trace_dir, options.traces, options.trace_seconds, options.seed
        )
    began = time.monotonic()
    limit = options.max_minutes
    progress = Progress(deadline_s=None if limit is None else began + 60 * limit)
    doc = Document(options.json, options.suite, options.to_json())
    targets = targets_of(
        options.target, options.model_sizes, options.work / "models", progress.say
    )
    doc.data["environment"] = _environment(options, targets, began)
    doc.write()
    # The client shares the cores given to it; the engine's own are left alone.
    os.sched_setaffinity(0, options.other_cpus)
    # Servers must not outlive a run that is told to end, stopped ones least of all.
    signal.signal(signal.SIGTERM, _interrupt)
    status = 0
    try:
        for place, target in enumerate(targets):
            TargetRun(options, target, doc, progress).run(len(targets) - place - 1)
        doc.data["complete"] = True
    except OutOfTimeError:
        doc.data["stopped"] = f"--max-minutes {limit:g} is over"
    except KeyboardInterrupt:
        doc.data["stopped"] = "interrupted"
        status = 130
    except BenchError as error:
        doc.data["stopped"] = str(error)
        raise
    finally:
        kept = doc.data["environment"]
        doc.data["environment"] = {**kept, **_environment(options, targets, began)}
        doc.write()
    return status or _verdict(doc, progress)


def _verdict(doc: Document, progress: Progress) -> int:
    wrong = [
        f"{target}, {arm}"
        for target, arms in doc.data["identity"].items()
        for arm, verdict in arms.items()
        if verdict["identical"] is False
    ]
    for name in wrong:
        progress.say(f"WRONG OUTPUTS: {name} differs from none")
    for problem in doc.data["problems"]:
        progress.say(f"problem: {problem}")
    if doc.data["stopped"]:
        progress.say(f"stopped early: {doc.data['stopped']}")
    seconds = doc.data["environment"]["wall_clock_s"]
    cells = len(doc.data["cells"])
    progress.say(f"{cells} cells in {clock_text(seconds)}: {doc.path}")
    return int(bool(wrong or doc.data["problems"] or doc.data["stopped"]))
