"""Interleaved comparison of speculation policies, for hosts with other load.

    scripts/bench/run.py control --model DIR --draft DIR --json FILE [--minutes 30]

The engines of all arms are resident and run alternately in slices of about a quarter of
a second, which end between two steps (`harness/time_slices.py`). Each pass over the
arms has a random order. All arms serve the same requests; a new request starts when one
ends, so the batch size is constant. Other load on the host then affects all arms alike,
while two equal servers, measured one after the other, may differ by 10%. There is no
HTTP and no API server. The first passes of a visit of a cell, which prefill the whole
batch, are not counted; the controller adapts to the cell within the visit. Groups of
passes are blocks (`harness/blocks.py`). With `--cold` each visit has a new engine
without learnt state for every arm with control, and all passes count.

Prompts are those of the quickstart, in the model's chat template: `home` is the
training domain of the draft, `shifted` is another one, `mixed` is both. Outputs are
greedy, in float32, and compared. The verdict lists whether control passes its bars: in
no cell slower than 0.98 of the best arm or 0.985 of `none` (by the upper end of the
interval), over all cells 1.05 of the best static length and 1.03 of vLLM's schedule.

`vllm_dynamic` is tuned first, on separate passes with mixed prompts. There are two more
arms: `off`, control with its defaults and a draft with useless proposals, and `again`,
a second engine like `none`, which measures the difference of two equal engines. The
cost of control with a useless draft is

    scripts/bench/run.py control ... --arms none,again,off --domains home --learns 60
"""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.harness.arms import Arm, Schedule, make_arm, make_arms, speculative_config
from bench.harness.blocks import (
    MIXED,
    NONE,
    cell_rows,
    over_cells,
    rounded_ratio,
)
from bench.harness.common import BenchError, clock_text, environment
from bench.harness.models import DEMO, kv_cache_bytes, read_config, targets_of
from bench.harness.server import ServerOptions, leave_if_ended
from bench.harness.server import environment as server_environment
from bench.harness.stream import PromptPool, load_pool
from bench.harness.time_slices import Engine, TimeSlice
from json_text import json_text

OFF, AGAIN, DYNAMIC = "off", "again", "vllm_dynamic"
UNCOUNTED, GROUP = 3, 8  # passes over the arms
# Options that a report includes.
REPORTED_OPTIONS = ["domains", "visits", "cold", "learns", "minutes", "tokens", "seed"]
LENGTH = 512
MAX_INPUT = 128
KNOWN_DOMAINS = ("home", "shifted")
# Bars of the verdict: ratios of control's tokens/s.
OF_BEST, OF_NONE, OF_STATIC, OF_DYNAMIC = 0.98, 0.985, 1.05, 1.03


def closed_prompts(
    pool: PromptPool, domain: str, seed: str, count: int
) -> list[list[int]]:
    """Return prompts of a closed loop, repeated; mixed domains alternate."""
    domains = KNOWN_DOMAINS if domain == MIXED else (domain,)
    order = [pool.sequence(name, seed) for name in domains]
    chosen = []
    for index in range(count):
        place, which = divmod(index, len(domains))
        prompts = order[which]
        chosen.append(list(prompts[place % len(prompts)][:MAX_INPUT]))
    return chosen


def best_lengths(rates: Mapping[tuple[int, int], float]) -> dict[int, int]:
    """Return the best static length of each batch size, from rates by both.

    On a tie the shorter length is returned: it needs less memory and verifies less.
    """
    return {
        batch: max(
            sorted(k for b, k in rates if b == batch),
            key=lambda k, batch=batch: rates[batch, k],
        )
        for batch in sorted({batch for batch, _ in rates})
    }


def schedule_of(
    best: Mapping[int, int], largest_batch: int
) -> list[tuple[int, int, int]]:
    """Return the schedule: each batch size has the length of the nearest measured one.

    Nearest by ratio (the boundary is the geometric mean), since cost and gain change
    with the logarithm of the batch size rather than with its difference.
    """
    batches = sorted(best)
    ends = [math.isqrt(a * b) for a, b in zip(batches, batches[1:], strict=False)]
    ends.append(max(largest_batch, batches[-1]))
    ranges: list[tuple[int, int, int]] = []
    first = 1
    for batch, end in zip(batches, ends, strict=True):
        length = best[batch]
        if ranges and ranges[-1][2] == length:
            ranges[-1] = (ranges[-1][0], end, length)
        else:
            ranges.append((first, end, length))
        first = end + 1
    return ranges


def useless_draft(draft: Path, folder: Path) -> Path:
    """Write a copy of a draft with the weights of `fc` permuted."""
    import torch
    from safetensors.torch import load_file, save_file

    copy = folder / "useless"
    copy.mkdir()
    (copy / "config.json").write_bytes((draft / "config.json").read_bytes())
    tensors = load_file(draft / "model.safetensors")
    order = torch.Generator().manual_seed(0)
    weight = tensors["fc.weight"]
    shuffled = weight.flatten()[torch.randperm(weight.numel(), generator=order)]
    tensors["fc.weight"] = shuffled.reshape(weight.shape)
    save_file(tensors, copy / "model.safetensors")
    return copy


def _arm(name: str) -> Arm:
    return make_arm({OFF: "adaspec", AGAIN: NONE}.get(name, name))


class Run:
    """Engines of all arms, and their measurements.

    Attributes:
        visits: One entry per arm and group of passes.
        compared: Requests that more than one arm has finished.
        differing: Compared requests with different outputs.
    """

    def __init__(self, options: argparse.Namespace, stack: ExitStack) -> None:
        self.options, self._random = options, random.Random(options.seed)
        self.visits: list[dict[str, Any]] = []
        self.compared = self.differing = 0
        self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        [self.target] = targets_of(options.model, [], self._folder, print)
        self.pool = load_pool(options.prompts, self.target.path, KNOWN_DOMAINS)
        self.engines: dict[str, Engine] = {}
        self._stack = stack
        self.schedule: Schedule | None = None
        for name in sorted(options.arms, key=DYNAMIC.__eq__):
            if name == DYNAMIC:
                self.schedule = self._tuned()
                print(f"{name}: {self.schedule}")
            self._begin(name)

    def restart(self) -> None:
        """Restart the engines with control, without learnt state."""
        for name in self.engines:
            if _arm(name).control is not None:
                self.engines[name].close()
                self._begin(name)

    def _begin(self, name: str) -> None:
        self.engines[name] = self._start(name)
        self._stack.callback(self.engines[name].close)
        print(f"{name}: ready", flush=True)

    def _tuned(self) -> Schedule:
        """Return vLLM's schedule from the rates of the static lengths at each batch."""
        arms = [make_arm(name) for name in self.engines if name not in (OFF, AGAIN)]
        lengths = {arm.name: arm.num_tokens for arm in arms if arm.is_static}
        rates = {}
        for batch in self.options.batches:
            slices = self.visit(batch, MIXED, -1, 0.0, lengths)
            for name, length in lengths.items():
                tokens = sum(s.tokens for s in slices[name])
                rates[batch, length] = tokens / sum(s.seconds for s in slices[name])
        return schedule_of(best_lengths(rates), max(self.options.batches))

    def _start(self, name: str) -> Engine:
        o, folder = self.options, self._folder
        own = Path(tempfile.mkdtemp(prefix=name, dir=folder))
        draft = useless_draft(o.draft, own) if name == OFF else o.draft
        seqs = max(o.batches)
        memory = kv_cache_bytes(read_config(self.target.path), seqs, LENGTH, 4)
        cpus = tuple(sorted(os.sched_getaffinity(0)))
        server = ServerOptions(
            venv=Path(sys.prefix),
            model=self.target.path,
            log_path=folder / f"{name}.log",
            engine_cpus=cpus,
            kv_cache_bytes=memory,
            extra_env={"XDG_CACHE_HOME": str(own)} if o.cold else {},
        )
        arguments = ["--max-model-len", str(LENGTH), "--max-num-seqs", str(seqs)]
        arguments += ["--dtype", "float32", "--enforce-eager"]
        arguments += ["--kv-cache-memory-bytes", str(memory)]
        return Engine(
            self.target.path,
            speculative_config(_arm(name), draft, own, self.schedule),
            arguments,
            server_environment(server),
            server.log_path,
        )

    def visit(
        self,
        batch: int,
        domain: str,
        number: int,
        seconds: float,
        arms: Collection[str] = (),
    ) -> dict[str, list[TimeSlice]]:
        """Measure a cell for `seconds`; incomplete groups do not count.

        Args:
            number: Index of the visit of this cell; -1: tuning, nothing counts.
            arms: Arms to measure; empty: all.

        Returns:
            Slices of each arm without the uncounted first passes.
        """
        o = self.options
        seed = f"{o.seed}:{number}:{batch}"
        prompts = closed_prompts(self.pool, domain, seed, 64 * batch)
        order = list(arms or self.engines)
        for name in order:
            engine = self.engines[name]
            engine.begin(prompts, batch, o.tokens, f"{domain} {batch} {number}")
        slice_s = o.turn * (1 + batch**0.5 / 4)
        learns = UNCOUNTED if number else max(o.learns, UNCOUNTED)
        learns = 0 if o.cold and number >= 0 else learns
        began, passes = time.monotonic(), 0
        outputs: dict[int, list[int]] = defaultdict(list)
        group: dict[str, list[TimeSlice]] = {}
        counted: dict[str, list[TimeSlice]] = {name: [] for name in order}
        while time.monotonic() - began < seconds or passes < learns + 2 * GROUP:
            leave_if_ended()
            if passes >= learns and (passes - learns) % GROUP == 0:
                group = {name: [] for name in order}
            for name in self._random.sample(order, len(order)):
                measured = self.engines[name].run_slice(slice_s)
                if passes >= learns:
                    group[name].append(measured)
                    counted[name].append(measured)
                for request, output in measured.finished:
                    outputs[request].append(output)
            passes += 1
            if number >= 0 and passes > learns and (passes - learns) % GROUP == 0:
                self._add_group(batch, domain, group)
        self.compared += sum(len(values) > 1 for values in outputs.values())
        self.differing += sum(len(set(values)) > 1 for values in outputs.values())
        return counted

    def _add_group(
        self, batch: int, domain: str, group: dict[str, list[TimeSlice]]
    ) -> None:
        cell = {"batch": batch, "domain": domain}
        block = sum(v.items() >= {**cell, "arm": NONE}.items() for v in self.visits)
        for name, slices in group.items():
            tokens, seconds = (
                sum(getattr(s, part) for s in slices) for part in ("tokens", "seconds")
            )
            self.visits.append(
                {
                    **cell,
                    "arm": name,
                    "block": block,
                    "output_tokens_per_s": tokens / seconds,
                    "tokens": tokens,
                    "tokens_per_step": tokens / sum(s.steps for s in slices),
                    "cpu_s": sum(s.cpu_s for s in slices),
                }
            )


def format_rows(rows: Sequence[dict[str, Any]]) -> str:
    """Format the rows, one line each."""

    def format_ratio(row: dict[str, Any], ratio: str, name: str) -> str:
        low, high = row[f"{name}low"], row[f"{name}high"]
        return f"{row[ratio]:.3f}" + (f" [{low:.3f}, {high:.3f}]" if low else "")

    return "\n".join(
        f"{row['requests']:3d} requests, {row['domain']:8} {row['arm']:12} "
        f"{row['output_tokens_per_s']:7.1f} tokens/s, "
        f"{format_ratio(row, 'ratio_to_none', '')} of none, "
        f"{format_ratio(row, 'ratio_to_best', 'best_')} of {row['best_arm']}"
        for row in rows
    )


def overall(visits: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return mean ratios over cells: each arm to none, and control (off) to each."""
    arms = list(dict.fromkeys(visit["arm"] for visit in visits))
    mine = next((name for name in ("adaspec", OFF) if name in arms), arms[-1])
    rows = []
    for arm in arms:
        row: dict[str, Any] = {"arm": arm}
        names = ("ratio_to_none", "low", "high")
        row |= rounded_ratio(names, over_cells(visits, arm, NONE))
        names = (f"{mine}_over_it", "over_low", "over_high")
        rows.append(row | rounded_ratio(names, over_cells(visits, mine, arm)))
    return sorted(rows, key=lambda row: -row["ratio_to_none"])


def verdict(rows: Sequence[dict[str, Any]], means: Sequence[dict[str, Any]]) -> Any:
    """Return, for each bar of control, the value and whether it passes."""
    cells = [row for row in rows if row["arm"] == "adaspec"]
    if not cells:
        return {}
    over = {row["arm"]: row["adaspec_over_it"] for row in means}
    static = [over[arm] for arm in over if arm.startswith("static")]
    values = {
        "of_best_arm": (
            min(r["best_high"] or r["ratio_to_best"] for r in cells),
            OF_BEST,
        ),
        "of_none": (min(r["high"] or r["ratio_to_none"] for r in cells), OF_NONE),
        "of_best_static": (min(static, default=math.inf), OF_STATIC),
        "of_vllm_dynamic": (over.get(DYNAMIC, math.inf), OF_DYNAMIC),
    }
    return {
        name: {"found": value, "bar": bar, "passes": value >= bar}
        for name, (value, bar) in values.items()
        if value < math.inf
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure and return the report; with `--json`, write it after each visit."""
    began = time.monotonic()
    cells = [(b, d) for b in options.batches for d in options.domains]
    with ExitStack() as stack:
        run = Run(options, stack)
        ahead = [(*c, number) for number in range(options.visits) for c in cells]
        ahead.sort(key=lambda visit: (visit[2], run._random.random()))
        for place, (batch, domain, number) in enumerate(ahead):
            if options.cold and place:  # the engines of the first visit are new
                run.restart()
            left = 60 * options.minutes - (time.monotonic() - began)
            run.visit(batch, domain, number, left / (len(ahead) - place))
            rows = cell_rows(run.visits)
            here = [r for r in rows if (r["requests"], r["domain"]) == (batch, domain)]
            print(format_rows(here), flush=True)
            facts = {"target": run.target.facts, "turn_s": options.turn}
            means = overall(run.visits)
            report = {
                "cells": rows,
                "overall": means,
                "verdict": verdict(rows, means),
                "schedules": {run.target.name: run.schedule} if run.schedule else {},
                "identity": {"compared": run.compared, "differing": run.differing},
                "visits": run.visits,
                "options": {
                    "target": run.target.name,
                    **{name: getattr(options, name) for name in REPORTED_OPTIONS},
                },
                "environment": environment(facts),
            }
            if options.json:
                options.json.write_text(json_text(report))
    return report


def parser_of() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="run.py control", description=(__doc__ or "").splitlines()[0]
    )
    arms = f"none,static1,static3,static5,{DYNAMIC},threshold,adaspec"
    domains = ",".join((*KNOWN_DOMAINS, MIXED))

    def names(text: str) -> list[str]:
        return list(dict.fromkeys(filter(None, text.split(","))))

    def numbers(text: str) -> list[int]:
        return [int(part) for part in names(text)]

    parser.add_argument(
        "--model", type=Path, required=True, help="folder of the served model"
    )
    parser.add_argument(
        "--draft", type=Path, required=True, help="folder of its EAGLE-3 draft"
    )
    parser.add_argument("--prompts", type=Path, default=DEMO / "chat_prompts")
    parser.add_argument("--arms", type=names, default=arms)
    parser.add_argument("--domains", type=names, default=domains)
    parser.add_argument("--batches", type=numbers, default="1,2,4,8,16")
    parser.add_argument("--minutes", type=float, default=30.0)
    text = "passes over the arms in a cell's first visit that are not counted"
    parser.add_argument("--learns", type=int, default=UNCOUNTED, help=text)
    parser.add_argument("--visits", type=int, default=2, help="visits of each cell")
    text = "restart control at each visit; all passes count"
    parser.add_argument("--cold", action="store_true", help=text)
    parser.add_argument(
        "--turn", type=float, default=0.2, help="seconds of a slice at batch 0"
    )
    parser.add_argument(
        "--tokens", type=int, default=64, help="output tokens per request"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the report here")
    return parser


def checked(options: argparse.Namespace) -> argparse.Namespace:
    """Validate the options and print the plan."""
    if NONE not in options.arms:
        raise SystemExit("--arms: must include none")
    if options.visits < 1:
        raise SystemExit(f"--visits: must be at least 1, not {options.visits}")
    try:
        make_arms([name for name in options.arms if name not in (OFF, AGAIN)])
    except BenchError as error:
        raise SystemExit(f"--arms: {error}") from None
    cells = len(options.batches) * len(options.domains)
    expected = clock_text(60 * options.minutes)
    print(
        f"plan: {len(options.arms)} engines, {cells} cells, {options.visits} visits "
        f"each; expected {expected}",
        flush=True,
    )
    return options


def main(argv: Sequence[str]) -> int:
    """Run the comparison; return exit status 1 if outputs differ, else 0."""
    report = measure(checked(parser_of().parse_args(argv)))
    print(*report["overall"], report["identity"], report["verdict"], sep="\n")
    return int(report["identity"]["differing"] > 0)
