"""The long suite: adaptation inside one generation, on outputs of 1,800 tokens.

Before anything is measured the target continues a pool of prompts by itself; by the
share of distinct 4-grams of that continuation the lower third of the prompts is the
*repetitive* group, the upper third the *other* one. A block of a group and a
concurrency is one visit of every arm, in random order, to the same requests, each
served to its end; ratios to `static` are taken within a block. Outputs are sampled with
a seed; in a greedy pass of its own every arm's have to equal those of `none`. Arm
`exact` adapts to one request at a time: it has visits of one request only.

`by_position` are tokens per message of the stream by generated position
(`POSITION_EDGES`): a message is a step's tokens where the client keeps up, steps
without drafts included. `acceptance_length` is vLLM's, of verified drafts of all
sources.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.harness.arm import TRAINER_TIMEOUT_S
from bench.harness.arms import MEMORY_TOKENS, STATIC, Arm
from bench.harness.blocks import NONE, Cell, ratio_of
from bench.harness.client import RequestResult
from bench.harness.common import BenchError
from bench.harness.measure import measure_all
from bench.harness.options import engine_half, option, other_half
from bench.harness.server import (
    BROKEN,
    ServerError,
    ServerPool,
    VllmServer,
    sentence,
)
from bench.harness.session import Document
from bench.harness.stream import BenchRequest
from bench.harness.trainers import trainer_statuses
from bench.suites.control import demo_sizes
from bench.suites.serving import PolicyOptions, PolicyRun, conduct_policies

GROUPS = REPETITIVE, OTHER = "repetitive", "other"
POSITION_EDGES = (200, 500, 900, 1300)
"""Generated tokens at which the next bin of `by_position` begins."""
TEMPERATURE = 0.7
GRAM = 4
EXACT = "exact"
_STATIC_ARM = f"static{MEMORY_TOKENS}"
_ADAPTING = "shared", "memory_shared", EXACT, "everything"


@dataclass(frozen=True, kw_only=True)
class LongOptions(PolicyOptions):
    """Options of the suite of long outputs."""

    domains: tuple[str, ...] = option(("python", "c", "docs_en"), "of the prompts")
    # An engine on all cores leaves a trainer at niceness 10 two hundredths of one.
    engine_cpus: tuple[int, ...] = option(engine_half, "default: half of them")
    other_cpus: tuple[int, ...] = option(other_half, "API server, client, trainer")
    batches: tuple[int, ...] = option((1, 4, 8), "requests in flight")
    groups: tuple[str, ...] = option(GROUPS, "repetitive,other")
    minutes: float = option(
        40.0, "no block begins after so many; one of each is served"
    )
    output_tokens: int = option(1800, "per request")
    sorted_prompts: int = option(24, "prompts that are sorted into groups")
    greedy_requests: int = option(4, "requests of the greedy pass")
    max_model_len: int = 2048

    @property
    def arm_names(self) -> tuple[str, ...]:
        given = self.arms or (NONE, "static", "memory", *_ADAPTING)
        return tuple(_STATIC_ARM if name == "static" else name for name in given)

    @property
    def num_seqs(self) -> int:
        return self.max_num_seqs or max(self.batches)

    @property
    def calibrated(self) -> tuple[int, ...]:
        return ()

    @property
    def cells(self) -> list[Cell]:
        return [Cell(group, batch=b) for b in self.batches for group in self.groups]

    @property
    def size(self) -> str:
        return (
            f"{len(self.cells)} cells, outputs of {self.output_tokens} tokens; blocks "
            f"for {self.minutes:g} minutes"
        )

    def check(self) -> None:
        super().check()
        if not {NONE, _STATIC_ARM} <= set(self.arm_names):
            raise BenchError("--arms: needs none and static")
        if not self.groups or set(self.groups) - set(GROUPS):
            raise BenchError(f"--groups: of {', '.join(GROUPS)}")
        if min(self.batches, default=0) < 1 or self.num_seqs < max(self.batches):
            raise BenchError("--batches are whole numbers up to --max-num-seqs")
        if self.sorted_prompts < 3 or self.minutes <= 0 or self.greedy_requests < 1:
            raise BenchError(
                "--sorted-prompts is at least 3; --minutes and --greedy-requests are "
                "positive"
            )
        self.check_length(self.output_tokens)


def distinct_share(tokens: Sequence[int]) -> float:
    """Share of distinct 4-grams, 0 to 1."""
    grams = [tuple(tokens[i : i + GRAM]) for i in range(len(tokens) - GRAM + 1)]
    return len(set(grams)) / max(len(grams), 1)


def sort_prompts(shares: Sequence[float]) -> dict[str, list[int]]:
    """Places of the prompts of each group: the lower third, and the upper one."""
    order = sorted(range(len(shares)), key=lambda place: shares[place])
    third = len(order) // 3
    return {REPETITIVE: order[:third], OTHER: order[-third:]}


def by_position(results: Iterable[RequestResult]) -> list[float | None]:
    """Tokens per message of the stream, of each bin of generated positions."""
    tokens, messages = [0] * (len(POSITION_EDGES) + 1), [0] * (len(POSITION_EDGES) + 1)
    for result in results:
        at = 0
        for _, count in result.chunks:
            place = sum(at >= edge for edge in POSITION_EDGES)
            tokens[place] += count
            messages[place] += 1
            at += count
    pairs = zip(tokens, messages, strict=True)
    return [round(t / m, 4) if m else None for t, m in pairs]


def rows_of(visits: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row for every arm of every group and concurrency."""
    rows = []
    places = dict.fromkeys((v["group"], v["concurrency"]) for v in visits)
    for group, concurrency in places:
        here = [
            v for v in visits if (v["group"], v["concurrency"]) == (group, concurrency)
        ]
        logs: dict[str, dict[int, float]] = defaultdict(dict)
        for visit in here:
            logs[visit["arm"]][visit["block"]] = math.log(visit["output_tokens_per_s"])
        static = logs.get("static", {})
        for arm, mine in logs.items():
            both = sorted(mine.keys() & static.keys())
            ratio = (
                ratio_of([mine[b] - static[b] for b in both]) if both else (None,) * 3
            )
            own = [v for v in here if v["arm"] == arm]
            lengths = [v["acceptance_length"] for v in own if v["acceptance_length"]]
            columns = zip(*(v["by_position"] for v in own), strict=True)
            known = [[x for x in column if x is not None] for column in columns]
            rows.append(
                {
                    "arm": arm,
                    "concurrency": concurrency,
                    "group": group,
                    "output_tokens_per_s": _mean([math.exp(x) for x in mine.values()]),
                    "ratio_to_static": _round(ratio[0]),
                    "low": _round(ratio[1]),
                    "high": _round(ratio[2]),
                    "acceptance_length": _mean(lengths),
                    "by_position": [_mean(column) for column in known],
                    "blocks": len(mine),
                }
            )
    return rows


def _round(number: float | None) -> float | None:
    return None if number is None else round(number, 4)


def _mean(numbers: Sequence[float]) -> float | None:
    return _round(statistics.fmean(numbers)) if numbers else None


class LongDocument(Document):
    """The report: rows, and the visits that they rest on."""

    def __init__(self, options: LongOptions) -> None:
        body: dict[str, Any] = {
            "rows": [],
            "identical": None,
            "groups": {},
            "visits": [],
            "identity": {},
            "calibration": [],
            "schedules": {},
            "position_edges": list(POSITION_EDGES),
        }
        super().__init__(options.json, options.suite, options.to_json(), body)

    def write(self) -> None:
        self.data["rows"] = rows_of(self.data["visits"])
        told = [
            v["identical"]
            for arms in self.data["identity"].values()
            for v in arms.values()
        ]
        # None: not compared, or not yet re-scored.
        self.data["identical"] = None if None in told or not told else all(told)
        super().write()


def visits(arm: str, cell: Cell) -> bool:
    """True if a cell is served by an arm."""
    return arm != EXACT or cell.batch == 1


def has_trainer(run_dir: Path) -> bool:
    """True if a trainer has joined its engine."""
    states = [status.get("state") for status in trainer_statuses(run_dir)]
    return any(state not in (None, "starting") for state in states)


class LongRun(PolicyRun):
    """Sorts the prompts, compares greedy outputs, measures block after block."""

    options: LongOptions
    doc: LongDocument

    def visits(self, servers: ServerPool) -> None:
        options = self.options
        self._start(servers, self.arms)
        groups = self._sorted(servers)
        self._greedy(servers)
        rng, began = random.Random(f"{options.seed}:long"), time.monotonic()
        block = 0
        while not block or time.monotonic() < began + 60 * options.minutes:
            block += 1
            for cell in rng.sample(options.cells, len(options.cells)):
                if block > 1 and time.monotonic() > began + 60 * options.minutes:
                    return
                self.check_time(cell)
                prompts = groups[cell.domain]
                first = (block - 1) * int(cell.batch or 1)
                chosen = [
                    prompts[(first + i) % len(prompts)]
                    for i in range(int(cell.batch or 1))
                ]
                for arm in rng.sample(self.arms, len(self.arms)):
                    if not self.given_up(arm) and visits(arm.name, cell):
                        self._visit(servers, arm, cell, block, chosen)
                self.doc.write()

    def _warm_up(self, server: VllmServer) -> None:
        super()._warm_up(server)
        given = json.loads(server.options.speculative_config or "{}").get("tide", {})
        until = time.monotonic() + TRAINER_TIMEOUT_S
        while "adapt" in given.get("test_time", ()) and not has_trainer(
            Path(given["run_dir"])
        ):
            if time.monotonic() > until:
                raise ServerError(f"no trainer joined within {TRAINER_TIMEOUT_S:g} s")
            time.sleep(0.5)

    def _requests(self, prompts: Sequence[tuple[int, ...]]) -> list[BenchRequest]:
        length = self.options.output_tokens
        return [BenchRequest(i, "long", p, length) for i, p in enumerate(prompts)]

    def _sorted(self, servers: ServerPool) -> dict[str, list[tuple[int, ...]]]:
        """Prompts of each group, by what the target says to them."""
        options = self.options
        each = -(-options.sorted_prompts // len(options.domains))
        pool = [
            prompt[: options.max_input_tokens]
            for domain in options.domains
            for prompt in self.pool.sequence(domain, f"{options.seed}")[:each]
        ]
        self.progress.say(f"sorting {len(pool)} prompts")
        none = next(arm for arm in self.arms if arm.name == NONE)
        extra = {"temperature": TEMPERATURE, "seed": options.seed}
        found = measure_all(
            servers.get(none), self._requests(pool), max(options.batches), extra
        )
        shares = [distinct_share(result.token_ids) for result in found.results]
        groups = sort_prompts(shares)
        for name, places in groups.items():
            told = [round(shares[place], 3) for place in places]
            self.doc.data["groups"][name] = {
                "prompts": len(told),
                "distinct_4grams": told,
                "mean": round(statistics.fmean(told), 3),
            }
            self.progress.say(f"{name}: distinct 4-grams {told}")
        return {name: [pool[i] for i in places] for name, places in groups.items()}

    def _greedy(self, servers: ServerPool) -> None:
        """Outputs of every arm without chance, to be compared with those of `none`."""
        options = self.options
        prompts = self.pool.sequence(options.domains[0], f"{options.seed}:greedy")
        prompts = [p[: options.max_input_tokens] for p in prompts]
        requests = self._requests(prompts[: options.greedy_requests])
        for arm in self.arms:
            self.progress.say(f"greedy pass: {arm.name}")
            try:
                most = 1 if arm.name == EXACT else max(options.batches)
                found = measure_all(servers.get(arm), requests, most)
            except BROKEN as error:
                self.failed(servers, arm, "greedy pass", sentence(error))
                continue
            if failed := found.record["failed"]:
                self.doc.problem(f"greedy pass, {arm.name}: {failed} requests failed")
            self.book.add("greedy", arm.name, found.results)

    def _visit(
        self,
        servers: ServerPool,
        arm: Arm,
        cell: Cell,
        block: int,
        prompts: Sequence[tuple[int, ...]],
    ) -> None:
        requests, concurrency = self._requests(prompts), int(cell.batch or 1)
        extra = {
            "temperature": TEMPERATURE,
            "seed": self.options.seed + block,
            # An arm must not find another visit's prefixes cached.
            "cache_salt": f"{cell.name} {block} {arm.name}",
        }
        try:
            found = measure_all(servers.get(arm), requests, concurrency, extra)
        except BROKEN as error:
            self.failed(servers, arm, cell.name, sentence(error))
            return
        if failed := found.record["failed"]:
            self.doc.problem(f"{cell.name}, {arm.name}: {failed} requests failed")
            return
        name = "static" if STATIC.match(arm.name) else arm.name
        place = {"arm": name, "group": cell.domain, "concurrency": concurrency}
        steps = {"by_position": by_position(found.results), "block": block}
        self.doc.data["visits"].append({**place, **steps, **found.record})
        rate = found.record["output_tokens_per_s"]
        self.progress.say(f"{cell.name}, block {block}, {arm.name}: {rate} tokens/s")


def run(options: LongOptions) -> int:
    """Measures the cells; returns 0 only if every greedy output was right."""
    options.check()
    doc = LongDocument(options)
    status = conduct_policies(doc, options, LongRun, demo_sizes(options))
    for row in doc.data["rows"]:
        print(
            {
                key: row[key]
                for key in ("group", "concurrency", "arm", "ratio_to_static")
            }
        )
    return status
