"""The long suite: adaptation within one generation, on outputs of 1,800 tokens.

First the target continues a pool of prompts without speculation. By the share of
distinct 4-grams of the continuation, the lower third of the prompts is the *repetitive*
group, the upper third the *other* one. A block of a group and a concurrency is one
visit of every arm, in random order, with the same requests, each served to its end.
Ratios to `static` are taken within a block. Outputs are sampled with a seed; in a
separate greedy pass the outputs of every arm must equal those of `none`. Arm `exact`
adapts to one request at a time, so it has only visits of one request.

`by_position` is the number of tokens per message of the stream by generated position
(`POSITION_EDGES`). If the client is fast enough, a message has the tokens of one step,
including steps without drafts. `acceptance_length` is vLLM's, of verified drafts of all
sources.
"""

from __future__ import annotations

import json
import math
import random
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.harness.arm import TRAINER_TIMEOUT_S, has_trainer
from bench.harness.arms import (
    MEMORY_TOKENS,
    STATIC,
    TIDE_MAX_TOKENS,
    Arm,
    make_arms,
    speculative_config,
)
from bench.harness.blocks import NONE, ratio_of
from bench.harness.client import RequestResult
from bench.harness.common import BenchError, OutOfTimeError, Progress, rounded
from bench.harness.identity import identity_of, identity_problems
from bench.harness.measure import (
    CLIENT_NICE,
    WARM_UP_TOKENS,
    measure_all,
    warm_up,
)
from bench.harness.models import (
    DEMO,
    Target,
    kv_cache_bytes,
    read_config,
    targets_of,
)
from bench.harness.options import ELEMENT_BYTES, CommonOptions, option
from bench.harness.server import (
    BROKEN,
    MIB,
    ServerError,
    ServerOptions,
    ServerPool,
    VllmServer,
    sentence,
)
from bench.harness.session import Document, conduct
from bench.harness.stream import BenchRequest, load_pool

GROUPS = REPETITIVE, OTHER = "repetitive", "other"
POSITION_EDGES = (200, 500, 900, 1300)
"""Generated positions where a new bin of `by_position` begins."""
TEMPERATURE = 0.7
GRAM = 4
EXACT = "exact"
_STATIC_ARM = f"static{MEMORY_TOKENS}"
# Expected memory of a server without weights and KV cache.
SERVER_MIB = 1600.0
MAX_FAILURES = 2
_ADAPTING = "shared", "memory_shared", EXACT, "everything"


@dataclass(frozen=True, slots=True)
class Cell:
    """Requests of a group at one concurrency."""

    domain: str
    batch: int

    @property
    def name(self) -> str:
        return f"batch {self.batch}, {self.domain}"


# The engine has half of the cores by default: on all of them it would leave 2% of a
# core to a trainer at niceness 10.
@dataclass(frozen=True, kw_only=True)
class LongOptions(CommonOptions):
    """Options of the suite of long outputs."""

    arms: tuple[str, ...] = option((), "none,static,memory,...")
    control: Mapping[str, Any] = option(
        dict, "JSON put into tide.control of every tide arm"
    )
    domains: tuple[str, ...] = option(("python", "c", "docs_en"), "prompt domains")
    max_input_tokens: int = 128
    batches: tuple[int, ...] = option((1, 4, 8), "requests in flight")
    max_num_seqs: int | None = None
    groups: tuple[str, ...] = option(GROUPS, "repetitive,other")
    minutes: float = option(
        40.0, "no block begins later, except the first of each cell"
    )
    output_tokens: int = option(1800, "output tokens per request")
    sorted_prompts: int = option(24, "prompts to sort into groups")
    greedy_requests: int = option(4, "requests of the greedy pass")
    max_model_len: int = 2048

    @property
    def arm_names(self) -> tuple[str, ...]:
        names = self.arms or (NONE, "static", "memory", *_ADAPTING)
        return tuple(_STATIC_ARM if name == "static" else name for name in names)

    @property
    def num_seqs(self) -> int:
        return self.max_num_seqs or max(self.batches)

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
        make_arms(self.arm_names, self.control)
        super().check()
        if len(self.model_sizes) > 1:
            raise BenchError("--model-sizes: this suite serves one size at a time")
        if not self.domains:
            raise BenchError("--domains: no domain given")
        if not {NONE, _STATIC_ARM} <= set(self.arm_names):
            raise BenchError("--arms: must include none and static")
        if not self.groups or set(self.groups) - set(GROUPS):
            raise BenchError(f"--groups: choose from {', '.join(GROUPS)}")
        if min(self.batches, default=0) < 1 or self.num_seqs < max(self.batches):
            raise BenchError("--batches: must be from 1 to --max-num-seqs")
        if self.sorted_prompts < 3 or self.minutes <= 0 or self.greedy_requests < 1:
            raise BenchError(
                "--sorted-prompts must be at least 3; --minutes and --greedy-requests "
                "must be positive"
            )
        most = self.max_input_tokens + self.output_tokens + TIDE_MAX_TOKENS + 1
        limit = read_config(self.target).get("max_position_embeddings", most)
        if self.output_tokens < 2 or most > min(self.max_model_len, limit):
            raise BenchError(
                f"--max-model-len {self.max_model_len} is too short for prompts of "
                f"{self.max_input_tokens} and outputs of {self.output_tokens} tokens; "
                f"at least {most} is needed, and the model supports {limit}"
            )


def distinct_share(tokens: Sequence[int]) -> float:
    """Return the share of distinct 4-grams, 0 to 1."""
    grams = [tuple(tokens[i : i + GRAM]) for i in range(len(tokens) - GRAM + 1)]
    return len(set(grams)) / max(len(grams), 1)


def sort_prompts(shares: Sequence[float]) -> dict[str, list[int]]:
    """Return the prompt indices of each group: the lower and the upper third."""
    order = sorted(range(len(shares)), key=lambda place: shares[place])
    third = len(order) // 3
    return {REPETITIVE: order[:third], OTHER: order[-third:]}


def by_position(results: Iterable[RequestResult]) -> list[float | None]:
    """Return tokens per message of the stream, by bin of generated positions."""
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
    """Return a row for every arm of every group and concurrency."""
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
                    "ratio_to_static": rounded(ratio[0]),
                    "low": rounded(ratio[1]),
                    "high": rounded(ratio[2]),
                    "acceptance_length": _mean(lengths),
                    "by_position": [_mean(column) for column in known],
                    "blocks": len(mine),
                }
            )
    return rows


def _mean(numbers: Sequence[float]) -> float | None:
    return rounded(statistics.fmean(numbers)) if numbers else None


class LongDocument(Document):
    """Report with the visits and the rows computed from them."""

    def __init__(self, options: LongOptions) -> None:
        body: dict[str, Any] = {
            "rows": [],
            "identical": None,
            "groups": {},
            "visits": [],
            "identity": {},
            "position_edges": list(POSITION_EDGES),
        }
        super().__init__(options.json, options.suite, options.to_json(), body)

    def write(self) -> None:
        self.data["rows"] = rows_of(self.data["visits"])
        arms = self.data["identity"].get("arms", {}).values()
        same = all(verdict["identical"] for verdict in arms)
        self.data["identical"] = same if arms else None  # None: not compared
        super().write()


def serves(arm: str, cell: Cell) -> bool:
    """Return whether an arm serves a cell."""
    return arm != EXACT or cell.batch == 1


def wait_for_fast_draft(server: VllmServer) -> None:
    """Wait for the trainer of a server that adapts while requests run."""
    tide = json.loads(server.options.speculative_config or "{}").get("tide", {})
    deadline = time.monotonic() + TRAINER_TIMEOUT_S
    while "adapt" in tide.get("test_time", ()) and not has_trainer(
        Path(tide["run_dir"])
    ):
        if time.monotonic() > deadline:
            raise ServerError(f"no trainer attached within {TRAINER_TIMEOUT_S:g} s")
        time.sleep(0.5)


class LongRun:
    """Run of the suite: sort prompts, compare greedy outputs, measure blocks."""

    def __init__(
        self,
        options: LongOptions,
        target: Target,
        doc: LongDocument,
        progress: Progress,
    ) -> None:
        self.options, self.target = options, target
        self.doc, self.progress = doc, progress
        self.arms = make_arms(options.arm_names, options.control)
        self.pool = load_pool(options.prompts, target.path, options.domains)
        self.run_dir = Path(tempfile.mkdtemp(prefix="vtb-"))
        self.failures: dict[str, int] = {}
        self.greedy: dict[str, list[RequestResult]] = {}
        limit = options.max_minutes
        self.deadline = math.inf if limit is None else time.monotonic() + 60 * limit

    def run(self) -> None:
        try:
            with self._pool() as servers:
                self._start(servers, self.arms[:1])
                servers.check_memory(self.arms)
                self.visits(servers)
        finally:
            shutil.rmtree(self.run_dir, ignore_errors=True)
            self.progress.log("comparing outputs")
            none_first = dict(sorted(self.greedy.items(), key=lambda a: a[0] != NONE))
            identity = identity_of(none_first, self.target.path, self.options.dtype)
            self.doc.data["identity"] = identity
            for problem in identity_problems(identity):
                self.doc.problem(problem)
            self.doc.write()

    def _pool(self) -> ServerPool:
        weights = sum(f.stat().st_size for f in self.target.path.glob("*.safetensors"))
        # Checkpoints have 16 bits per weight.
        weights_mib = weights / MIB * ELEMENT_BYTES[self.options.dtype] / 2
        expected_mib = SERVER_MIB + 1.2 * weights_mib + self.kv_bytes / MIB
        log = self.progress.log
        return ServerPool(self.server_options, self._warm_up, log, expected_mib)

    @property
    def kv_bytes(self) -> int:
        options = self.options
        config, size = read_config(self.target.path), ELEMENT_BYTES[options.dtype]
        return kv_cache_bytes(config, options.num_seqs, options.max_model_len, size)

    def server_options(self, arm: Arm) -> ServerOptions:
        options = self.options
        own = self.run_dir / arm.name
        own.mkdir(mode=0o700, exist_ok=True, parents=True)
        return ServerOptions(
            venv=options.venv,
            model=self.target.path,
            log_path=options.work / "logs" / f"{self.target.name}-{arm.name}.log",
            speculative_config=speculative_config(arm, options.draft, own),
            dtype=options.dtype,
            engine_cpus=options.engine_cpus,
            other_cpus=options.other_cpus,
            kv_cache_bytes=self.kv_bytes,
            max_model_len=options.max_model_len,
            max_num_seqs=options.num_seqs,
            enforce_eager=not options.compile,
            extra_args=options.serve_args,
        )

    def _start(self, servers: ServerPool, arms: Sequence[Arm]) -> None:
        for arm in arms:
            try:
                servers.get(arm)
            except BROKEN as error:
                raise BenchError(f"no server: {arm.name}: {sentence(error)}") from None
        self.doc.data["environment"]["servers"] = {
            "startup_s": servers.startup_s,
            "memory_mib": servers.memory_mib,
        }

    def failed(self, servers: ServerPool, arm: Arm, where: str, error: object) -> None:
        """Record a failed visit; stop its server, which restarts for the next one."""
        self.failures[arm.name] = self.failures.get(arm.name, 0) + 1
        self.doc.problem(f"{where}, {arm.name}: {error}")
        self.progress.log(f"{where}, {arm.name}: FAILED: {error}")
        servers.drop(arm)
        self.doc.write()

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
                if time.monotonic() > self.deadline:
                    limit = options.max_minutes
                    raise OutOfTimeError(f"--max-minutes {limit:g} is over")
                prompts = groups[cell.domain]
                first = (block - 1) * cell.batch
                chosen = [
                    prompts[(first + i) % len(prompts)] for i in range(cell.batch)
                ]
                for arm in rng.sample(self.arms, len(self.arms)):
                    failed = self.failures.get(arm.name, 0) >= MAX_FAILURES
                    if not failed and serves(arm.name, cell):
                        self._visit(servers, arm, cell, block, chosen)
                self.doc.write()

    def _warm_up(self, server: VllmServer) -> None:
        order = self._prompts(":warm")[self.options.domains[0]]
        warm_up(
            server,
            lambda i: BenchRequest(i, "warm", order[i % len(order)], WARM_UP_TOKENS),
        )
        wait_for_fast_draft(server)

    def _prompts(self, seed: str) -> dict[str, list[tuple[int, ...]]]:
        """Return the truncated prompts of each domain, shuffled by the seed."""
        options = self.options
        return {
            domain: [p[: options.max_input_tokens] for p in order]
            for domain in options.domains
            if (order := self.pool.sequence(domain, f"{options.seed}{seed}"))
        }

    def _requests(self, prompts: Sequence[tuple[int, ...]]) -> list[BenchRequest]:
        length = self.options.output_tokens
        return [BenchRequest(i, "long", p, length) for i, p in enumerate(prompts)]

    def _sorted(self, servers: ServerPool) -> dict[str, list[tuple[int, ...]]]:
        """Return the prompts of each group, sorted by the target's continuations."""
        options = self.options
        each = -(-options.sorted_prompts // len(options.domains))
        pool = [
            prompt for order in self._prompts("").values() for prompt in order[:each]
        ]
        self.progress.log(f"sorting {len(pool)} prompts")
        none = next(arm for arm in self.arms if arm.name == NONE)
        extra = {"temperature": TEMPERATURE, "seed": options.seed}
        measured = measure_all(
            servers.get(none), self._requests(pool), max(options.batches), extra
        )
        shares = [distinct_share(result.token_ids) for result in measured.results]
        groups = sort_prompts(shares)
        for name, places in groups.items():
            values = [round(shares[place], 3) for place in places]
            self.doc.data["groups"][name] = {
                "prompts": len(values),
                "distinct_4grams": values,
                "mean": round(statistics.fmean(values), 3),
            }
            self.progress.log(f"{name}: distinct 4-grams {values}")
        return {name: [pool[i] for i in places] for name, places in groups.items()}

    def _greedy(self, servers: ServerPool) -> None:
        """Store the greedy outputs of every arm, for the comparison with `none`."""
        options = self.options
        prompts = self._prompts(":greedy")[options.domains[0]]
        requests = self._requests(prompts[: options.greedy_requests])
        for arm in self.arms:
            self.progress.log(f"greedy pass: {arm.name}")
            try:
                most = 1 if arm.name == EXACT else max(options.batches)
                measured = measure_all(servers.get(arm), requests, most)
            except BROKEN as error:
                self.failed(servers, arm, "greedy pass", sentence(error))
                continue
            if failed := measured.record["failed"]:
                self.doc.problem(f"greedy pass, {arm.name}: {failed} requests failed")
            self.greedy[arm.name] = measured.results

    def _visit(
        self,
        servers: ServerPool,
        arm: Arm,
        cell: Cell,
        block: int,
        prompts: Sequence[tuple[int, ...]],
    ) -> None:
        requests, concurrency = self._requests(prompts), cell.batch
        extra = {
            "temperature": TEMPERATURE,
            "seed": self.options.seed + block,
            # Prevent prefix cache hits from another visit.
            "cache_salt": f"{cell.name} {block} {arm.name}",
        }
        try:
            measured = measure_all(servers.get(arm), requests, concurrency, extra)
        except BROKEN as error:
            self.failed(servers, arm, cell.name, sentence(error))
            return
        if failed := measured.record["failed"]:
            self.doc.problem(f"{cell.name}, {arm.name}: {failed} requests failed")
            return
        name = "static" if STATIC.match(arm.name) else arm.name
        place = {"arm": name, "group": cell.domain, "concurrency": concurrency}
        steps = {"by_position": by_position(measured.results), "block": block}
        self.doc.data["visits"].append({**place, **steps, **measured.record})
        rate = measured.record["output_tokens_per_s"]
        self.progress.log(f"{cell.name}, block {block}, {arm.name}: {rate} tokens/s")


def run(options: LongOptions) -> int:
    """Measure the cells; return 0 only if every greedy output was right."""
    options.check()
    doc, progress = LongDocument(options), Progress()
    inflated = options.model_sizes or (options.target == DEMO / "target") * ("90m",)
    folder = options.work / "models"
    (target,) = targets_of(options.target, inflated, folder, progress.log)

    def facts() -> dict[str, Any]:
        return {
            "targets": {target.name: target.facts},
            "target_dtype": options.dtype,
            "draft": options.draft.name,
            "engine_cpus": list(options.engine_cpus),
            "client_api_cpus": list(options.other_cpus),
            "enforce_eager": not options.compile,
            "prefix_caching": "on; each visit has a different cache salt",
            "seed": options.seed,
            "waiting_servers": "stopped with SIGSTOP",
            "client_nice": f"{CLIENT_NICE} while measuring, where permitted",
        }

    suite = LongRun(options, target, doc, progress)
    status = conduct(doc, options, facts, suite.run, progress.log)
    for row in doc.data["rows"]:
        print(
            {
                key: row[key]
                for key in ("group", "concurrency", "arm", "ratio_to_static")
            }
        )
    return status
