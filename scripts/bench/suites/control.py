"""Policies of speculation, turn by turn: for hosts that are never quiet.

    scripts/bench/run.py control --model DIR --draft DIR --json FILE [--minutes 30]

Every arm's engine is up at once; they take turns of about a quarter of a second,
between two steps (`harness/engine_turns.py`), in a new order each round, on the same
requests: as many as the batch are in flight, new ones come as others end. So what the
host does meanwhile meets all arms alike, where two equal servers, measured one after
the other, may differ by 10%. There is no HTTP and no API server in it. The first rounds
of a visit of a cell, with the prompts of the whole batch, are not counted; what is new
of the cell control learns within the visit. Groups of rounds are blocks
(`harness/blocks.py`). With `--cold` each visit has a new engine of every arm that has
control, which knows nothing yet, and all rounds count.

Prompts are those of the quickstart, over the model's chat template: `home` is what the
draft was trained on, `shifted` is not, `mixed` is both. Outputs are greedy, in float32,
and compared. The verdict says whether control passes its bars: in no cell slower than
0.98 of the best arm or 0.985 of `none` (by the upper end of the interval), over all
cells 1.05 of the best static length and 1.03 of vLLM's own schedule.

`vllm_dynamic` is tuned first, on rounds of its own with mixed prompts. Two more arms:
`off`, control with its defaults and a draft that proposes nonsense, and `again`, a
second engine of `none`: what this machine calls equal. So what control costs while its
draft is of no use is

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
from bench.harness.engine_turns import Engine, Turn
from bench.harness.models import DEMO, kv_cache_bytes, read_config, targets_of
from bench.harness.server import ServerOptions, leave_if_ended
from bench.harness.server import environment as server_environment
from bench.harness.stream import PromptPool, load_pool
from json_text import json_text

OFF, AGAIN, DYNAMIC = "off", "again", "vllm_dynamic"
UNCOUNTED, GROUP = 3, 8  # rounds
# Options that a report names.
KEPT = ["domains", "visits", "cold", "learns", "minutes", "tokens", "seed"]
LENGTH = 512
MOST_INPUT = 128
KNOWN_DOMAINS = ("home", "shifted")
# Of control's tokens/s: bars of the verdict.
OF_BEST, OF_NONE, OF_STATIC, OF_DYNAMIC = 0.98, 0.985, 1.05, 1.03


def closed_prompts(
    pool: PromptPool, domain: str, seed: str, count: int
) -> list[list[int]]:
    """Prompts of a closed loop, again when all were sent; of mixed domains in turn."""
    domains = KNOWN_DOMAINS if domain == MIXED else (domain,)
    order = [pool.sequence(name, seed) for name in domains]
    found = []
    for index in range(count):
        place, which = divmod(index, len(domains))
        prompts = order[which]
        found.append(list(prompts[place % len(prompts)][:MOST_INPUT]))
    return found


def best_lengths(rates: Mapping[tuple[int, int], float]) -> dict[int, int]:
    """Static length that was best at each batch size, of rates by (batch, length).

    The shorter one of equals: it needs less memory and verifies less.
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
    """Schedule: each batch size takes the nearest measured one's length.

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
    """A copy of a draft whose `fc` reads the target's features in a wrong order."""
    import torch
    from safetensors.torch import load_file, save_file

    made = folder / "useless"
    made.mkdir()
    (made / "config.json").write_bytes((draft / "config.json").read_bytes())
    tensors = load_file(draft / "model.safetensors")
    order = torch.Generator().manual_seed(0)
    weight = tensors["fc.weight"]
    shuffled = weight.flatten()[torch.randperm(weight.numel(), generator=order)]
    tensors["fc.weight"] = shuffled.reshape(weight.shape)
    save_file(tensors, made / "model.safetensors")
    return made


def _arm(name: str) -> Arm:
    return make_arm({OFF: "adaspec", AGAIN: NONE}.get(name, name))


class Run:
    """The engines, and what was measured of them.

    Attributes:
        visits: An arm's rounds of a group each.
        differing: Requests whose outputs differ between arms, of `compared`, which
            more than one arm has ended.
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

    def anew(self) -> None:
        """Engines with control begin again, and know nothing."""
        for name in self.engines:
            if _arm(name).control is not None:
                self.engines[name].close()
                self._begin(name)

    def _begin(self, name: str) -> None:
        self.engines[name] = self._start(name)
        self._stack.callback(self.engines[name].close)
        print(f"{name}: ready", flush=True)

    def _tuned(self) -> Schedule:
        """The schedule of vLLM, by what static lengths reach at each batch."""
        arms = [make_arm(name) for name in self.engines if name not in (OFF, AGAIN)]
        lengths = {arm.name: arm.num_tokens for arm in arms if arm.is_static}
        rates = {}
        for batch in self.options.batches:
            turns = self.visit(batch, MIXED, -1, 0.0, lengths)
            for name, length in lengths.items():
                tokens = sum(turn.tokens for turn in turns[name])
                rates[batch, length] = tokens / sum(t.seconds for t in turns[name])
        return schedule_of(best_lengths(rates), max(self.options.batches))

    def _start(self, name: str) -> Engine:
        o, folder = self.options, self._folder
        own = Path(tempfile.mkdtemp(prefix=name, dir=folder))
        draft = useless_draft(o.draft, own) if name == OFF else o.draft
        seqs = max(o.batches)
        memory = kv_cache_bytes(read_config(self.target.path), seqs, LENGTH, 4)
        every = tuple(sorted(os.sched_getaffinity(0)))
        served = ServerOptions(
            venv=Path(sys.prefix),
            model=self.target.path,
            log_path=folder / f"{name}.log",
            engine_cpus=every,
            kv_cache_bytes=memory,
            extra_env={"XDG_CACHE_HOME": str(own)} if o.cold else {},
        )
        words = ["--max-model-len", str(LENGTH), "--max-num-seqs", str(seqs)]
        words += ["--dtype", "float32", "--enforce-eager"]
        words += ["--kv-cache-memory-bytes", str(memory)]
        return Engine(
            self.target.path,
            speculative_config(_arm(name), draft, own, self.schedule),
            words,
            server_environment(served),
            served.log_path,
        )

    def visit(
        self,
        batch: int,
        domain: str,
        number: int,
        seconds: float,
        arms: Collection[str] = (),
    ) -> dict[str, list[Turn]]:
        """Measure a cell for so long; groups that are not whole do not count.

        Args:
            number: Of the visits of this cell; -1: none of them, nothing counts.
            arms: Empty: all.

        Returns:
            Turns of all rounds but the first ones.
        """
        o = self.options
        seed = f"{o.seed}:{number}:{batch}"
        prompts = closed_prompts(self.pool, domain, seed, 64 * batch)
        order = list(arms or self.engines)
        for name in order:
            engine = self.engines[name]
            engine.begin(prompts, batch, o.tokens, f"{domain} {batch} {number}")
        turn_s = o.turn * (1 + batch**0.5 / 4)
        learns = UNCOUNTED if number else max(o.learns, UNCOUNTED)
        learns = 0 if o.cold and number >= 0 else learns
        began, rounds = time.monotonic(), 0
        outputs: dict[int, list[int]] = defaultdict(list)
        group: dict[str, list[Turn]] = {}
        counted: dict[str, list[Turn]] = {name: [] for name in order}
        while time.monotonic() - began < seconds or rounds < learns + 2 * GROUP:
            leave_if_ended()
            if rounds >= learns and (rounds - learns) % GROUP == 0:
                group = {name: [] for name in order}
            for name in self._random.sample(order, len(order)):
                turn = self.engines[name].turn(turn_s)
                if rounds >= learns:
                    group[name].append(turn)
                    counted[name].append(turn)
                for request, output in turn.finished:
                    outputs[request].append(output)
            rounds += 1
            if number >= 0 and rounds > learns and (rounds - learns) % GROUP == 0:
                self._count(batch, domain, group)
        self.compared += sum(len(found) > 1 for found in outputs.values())
        self.differing += sum(len(set(found)) > 1 for found in outputs.values())
        return counted

    def _count(self, batch: int, domain: str, group: dict[str, list[Turn]]) -> None:
        cell = {"batch": batch, "domain": domain}
        block = sum(v.items() >= {**cell, "arm": NONE}.items() for v in self.visits)
        for name, turns in group.items():
            tokens, seconds = (
                sum(getattr(turn, part) for turn in turns)
                for part in ("tokens", "seconds")
            )
            self.visits.append(
                {
                    **cell,
                    "arm": name,
                    "block": block,
                    "output_tokens_per_s": tokens / seconds,
                    "tokens": tokens,
                    "tokens_per_step": tokens / sum(turn.steps for turn in turns),
                    "cpu_s": sum(turn.cpu_s for turn in turns),
                }
            )


def words_of(rows: Sequence[dict[str, Any]]) -> str:
    """The rows, a line each."""

    def told(row: dict[str, Any], ratio: str, name: str) -> str:
        low, high = row[f"{name}low"], row[f"{name}high"]
        return f"{row[ratio]:.3f}" + (f" [{low:.3f}, {high:.3f}]" if low else "")

    return "\n".join(
        f"{row['requests']:3d} requests, {row['domain']:8} {row['arm']:12} "
        f"{row['output_tokens_per_s']:7.1f} tokens/s, "
        f"{told(row, 'ratio_to_none', '')} of none, "
        f"{told(row, 'ratio_to_best', 'best_')} of {row['best_arm']}"
        for row in rows
    )


def overall(visits: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each arm over none, and of control (off) over each: means over all cells."""
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
    found = {
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
        for name, (value, bar) in found.items()
        if value < math.inf
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The report; it is also written after each visit, if there is a file for it."""
    began = time.monotonic()
    cells = [(b, d) for b in options.batches for d in options.domains]
    with ExitStack() as stack:
        run = Run(options, stack)
        ahead = [(*c, number) for number in range(options.visits) for c in cells]
        ahead.sort(key=lambda visit: (visit[2], run._random.random()))
        for place, (batch, domain, number) in enumerate(ahead):
            if options.cold and place:  # those of the first visit are new
                run.anew()
            left = 60 * options.minutes - (time.monotonic() - began)
            run.visit(batch, domain, number, left / (len(ahead) - place))
            rows = cell_rows(run.visits)
            here = [r for r in rows if (r["requests"], r["domain"]) == (batch, domain)]
            print(words_of(here), flush=True)
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
                    **{name: getattr(options, name) for name in KEPT},
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
        return [int(word) for word in names(text)]

    parser.add_argument("--model", type=Path, required=True, help="folder to serve")
    parser.add_argument("--draft", type=Path, required=True, help="its EAGLE-3 draft")
    parser.add_argument("--prompts", type=Path, default=DEMO / "chat_prompts")
    parser.add_argument("--arms", type=names, default=arms)
    parser.add_argument("--domains", type=names, default=domains)
    parser.add_argument("--batches", type=numbers, default="1,2,4,8,16")
    parser.add_argument("--minutes", type=float, default=30.0)
    text = "rounds of a cell's first visit that are not counted"
    parser.add_argument("--learns", type=int, default=UNCOUNTED, help=text)
    parser.add_argument("--visits", type=int, default=2, help="of each cell")
    text = "begin control anew at each visit; all rounds count"
    parser.add_argument("--cold", action="store_true", help=text)
    parser.add_argument("--turn", type=float, default=0.2, help="seconds, at batch 0")
    parser.add_argument("--tokens", type=int, default=64, help="of an output")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the figures here")
    return parser


def checked(options: argparse.Namespace) -> argparse.Namespace:
    """Options that can be run; says what will be."""
    if NONE not in options.arms:
        raise SystemExit("--arms: needs none")
    if options.visits < 1:
        raise SystemExit(f"--visits: must be at least 1, not {options.visits}")
    try:
        known = [name for name in options.arms if name not in (OFF, AGAIN)]
        make_arms(known)
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
    """Run it; returns the exit status: 1 if outputs differ."""
    report = measure(checked(parser_of().parse_args(argv)))
    print(*report["overall"], report["identity"], report["verdict"], sep="\n")
    return int(report["identity"]["differing"] > 0)
