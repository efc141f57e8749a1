#!/usr/bin/env python
"""Cost of a step outside the model, in CPU time and in tokens/s.

    scripts/bench/overhead.py --model DIR [--draft DIR] --json FILE
        [--requests 1,4,16,64] [--minutes 10]

The engines of all arms are resident, each with scheduler and worker in one process,
which serialises the messages between them. They run alternately in slices of a fraction
of a second on the same requests, in a random order in each pass over the arms
(`harness/time_slices.py`). The CPU time of the stepping thread is measured for each
decode step, so a busy host reduces the precision but does not bias the result.

    none          no speculation
    again         a second engine like `none`: the difference of two equal engines
    static        vLLM's speculation at length 1
    off           control alone; only steps without verified or proposed drafts count
    off_capture   everything but the trainer; the same steps, each of them captured
    full          the same server; only steps that verify and propose one draft token
                  for each request count, so `over_static_ms` compares with `static`

Without `--draft` a fresh draft is served. `stepping_cpu_ms` is a median over steps.
`over_none_ms` and `over_static_ms` are means, over groups of passes, of the difference
of medians. `tokens_ratio` is tokens/s over those of `none` on all steps. Each has a 95%
interval.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]
from bench.harness.blocks import ratio_of, rounded_ratio, t_975
from bench.harness.common import environment, write_json
from bench.harness.models import kv_cache_bytes, read_config
from bench.harness.server import ServerOptions, end_on_signals, leave_if_ended
from bench.harness.server import environment as server_environment
from bench.harness.time_slices import Engine, TimeSlice

NONE, AGAIN, STATIC, OFF, CAPTURE, FULL = ARMS = (
    "none",
    "again",
    "static",
    "off",
    "off_capture",
    "full",
)
LENGTH = 1024  # maximum context of a request
UNCOUNTED, GROUP = 2, 4  # passes over the arms
NOTHING = (None, None, None)
# Requests have a cache salt here, and by default salted requests are not captured.
NO_TRAINER = {"train": {"autostart": False}, "capture": {"salted": True}}
TIDE: dict[str, dict[str, Any]] = {
    OFF: {"preset": "control"},
    CAPTURE: NO_TRAINER,
    FULL: NO_TRAINER,
}


def counts(arm: str, step: tuple[float, int, int, int]) -> bool:
    """Return whether a decode step counts for an arm."""
    _, requests, verified, made = step
    if arm in (STATIC, FULL):
        return verified == made == requests
    return verified == made == 0


def difference(pairs: Sequence[tuple[float, float]]) -> Sequence[float | None]:
    """Return the mean of differences and its 95% interval (None if unknown)."""
    values = [a - b for a, b in pairs]
    if not values:
        return NOTHING
    mean = statistics.fmean(values)
    if len(values) == 1:
        return mean, None, None
    half = t_975(len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5
    return mean, mean - half, mean + half


class RingReaders(threading.Thread):
    """Thread that drains the rings, because dropping rows costs less than writing."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self._folder = folder
        self.rows = 0

    def run(self) -> None:
        from vllm_tide.transport.rendezvous import read_manifests
        from vllm_tide.transport.ring import RingReader

        readers: dict[str, RingReader] = {}
        while True:
            for manifest in read_manifests(self._folder):
                if manifest.ring and manifest.ring not in readers:
                    readers[manifest.ring] = RingReader.attach(manifest.ring)
            for reader in readers.values():
                reader.heartbeat()
                while (record := reader.read()) is not None:
                    self.rows += record.num_rows
            time.sleep(0.05)


class Run:
    """Engines of all arms, and their measurements."""

    def __init__(self, options: argparse.Namespace, stack: ExitStack) -> None:
        self.options, self._random = options, random.Random(options.seed)
        self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        self.config = read_config(options.model)
        self.engines: dict[str, Engine] = {}
        self._readers: dict[str, RingReaders] = {}
        for name in options.arms:
            self.engines[name] = engine = self._start(name)
            stack.callback(engine.close)
            print(f"{name}: ready", flush=True)

    def _start(self, name: str) -> Engine:
        o, run_dir = self.options, self._folder / name
        run_dir.mkdir(mode=0o700)
        config: dict[str, Any] | None = None
        if name not in (NONE, AGAIN):
            config = {"method": "eagle3", "num_speculative_tokens": 1}
            config["model"] = str(o.draft) if o.draft else "fresh"
            if name == STATIC:
                # vllm_tide provides "fresh", so it is loaded with its features off.
                tide = {"preset": "observe", "capture": {"enabled": False}}
                config |= {} if o.draft else {"tide": tide}
            else:
                config["tide"] = TIDE[name]
            if "tide" in config:
                config["tide"] = config["tide"] | {"run_dir": str(run_dir)}
        if name in (CAPTURE, FULL):
            self._readers[name] = RingReaders(run_dir)
            self._readers[name].start()
        size = 4 if o.dtype == "float32" else 2
        seqs = max(o.requests)
        memory = kv_cache_bytes(self.config, seqs, LENGTH // 2, size)
        server = ServerOptions(
            venv=Path(sys.prefix),
            model=o.model,
            log_path=self._folder / f"{name}.log",
            engine_cpus=tuple(sorted(os.sched_getaffinity(0)))[:1],
            kv_cache_bytes=memory,
        )
        arguments = ["--max-model-len", str(LENGTH), "--max-num-seqs", str(seqs)]
        arguments += ["--dtype", o.dtype, "--enforce-eager"]
        arguments += ["--kv-cache-memory-bytes", str(memory)]
        return Engine(
            o.model,
            None if config is None else json.dumps(config),
            arguments,
            server_environment(server),
            server.log_path,
        )

    def visit(self, requests: int, seconds: float) -> dict[str, list[TimeSlice]]:
        """Measure all arms at a number of requests; return the slices of each arm."""
        chance, vocab = random.Random(requests), self.config["vocab_size"]
        prompts = [
            [chance.randrange(100, vocab) for _ in range(chance.randrange(16, 96))]
            for _ in range(16 * requests)
        ]
        for name, engine in self.engines.items():
            engine.begin(prompts, requests, self.options.tokens, f"{name} {requests}")
        slices: dict[str, list[TimeSlice]] = {name: [] for name in self.engines}
        began, passes = time.monotonic(), 0
        seconds_each = self.options.turn * (1 + requests**0.5 / 4)
        while time.monotonic() - began < seconds or passes < UNCOUNTED + 2 * GROUP:
            leave_if_ended()
            for name in self._random.sample(list(slices), len(slices)):
                measured = self.engines[name].run_slice(seconds_each)
                if passes >= UNCOUNTED:
                    slices[name].append(measured)
            passes += 1
        for name, reader in self._readers.items():
            if not reader.rows:
                raise SystemExit(
                    f"{name}: no row was captured, so its figures are invalid"
                )
        return slices


def rows_of(requests: int, slices: dict[str, list[TimeSlice]]) -> list[dict[str, Any]]:
    """Return a row per arm; ratios and differences are taken in groups of passes."""
    medians: dict[str, dict[int, float]] = defaultdict(dict)
    rates: dict[str, dict[int, float]] = defaultdict(dict)
    steps: dict[str, list[float]] = defaultdict(list)
    for name, measured in slices.items():
        for group in range(len(measured) // GROUP):
            part = measured[group * GROUP :][:GROUP]
            ms = [s[0] for p in part for s in p.decode_steps if counts(name, s)]
            steps[name] += ms
            if len(ms) > 3:
                medians[name][group] = statistics.median(ms)
            tokens = sum(p.tokens for p in part)
            rates[name][group] = tokens / sum(p.seconds for p in part)
    rows = []
    for name in slices:
        ms = steps[name]
        row: dict[str, Any] = {"arm": name, "requests": requests, "steps": len(ms)}
        row["stepping_cpu_ms"] = round(statistics.median(ms), 3) if ms else None
        for other in (NONE, STATIC):
            shared = sorted(medians[name].keys() & medians[other].keys())
            over_ms = difference(
                [(medians[name][g], medians[other][g]) for g in shared]
            )
            names = (f"over_{other}_ms", f"{other}_ms_low", f"{other}_ms_high")
            row |= rounded_ratio(names, over_ms)
        logs = [math.log(rates[name][g] / rates[NONE][g]) for g in rates[name]]
        ratio = ratio_of(logs) if logs else NOTHING
        rows.append(row | rounded_ratio(("tokens_ratio", "low", "high"), ratio))
    return rows


def line_of(row: dict[str, Any]) -> str:
    """Format a row as one line."""

    def text(*keys: str) -> str:
        mean, low, high = ("-" if (x := row[k]) is None else f"{x:.3f}" for k in keys)
        return f"{mean} [{low}, {high}]"

    return (
        f"{row['requests']:3d} requests, {row['arm']:11} {row['stepping_cpu_ms']} ms "
        f"({row['steps']} steps), over none "
        f"{text('over_none_ms', 'none_ms_low', 'none_ms_high')}, over static "
        f"{text('over_static_ms', 'static_ms_low', 'static_ms_high')}; tokens/s over "
        f"none {text('tokens_ratio', 'low', 'high')}"
    )


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure and return the report; write it after each number of requests."""
    rows: list[dict[str, Any]] = []
    report: dict[str, Any] = {}
    with ExitStack() as stack:
        run = Run(options, stack)
        for requests in options.requests:
            seconds = 60 * options.minutes / len(options.requests)
            rows += rows_of(requests, run.visit(requests, seconds))
            print(*map(line_of, rows[-len(run.engines) :]), sep="\n", flush=True)
            report = {
                "rows": rows,
                "model": options.model.name,
                "dtype": options.dtype,
                "environment": environment({"minutes": options.minutes}),
            }
            if options.json:
                write_json(options.json, report)
    return report


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])

    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument(
        "--draft", type=Path, help="draft folder (default: a fresh draft)"
    )
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--requests", type=numbers, default="1,4,16,64")
    parser.add_argument("--arms", type=lambda text: text.split(","), default=list(ARMS))
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument(
        "--turn", type=float, default=0.25, help="approximate seconds of a slice"
    )
    parser.add_argument(
        "--tokens", type=int, default=192, help="output tokens per request"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the report here")
    options = parser.parse_args(argv)
    if unknown := set(options.arms) - set(ARMS) or NONE not in options.arms:
        parser.error(
            f"--arms: must include {NONE}; choose from {', '.join(ARMS)} ({unknown})"
        )
    measure(options)
    return 0


if __name__ == "__main__":
    end_on_signals()
    sys.exit(main())
