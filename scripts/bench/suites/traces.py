"""Options of the suites that replay arrival traces, and the requests of each trace.

Reading, the made-up patterns and thinning are the simulator's (`sim.arrivals`), so that
a server and the simulator can be given the same trace. A trace is windowed, thinned and
clipped, never stretched: stretching time would lower the load and with it destroy the
second-level bursts a trace is replayed for.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness.arms import ABLATION_SUITE, CONTROL_ARMS
from bench.harness.blocks import MIXED, Cell
from bench.harness.common import BenchError
from bench.harness.options import option
from bench.harness.ratios import SCALES
from bench.harness.stream import BenchRequest, PromptPool, joined_prompt
from bench.suites.serving import PolicyOptions
from sim.arrivals import PATTERNS, SimError, Trace, load, synthetic

# Requests per second of a made-up trace before it is thinned.
SYNTHETIC_RATE = 5.0
# Where a window shorter than the recording is most telling: around the drop of the
# first pattern.  Seconds from the recording's start.
DEFAULT_STARTS: Mapping[str, float] = {"trace1_rate_drop": 240.0}


@dataclass(frozen=True, slots=True)
class Limits:
    """Lengths in tokens that the served model can take at a sensible cost."""

    min_input: int = 16
    max_input: int = 128
    min_output: int = 8
    max_output: int = 128


@dataclass(frozen=True, slots=True)
class TraceChoice:
    """A trace's name and the second its window starts at (None: the default)."""

    name: str
    start_s: float | None = None


def parse_choices(text: str) -> tuple[TraceChoice, ...]:
    choices = []
    for part in filter(None, text.split(",")):
        name, _, start = part.partition("@")
        try:
            choices.append(TraceChoice(name, float(start) if start else None))
        except ValueError:
            raise BenchError(
                f"--traces: {part!r} is not NAME or NAME@SECONDS"
            ) from None
    return tuple(choices)


@dataclass(frozen=True, kw_only=True)
class RunOptions(PolicyOptions):
    """Options of the suites that replay traces."""

    repeats: int = 3
    trace_dir: Path | None = option(None, "CSV traces")
    traces: tuple[TraceChoice, ...] = option(
        (), "NAME[@START],...; default: the three patterns", late=parse_choices
    )
    trace_seconds: float = option(240.0, "window replayed")
    keep: float | None = option(
        None,
        "probability of keeping a request (default: fits --load)",
        flags=("--rate-scale",),
    )
    load: float = option(0.6, "share of plain decoding's capacity")
    slo_scales: tuple[float, ...] = option(SCALES, "0.8,0.9,1.0,1.1,1.2")
    max_output_tokens: int = 128
    drain_s: float = 180.0

    @property
    def limits(self) -> Limits:
        return Limits(
            max_input=self.max_input_tokens, max_output=self.max_output_tokens
        )

    @property
    def arm_names(self) -> tuple[str, ...]:
        default = ABLATION_SUITE if self.suite == "ablation" else CONTROL_ARMS
        return self.arms or default

    @property
    def size(self) -> str:
        every = self.repeats * len(self.arm_names) * (len(self.traces) or 3)
        minutes = every * self.trace_seconds / 60
        return f"at least {minutes:.0f} minutes, and a start of each server"

    def check(self) -> None:
        super().check()
        if not all(scale > 0 for scale in self.slo_scales):
            raise BenchError("--slo-scales are positive factors such as 0.8,1.0")
        for name, number in (
            ("--repeats", self.repeats),
            ("--trace-seconds", self.trace_seconds),
            ("--load", self.load),
        ):
            if not number > 0:
                raise BenchError(f"{name} is too small")
        if self.keep is not None and not 0 < self.keep <= 1:
            raise BenchError(
                f"--keep is a probability above 0, at most 1; got {self.keep:g}"
            )
        if self.keep is None and "none" not in self.arm_names:
            raise BenchError("--arms without none: give --keep, not --load")
        if self.trace_dir is not None and not self.trace_dir.is_dir():
            raise BenchError(f"--trace-dir: there is no folder {self.trace_dir}")
        limits = self.limits
        if limits.min_input > limits.max_input:
            raise BenchError("--max-input-tokens is below the shortest prompt")
        if limits.min_output > limits.max_output:
            raise BenchError("--max-output-tokens is below the shortest output")
        self.check_length(limits.max_output)

    def to_json(self) -> dict[str, Any]:
        record = super().to_json()
        del record["max_input_tokens"], record["max_output_tokens"]
        return {**record, "arms": list(self.arm_names), "limits": asdict(self.limits)}


def window(trace: Trace, start_s: float, seconds: float) -> Trace:
    """Requests of `[start_s, start_s + seconds)`, times from its start."""
    inside = (trace.arrival >= start_s) & (trace.arrival < start_s + seconds)
    return replace(
        trace,
        arrival=trace.arrival[inside] - start_s,
        prompt=trace.prompt[inside],
        output=trace.output[inside],
    )


def clip(trace: Trace, limits: Limits) -> Trace:
    """Brings both lengths into the limits."""
    return replace(
        trace,
        prompt=np.clip(trace.prompt, limits.min_input, limits.max_input),
        output=np.clip(trace.output, limits.min_output, limits.max_output),
    )


def thin(trace: Trace, keep: float, seed: int) -> Trace:
    """Keeps each request with probability `keep`; the same ones for the same seed."""
    if not 0 < keep <= 1:
        raise BenchError(f"--keep is a probability above 0, at most 1; got {keep:g}")
    kept = trace.thinned(keep, seed)
    if len(kept) == 0:
        raise BenchError(
            f"trace {trace.name!r}: keeping {keep:.3g} of its {len(trace)} requests "
            "leaves none; give a larger --keep or a longer --trace-seconds"
        )
    return kept


def keep_for_load(
    trace: Trace, seconds: float, capacity_tokens_per_s: float, load_share: float
) -> float:
    """Share of requests that offers `load_share` x the capacity."""
    offered = float(trace.output.sum()) / seconds
    return min(1.0, load_share * capacity_tokens_per_s / offered) if offered else 1.0


def requests_of(
    trace: Trace, pool: PromptPool, domains: Sequence[str], seed: int
) -> list[BenchRequest]:
    """Gives every request a prompt of its length; the domain is drawn evenly."""
    rng = random.Random(f"{seed}:domains")
    order = {domain: pool.sequence(domain, f"{seed}:trace") for domain in domains}
    requests = []
    rows = zip(
        trace.arrival.tolist(),
        trace.prompt.tolist(),
        trace.output.tolist(),
        strict=True,
    )
    for index, (arrival_s, num_input, num_output) in enumerate(rows):
        domain = rng.choice(list(domains))
        prompt = joined_prompt(order[domain], index, num_input)
        requests.append(BenchRequest(index, domain, prompt, num_output, arrival_s))
    return requests


def _files(folder: Path) -> dict[str, Path]:
    found = sorted((*folder.glob("*.csv"), *folder.glob("*.csv.gz")))
    return {path.name.removesuffix(".gz").removesuffix(".csv"): path for path in found}


def _patterns(files: Mapping[str, Path]) -> list[str]:
    ours = [
        next((name for name in files if name.startswith(f"trace{number}")), None)
        for number in (1, 2, 3)
    ]
    return [name for name in ours if name] or list(files)


def load_traces(
    folder: Path | None, choices: Sequence[TraceChoice], seconds: float, seed: int
) -> dict[str, Trace]:
    """Windows of the chosen traces by name, neither thinned nor clipped."""
    try:
        if folder is None:
            wanted = choices or [TraceChoice(name) for name in PATTERNS]
            return {
                c.name: synthetic(c.name, seconds, SYNTHETIC_RATE, seed) for c in wanted
            }
        return _load_windows(folder, choices, seconds)
    except SimError as error:
        raise BenchError(str(error)) from None


def _load_windows(
    folder: Path, choices: Sequence[TraceChoice], seconds: float
) -> dict[str, Trace]:
    files = _files(folder)
    if not files:
        raise BenchError(f"--trace-dir {folder} holds no .csv or .csv.gz file")
    traces = {}
    for choice in choices or [TraceChoice(name) for name in _patterns(files)]:
        if choice.name not in files:
            raise BenchError(
                f"--trace-dir {folder} has no trace {choice.name!r}; "
                f"it has: {', '.join(files)}"
            )
        trace = load(files[choice.name])
        start_s = choice.start_s
        if start_s is None:
            start_s = DEFAULT_STARTS.get(choice.name, 0.0)
            # A window longer than what is left would end in made-up silence.
            start_s = max(0.0, min(start_s, float(trace.arrival[-1]) - seconds))
        traces[choice.name] = window(trace, start_s, seconds)
        if len(traces[choice.name]) == 0:
            raise BenchError(f"trace {choice.name!r} is empty at {start_s:g} s")
    return traces


@dataclass(frozen=True, slots=True)
class Replay:
    """A trace ready to be sent, with what was done to it."""

    requests: Sequence[BenchRequest]
    keep: float
    offered_tokens_per_s: float
    unthinned: int


def replays(
    options: RunOptions, pool: PromptPool, capacity_tokens_per_s: float
) -> dict[Cell, Replay]:
    domain = MIXED if len(options.domains) > 1 else options.domains[0]
    traces = load_traces(
        options.trace_dir, options.traces, options.trace_seconds, options.seed
    )
    found = {}
    for name, unclipped in traces.items():
        trace = clip(unclipped, options.limits)
        keep = options.keep
        if keep is None:
            keep = keep_for_load(
                trace, options.trace_seconds, capacity_tokens_per_s, options.load
            )
        kept = thin(trace, keep, options.seed)
        found[Cell(domain, trace=name)] = Replay(
            requests_of(kept, pool, options.domains, options.seed),
            round(keep, 5),
            round(float(kept.output.sum()) / options.trace_seconds, 2),
            len(trace),
        )
    return found
