#!/usr/bin/env python
"""Traces of arrivals, turn by turn: for hosts that are never quiet.

    scripts/bench/interleaved_traces.py --json FILE [--trace-dir DIR] [--seconds 60]
        [--load 0.6] [--repeats 2] [--arms none,static1,static3,vllm_dynamic,adaspec]

As `interleaved.py`, but requests arrive as in a trace, by a clock of each engine's own
that stands while others have their turn: what the host does meets all arms alike. It
takes that script's options too; `--minutes`, `--domains`, `--learns`, `--visits` and
`--tokens` say nothing here, and `--cold` only keeps a stored profile out. A trace is
windowed, thinned and clipped as by `run.py --suite traces`, to a share (`--load`) of
what `none` decodes with the largest batch; without `--trace-dir` it is one of three
made-up patterns. Latency counts from when a request was due. `report.py` makes a page
of the file.
"""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]
from bench.harness.blocks import MIXED, NONE
from bench.harness.common import BenchError, clock_text, environment
from bench.harness.ratios import trace_summary, trace_verdict
from bench.harness.server import end_on_signals, leave_if_ended
from bench.interleaved import DYNAMIC, Run, checked, parser_of
from bench.suites.serving import KNOWN_DOMAINS
from bench.suites.traces import Limits, parse_choices, replays
from json_text import json_text


class TraceRun(Run):
    """A run of traces.

    Attributes:
        cells: As of `run.py --suite traces`: a visit of an arm to a trace each.
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.cells: list[dict[str, Any]] = []
        most = max(self.options.batches)
        turns = self.visit(most, MIXED, -1, 0.0, [NONE])[NONE]
        tokens = sum(turn.tokens for turn in turns)
        self.capacity = tokens / sum(turn.seconds for turn in turns)

    def traces(self) -> dict[str, Any]:
        """Each trace by name, as `suites.traces` makes it."""
        o = self.options
        given = SimpleNamespace(
            domains=KNOWN_DOMAINS, trace_dir=o.trace_dir, traces=o.traces, keep=None,
            trace_seconds=o.seconds, seed=o.seed, load=o.load, limits=Limits(),
        )  # fmt: skip
        found = replays(given, self.pool, self.capacity)
        return {str(cell.trace): replay for cell, replay in found.items()}

    def replay(self, name: str, trace: Any, repeat: int) -> None:
        """Have every arm serve a trace, in turns."""
        arrivals = [
            (request.arrival_s, list(request.prompt), request.max_tokens)
            for request in trace.requests
        ]
        for engine in self.engines.values():
            engine.replay(arrivals, f"{name} {repeat}")
        left, turn_s = list(self.engines), self.options.turn
        times: dict[str, list[tuple[float, float, int]]] = defaultdict(list)
        outputs: dict[int, list[int]] = defaultdict(list)
        tokens, seconds = defaultdict[str, int](int), defaultdict[str, float](float)
        while left:
            leave_if_ended()
            self._random.shuffle(left)
            for arm in list(left):
                turn = self.engines[arm].turn(turn_s)
                times[arm] += turn.times
                tokens[arm] += turn.tokens
                seconds[arm] += turn.seconds
                for number, output in turn.finished:
                    outputs[number].append(output)
                if not turn.left:
                    left.remove(arm)
        self.compared += sum(len(found) > 1 for found in outputs.values())
        self.differing += sum(len(set(found)) > 1 for found in outputs.values())
        for arm, found in times.items():
            long = [(last - first) / (n - 1) for first, last, n in found if n > 1]
            self.cells.append(
                {
                    "target": self.target.name,
                    "trace": name,
                    "domain": MIXED,
                    "arm": arm,
                    "repeat": repeat,
                    "keep": trace.keep,
                    "offered_tokens_per_s": trace.offered_tokens_per_s,
                    "requests": len(found),
                    "failed": len(arrivals) - len(found),
                    "output_tokens_per_s": round(tokens[arm] / seconds[arm], 3),
                    "mean_e2e_s": round(statistics.fmean(t[1] for t in found), 5),
                    "mean_ttft_s": round(statistics.fmean(t[0] for t in found), 5),
                    "tpots_ms": [round(1e3 * tpot, 3) for tpot in long],
                }
            )


def measure(options: Any) -> dict[str, Any]:
    """The report; it is also written after each trace, if there is a file for it."""
    with ExitStack() as stack:
        run = TraceRun(options, stack)
        traces = run.traces()
        for repeat in range(options.repeats):
            for name, trace in traces.items():
                run.replay(name, trace, repeat)
                summary = trace_summary(run.cells)
                report = {
                    "cells": run.cells,
                    "summary": {"traces": summary},
                    "verdict": trace_verdict(summary),
                    "capacity_tokens_per_s": run.capacity,
                    "schedules": {run.target.name: run.schedule}
                    if run.schedule
                    else {},
                    "identity": {"compared": run.compared, "differing": run.differing},
                    "options": {"target": run.target.name, "domains": KNOWN_DOMAINS},
                    "environment": environment({"target": run.target.facts}),
                }
                for cell in run.cells[-len(run.engines) :]:
                    print(
                        f"{name}, visit {repeat + 1}: {cell['arm']:12} mean latency "
                        f"{cell['mean_e2e_s']:.3f} s of {cell['requests']} requests",
                        flush=True,
                    )
                if options.json:
                    options.json.write_text(json_text(report))
    return report


def main() -> int:
    arms = f"none,static1,static3,{DYNAMIC},adaspec"
    parser = parser_of(__doc__, arms, MIXED, 0.0)
    parser.add_argument("--trace-dir", type=Path, help="CSV traces")
    parser.add_argument("--traces", type=parse_choices, default=(), help="NAME,...")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each trace")
    parser.add_argument("--load", type=float, default=0.6, help="of none's capacity")
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args()
    each = len(options.arms) * options.repeats * (len(options.traces) or 3)
    plan = f"at least {clock_text(each * options.seconds)} of traces"
    try:
        report = measure(checked(options, plan))
    except BenchError as error:
        raise SystemExit(str(error)) from None
    print(report["verdict"], report["identity"], sep="\n")
    return int(report["identity"]["differing"] > 0)


if __name__ == "__main__":
    end_on_signals()
    sys.exit(main())
