"""Arrival traces for replay: windowed, thinned, clipped; never stretched.

Reading, the made-up patterns and thinning are the simulator's
(:mod:`vllm_tide.sim.arrivals`), so that a server and the simulator can be given the
same trace.  Stretching time would lower the load and with it destroy the second-level
bursts a trace is replayed for.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from vllm_tide.sim.arrivals import PATTERNS, SimError, Trace, load, synthetic

from .control_arms import BenchError
from .prompt_pool import BenchRequest, PromptPool, joined_prompt

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


def parse_choices(text: str) -> list[TraceChoice]:
    """Parse ``name[@start],name[@start]``."""
    choices = []
    for part in filter(None, text.split(",")):
        name, _, start = part.partition("@")
        try:
            choices.append(TraceChoice(name, float(start) if start else None))
        except ValueError:
            raise BenchError(
                f"--traces: {part!r} is not NAME or NAME@SECONDS"
            ) from None
    return choices


def window(trace: Trace, start_s: float, seconds: float) -> Trace:
    """Return the requests of ``[start_s, start_s + seconds)``, times from its start."""
    inside = (trace.arrival >= start_s) & (trace.arrival < start_s + seconds)
    return replace(
        trace,
        arrival=trace.arrival[inside] - start_s,
        prompt=trace.prompt[inside],
        output=trace.output[inside],
    )


def clip(trace: Trace, limits: Limits) -> Trace:
    """Bring both lengths into the limits."""
    return replace(
        trace,
        prompt=np.clip(trace.prompt, limits.min_input, limits.max_input),
        output=np.clip(trace.output, limits.min_output, limits.max_output),
    )


def thin(trace: Trace, keep: float, seed: int) -> Trace:
    """Keep each request with probability ``keep``; the same ones for the same seed.

    Raises:
        BenchError: ``keep`` is no probability, or nothing is left.
    """
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
    """Return the share of requests that offers ``load_share`` x the capacity.

    Args:
        trace: Clipped window.
        seconds: Length of the window.
        capacity_tokens_per_s: Output tokens per second that arm ``none`` reaches.
        load_share: Wanted share of the capacity, on average over the window.
    """
    offered = float(trace.output.sum()) / seconds
    return min(1.0, load_share * capacity_tokens_per_s / offered) if offered else 1.0


def requests_of(
    trace: Trace, pool: PromptPool, domains: Sequence[str], seed: int
) -> list[BenchRequest]:
    """Give every request a prompt of its length; the domain is drawn evenly."""
    rng = random.Random(f"{seed}:domains")  # noqa: S311 - not cryptographic
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
    """Return the first file of each of the three patterns, or all files."""
    ours = [
        next((name for name in files if name.startswith(f"trace{number}")), None)
        for number in (1, 2, 3)
    ]
    return [name for name in ours if name] or list(files)


def load_traces(
    folder: Path | None, choices: Sequence[TraceChoice], seconds: float, seed: int
) -> dict[str, Trace]:
    """Return the windows of the chosen traces by name, neither thinned nor clipped.

    Args:
        folder: Holds ``NAME.csv[.gz]``; None makes the three patterns up.
        choices: Traces; empty takes the three patterns.
        seconds: Length of the window.
        seed: Of the synthetic traces.

    Raises:
        BenchError: A trace is missing, or its window is empty.
    """
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
