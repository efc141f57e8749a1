"""Options of the control suites; arrival traces, and the requests of each cell.

Reading, the made-up patterns and thinning are the simulator's (`sim.arrivals`), so that
a server and the simulator can be given the same trace. A trace is windowed, thinned and
clipped, never stretched: stretching time would lower the load and with it destroy the
second-level bursts a trace is replayed for.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness.arms import (
    ABLATION_SUITE,
    CONTROL_ARMS,
    TIDE_MAX_TOKENS,
    make_arms,
    why_not,
)
from bench.harness.common import BenchError
from bench.harness.models import read_config
from bench.harness.options import CommonOptions, all_cpus, option
from bench.harness.ratios import SCALES
from bench.harness.stream import (
    BenchRequest,
    PromptPool,
    joined_prompt,
)
from bench.suites.turns import Cell
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
class RunOptions(CommonOptions):
    """Options of the control benchmark; `seconds` and lengths are per visit."""

    arms: tuple[str, ...] = option((), "none,static3,adaspec,...")
    batches: tuple[int, ...] = option((1, 2, 4, 8, 16, 32, 48), "requests in flight")
    domains: tuple[str, ...] = option(("matched", "unmatched"), "matched,unmatched")
    seconds: float = option(8.0, "window of a visit")
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
    max_input_tokens: int = 128
    max_output_tokens: int = 128
    drain_s: float = 180.0
    calibration_seconds: float = 3.0
    max_num_seqs: int | None = None
    max_model_len: int = 512
    engine_cpus: tuple[int, ...] = option(all_cpus, "default: all")
    other_cpus: tuple[int, ...] = option(all_cpus, "API server, client")
    control: Mapping[str, Any] = option(
        dict,
        "JSON put into tide.control of every tide arm; {target} in a string is the "
        "model size",
    )
    resident: int | None = option(None, "most servers alive at once")

    @property
    def limits(self) -> Limits:
        return Limits(
            max_input=self.max_input_tokens, max_output=self.max_output_tokens
        )

    @property
    def is_replay(self) -> bool:
        return self.suite != "control"

    @property
    def arm_names(self) -> tuple[str, ...]:
        default = ABLATION_SUITE if self.suite == "ablation" else CONTROL_ARMS
        return self.arms or default

    @property
    def num_seqs(self) -> int:
        if self.max_num_seqs is not None:
            return self.max_num_seqs
        return 48 if self.is_replay else max(self.batches)

    @property
    def size(self) -> str:
        cells = self.seconds * len(self.batches) * len(self.domains)
        if self.is_replay:
            cells = self.trace_seconds * (len(self.traces) or 3)
        every = self.repeats * len(self.arm_names) * max(1, len(self.model_sizes))
        minutes = cells * every / 60
        return f"at least {minutes:.0f} minutes, and a start of each server"

    def check(self) -> None:
        arms = make_arms(self.arm_names, self.control)
        super().check()
        runner = os.environ.get("VLLM_USE_V2_MODEL_RUNNER")
        for arm in arms:
            if not arm.is_adaptive:
                continue
            if why := why_not(arm.name, self.venv, runner, compiled=self.compile):
                raise BenchError(why)
        if not self.domains:
            raise BenchError("--domains names no domain")
        if not self.batches or min(self.batches) < 1:
            raise BenchError("--batches are positive whole numbers such as 1,4,16")
        if self.is_replay and not all(scale > 0 for scale in self.slo_scales):
            raise BenchError("--slo-scales are positive factors such as 0.8,1.0")
        for name, number in (
            ("--seconds", self.seconds),
            ("--repeats", self.repeats),
            ("--trace-seconds", self.trace_seconds),
            ("--load", self.load),
            ("--output-tokens", self.output_tokens - 1),
        ):
            if not number > 0:
                raise BenchError(f"{name} is too small")
        if self.keep is not None and not 0 < self.keep <= 1:
            raise BenchError(
                f"--keep is a probability above 0, at most 1; got {self.keep:g}"
            )
        if self.trace_dir is not None and not self.trace_dir.is_dir():
            raise BenchError(f"--trace-dir: there is no folder {self.trace_dir}")
        if not self.is_replay and self.num_seqs < max(self.batches):
            raise BenchError("--max-num-seqs is below the largest of --batches")
        self._check_lengths()

    def _check_lengths(self) -> None:
        limits = self.limits
        if limits.min_input > limits.max_input:
            raise BenchError("--max-input-tokens is below the shortest prompt")
        if limits.min_output > limits.max_output:
            raise BenchError("--max-output-tokens is below the shortest output")
        output = limits.max_output if self.is_replay else self.output_tokens
        most = limits.max_input + output + TIDE_MAX_TOKENS + 1
        if most > self.max_model_len:
            raise BenchError(
                f"--max-model-len {self.max_model_len} is too short for prompts of "
                f"{limits.max_input} and outputs of {output} tokens; at least {most}"
            )
        able = read_config(self.target).get(
            "max_position_embeddings", self.max_model_len
        )
        if self.max_model_len > able:
            raise BenchError(
                f"--max-model-len {self.max_model_len}: the model takes {able} tokens"
            )

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


MIXED = "mixed"


@dataclass(frozen=True, slots=True)
class Replay:
    """A trace ready to be sent, with what was done to it."""

    requests: Sequence[BenchRequest]
    keep: float
    offered_tokens_per_s: float
    unthinned: int


def closed_requests(
    options: RunOptions, pool: PromptPool, domain: str, repeat: int
) -> Callable[[int, int | None], BenchRequest]:
    """Endless sequence of a closed-loop cell."""
    domains = options.domains if domain == MIXED else (domain,)
    order = [pool.sequence(name, f"{options.seed}:{repeat}") for name in domains]

    def request_at(index: int, max_tokens: int | None) -> BenchRequest:
        place, which = divmod(index, len(domains))
        prompts = order[which]
        prompt = prompts[place % len(prompts)][: options.limits.max_input]
        length = options.output_tokens if max_tokens is None else max_tokens
        return BenchRequest(index, domains[which], prompt, length)

    return request_at


def closed_cells(options: RunOptions) -> list[Cell]:
    return [
        Cell(domain, batch=batch)
        for domain in options.domains
        for batch in options.batches
    ]


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
