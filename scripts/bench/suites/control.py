"""The control suite: policies of speculation in closed loops, block by block.

Every arm's server is resident. Blocks (`bench.harness.blocks`) of all cells come in
random order; each is on requests of its own, the same ones for all its visits. A visit
counts the same number of output tokens in every arm, chosen so that the whole run takes
the minutes asked for.
"""

from __future__ import annotations

import json
import math
import shutil
import statistics
import subprocess
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.harness.arms import TIDE_MAX_TOKENS
from bench.harness.blocks import (
    MIXED,
    NONE,
    RAMP,
    Cell,
    Visit,
    cell_rows,
    plan,
    verdict,
)
from bench.harness.common import BenchError, clock_text, read_json, write_json
from bench.harness.hindsight import recorded_verdict
from bench.harness.measure import WARM_UP_SHARE, ClosedPlan, measure_closed
from bench.harness.models import DEMO
from bench.harness.options import option
from bench.harness.server import BROKEN, ServerPool, environment, sentence
from bench.harness.session import Document
from bench.suites.serving import (
    KNOWN_DOMAINS,
    PolicyOptions,
    PolicyRun,
    closed_requests,
    conduct_policies,
    place_of,
)

ARMS = ("none", "static1", "static3", "static5", "vllm_dynamic", "adaspec")
MINUTES = 75.0
# Expected before anything was measured: a server's start with its share of the
# calibration, what a visit takes beside its window, and the shortest window.
START_S, BESIDE_S, LEAST_S = 60.0, 4.0, 2.0
# The draft arms can be slower than `none`, after which windows are sized.
SLACK = 0.92
# Of a default run, for each cell: to record control's decisions; alone (`--blocks 0`).
ALONE_S = 60.0
RECORD_S, RECORD = 12.0, Path(__file__).parents[1] / "record.py"


@dataclass(frozen=True, kw_only=True)
class ControlOptions(PolicyOptions):
    """Options of the control benchmark."""

    domains: tuple[str, ...] = option(
        (*KNOWN_DOMAINS, MIXED), "matched,unmatched,mixed (half and half in a batch)"
    )
    batches: tuple[int, ...] = option((), "requests in flight")
    blocks: int | None = option(
        None, "visits of each cell by every arm; 0 only records control's decisions"
    )
    minutes: float | None = option(
        None, "length of the run (75; --full: in proportion)"
    )
    full: bool = option(
        False, "also batch 2, 8, 32, static7, a ramp of 1 to 48 and back; eight blocks"
    )
    output_tokens: int = option(64, "per request")
    resume: bool = option(False, "keep the whole blocks that FILE has of the same run")

    @property
    def arm_names(self) -> tuple[str, ...]:
        return self.arms or (*ARMS[:4], *(["static7"] * self.full), *ARMS[4:])

    @property
    def sizes(self) -> tuple[int, ...]:
        full = (1, 2, 4, 8, 16, 32, 48)
        return self.batches or (full if self.full else (1, 4, 16, 48))

    @property
    def num_seqs(self) -> int:
        return self.max_num_seqs or max(self.sizes)

    @property
    def calibrated(self) -> tuple[int, ...]:
        return self.sizes

    @property
    def cells(self) -> list[Cell]:
        cells = [Cell(d, batch=b) for b in self.sizes for d in self.domains]
        return [*cells, Cell(MIXED, batch=RAMP)] if self.full else cells

    @property
    def num_blocks(self) -> int:
        usual = 8 if self.full else 5
        return usual if self.blocks is None else self.blocks

    @property
    def num_visits(self) -> int:
        return len(self.cells) * self.num_blocks * (len(self.arm_names) + 1)

    @property
    def limit_s(self) -> float:
        """Seconds of the run: 75 minutes, or as many more as there are more visits."""
        if self.minutes is not None:
            return 60 * self.minutes
        if not self.num_blocks:
            return START_S + ALONE_S * len(self.cells)
        share = self.num_visits / (12 * 5 * 7) if self.full else 1.0
        return 60 * MINUTES * max(1.0, share)

    @property
    def record_cell_s(self) -> float:
        """Seconds of a cell to record control's decisions."""
        if not self.num_blocks:
            return max(1.0, (self.limit_s - START_S) / len(self.cells))
        return RECORD_S * self.limit_s / (60 * MINUTES)

    @property
    def record_s(self) -> float:
        """Seconds to record control's decisions after the last block."""
        if "adaspec" not in self.arm_names:
            return 0.0
        return START_S + self.record_cell_s * len(self.cells)

    @property
    def visit_s(self) -> float:
        """Seconds for a visit, window and what is beside it."""
        left = SLACK * self.limit_s - START_S * len(self.arm_names) - self.record_s
        return max(LEAST_S + BESIDE_S, left / self.num_visits)

    @property
    def size(self) -> str:
        if not self.num_blocks:
            return (
                f"{len(self.cells)} cells recorded for {self.record_cell_s:.0f} s; "
                f"expected {clock_text(self.record_s)}"
            )
        seconds = self.num_visits * self.visit_s + START_S * len(self.arm_names)
        seconds += self.record_s
        return (
            f"{len(self.cells)} cells x {self.num_blocks} blocks x "
            f"{len(self.arm_names) + 1} visits of {self.visit_s:.1f} s; expected "
            f"{clock_text(seconds)} with the servers' start and calibration"
        )

    def check(self) -> None:
        super().check()
        if NONE not in self.arm_names or len(set(self.arm_names)) < 2:
            raise BenchError("--arms: needs none and another one")
        if any("@" in name or name == "adaspec_slo" for name in self.arm_names):
            raise BenchError("--arms: TPOT limits belong to --suite traces")
        if min(self.sizes) < 1:
            raise BenchError("--batches are positive whole numbers such as 1,4,16")
        if self.num_seqs < max(self.sizes):
            raise BenchError("--max-num-seqs is below the largest of --batches")
        if self.num_blocks < 0 or self.limit_s <= 0:
            name = "--minutes" if self.num_blocks >= 0 else "--blocks"
            raise BenchError(f"{name} is too small")
        if not self.num_blocks and "adaspec" not in self.arm_names:
            raise BenchError("--blocks 0 records adaspec: --arms leaves it out")
        self.check_length(self.output_tokens)


class ControlDocument(Document):
    """The report: visits, and what they say of each cell."""

    def __init__(self, options: ControlOptions) -> None:
        lists: dict[str, Any] = {
            name: [] for name in ("cells", "left_on_the_table", "visits", "calibration")
        }
        maps: dict[str, Any] = {
            name: {} for name in ("identity", "schedules", "window_tokens")
        }
        body = {"verdict": "", **lists, **maps, "measures": options.identity()}
        super().__init__(options.json, options.suite, options.to_json(), body)
        before = (read_json(options.json) if options.resume else None) or {}
        self.resumed = before.get("measures") == json.loads(
            json.dumps(body["measures"])
        )
        if self.resumed:
            kept = ("calibration", "schedules", "window_tokens", "problems")
            self.data |= {name: before[name] for name in kept}
            self.data["identity"] = {
                f"{target}, before it was resumed": found
                for target, found in before["identity"].items()
            }
            visits = len(set(options.arm_names)) + 1
            self.data["visits"] = whole_blocks(before["visits"], visits)

    @property
    def done(self) -> set[tuple[Any, ...]]:
        """Blocks that were measured."""
        return {(v["batch"], v["domain"], v["block"]) for v in self.data["visits"]}

    def write(self) -> None:
        self.data["cells"] = cell_rows(self.data["visits"])
        recorded = recorded_verdict(self.data["left_on_the_table"])
        said = [recorded] if recorded else []
        if self.data["cells"] or not said:
            said.insert(0, verdict(self.data["cells"]))
        self.data["verdict"] = "; ".join(said)
        super().write()


def whole_blocks(visits: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """Visits of the blocks that have all of theirs."""
    sizes = Counter(block_of(visit) for visit in visits)
    return [visit for visit in visits if sizes[block_of(visit)] == count]


def block_of(visit: Mapping[str, Any]) -> tuple[Any, ...]:
    return visit["batch"], visit["domain"], visit["block"]


class ControlRun(PolicyRun):
    """Measures block after block."""

    options: ControlOptions
    doc: ControlDocument

    def visits(self, servers: ServerPool) -> None:
        began, data = time.monotonic(), self.doc.data
        if self.doc.resumed:
            self.progress.say(f"resuming: {len(self.doc.done)} blocks were measured")
            tables = data["schedules"].get(self.target.name)
            self.schedule = tables and [(a, b, k) for a, b, k in tables]
        if not data["window_tokens"]:
            rates = self.calibrate(servers, self.options.sizes)
        self._start(servers, self.arms)
        if not data["window_tokens"]:
            data["window_tokens"] = self._window_tokens(
                {b: rate for (arm, b), rate in rates.items() if arm == NONE},
                time.monotonic() - began,
            )
        ahead = [
            block
            for block in plan(
                self.options.cells,
                self.arms,
                self.options.num_blocks,
                self.options.seed,
            )
            if (block[0].cell.batch, block[0].cell.domain, block[0].block)
            not in self.doc.done
        ]
        self.progress.start([visit.cell for block in ahead for visit in block])
        self.progress.say(f"{self.target.name}: {len(ahead)} blocks of visits")
        for block in ahead:
            self.check_time(block[0].cell)
            for place, visit in enumerate(block):
                seconds = 0.0
                if not self.given_up(visit.arm):
                    seconds = self._visit(servers, visit, place)
                self.progress.done(visit.cell, seconds)
            data["identity"][self.target.name] = self.book.to_json()
            self.doc.write()

    def run(self) -> None:
        if self.options.num_blocks:
            super().run()
        if "adaspec" in self.options.arm_names:
            try:
                self._record()
            finally:
                shutil.rmtree(self.run_dir, ignore_errors=True)

    def _record(self) -> None:
        """Records control in an engine of its own, once the servers have ended."""
        options, work = self.options, self.options.work
        cells = [
            {
                "cell": cell.name,
                "batch": cell.batch,
                "prompts": [
                    requests(index, None).prompt
                    for requests in [
                        closed_requests(options, self.pool, cell.domain, "")
                    ]
                    for index in range(128)
                ],
            }
            for cell in options.cells
            if cell.batch != RAMP
        ]
        control = next(arm for arm in self.arms if arm.name == "adaspec").control
        length = str(options.max_model_len)
        arguments = ["--max-model-len", length, "--max-num-seqs", str(options.num_seqs)]
        arguments += ["--dtype", options.dtype, *options.serve_args]
        arguments += ["--kv-cache-memory-bytes", str(self.kv_bytes)]
        plan_file, out = work / "record.json", work / "recorded.json"
        write_json(
            plan_file,
            {
                "cells": cells,
                "control": control,
                "most": TIDE_MAX_TOKENS,
                "seconds": options.record_cell_s,
                "arguments": arguments + ["--enforce-eager"] * (not options.compile),
            },
        )
        self.progress.say("recording control's decisions")
        python = options.venv / "bin" / "python"
        command = [str(python), str(RECORD), "--model", str(self.target.path)]
        command += ["--draft", str(options.draft), "--requests", str(plan_file)]
        logs = work / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        with (logs / "record.log").open("wb") as log:
            subprocess.run(
                [*command, "--json", str(out)],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment(self.server_options(self.arms[0])),
                timeout=20 * options.limit_s,
                check=False,
            )
        found = read_json(out) or {"left_on_the_table": []}
        self.doc.data["left_on_the_table"] = found["left_on_the_table"]
        if len(found["left_on_the_table"]) < len(cells):
            self.doc.problem(f"not every cell was recorded: {work}/logs/record.log")
        self.doc.write()

    def _window_tokens(
        self, rates: Mapping[int, float], spent_s: float
    ) -> dict[str, int]:
        """Output tokens that a visit of each batch counts.

        A larger batch has the longer window: more of it are prompts, and how many lie
        in it is chance.
        """
        options = self.options
        beside = {
            row["batch"]: row["beside_s"]
            for row in self.doc.data["calibration"]
            if row["arm"] == NONE
        }
        beside[RAMP] = max(beside.values())
        weight = {batch: 1 + math.sqrt(batch) / 4 for batch in rates}
        weight[RAMP] = 2 * statistics.geometric_mean(weight.values())
        visits = Counter(cell.batch for cell in options.cells)
        each = options.num_blocks * (len(options.arm_names) + 1)
        left = 0.95 * (options.limit_s - options.record_s) - spent_s
        left = left / each - sum(n * beside[batch] for batch, n in visits.items())
        left /= (1 + WARM_UP_SHARE) * sum(n * weight[b] for b, n in visits.items())
        found = {}
        for batch, rate in rates.items():
            window_s = max(LEAST_S, left * weight[batch])
            found[str(batch)] = round(max(8 * batch, rate * window_s))
        found[RAMP] = 2 * round(statistics.geometric_mean(found.values()))
        return found

    def _visit(self, servers: ServerPool, visit: Visit, place: int) -> float:
        arm, cell, options = visit.arm, visit.cell, self.options
        began = time.monotonic()
        requests = closed_requests(
            options, self.pool, cell.domain, f"{visit.block}:{cell.batch}"
        )
        closed = ClosedPlan(
            max(options.sizes) if cell.batch == RAMP else int(cell.batch or 0),
            self.doc.data["window_tokens"][str(cell.batch)],
            kinds=len(options.kinds) if cell.domain == MIXED else 1,
            ramp=cell.batch == RAMP,
        )
        # An arm visited twice must not find its first visit's prefixes cached.
        salt = {"cache_salt": f"{cell.name} {visit.block} {place}"}
        try:
            measured = measure_closed(servers.get(arm), requests, closed, salt)
        except BROKEN as error:
            self.failed(servers, arm, cell.name, sentence(error))
            return time.monotonic() - began
        record = measured.record
        self.book.add((cell.name, visit.block), arm.name, measured.results)
        if record["failed"]:
            count = record["failed"]
            self.doc.problem(f"{cell.name}, {arm.name}: {count} requests failed")
        where = {**place_of(cell, arm, self.target), "block": visit.block}
        self.doc.data["visits"].append({**where, "place": place, **record})
        self.progress.say(
            f"{cell.name}, block {visit.block}, {arm.name}: "
            f"{record['output_tokens_per_s']} tokens/s"
        )
        return time.monotonic() - began


def run(options: ControlOptions) -> int:
    """Measures the cells; returns 0 only if every output was right."""
    options.check()
    doc = ControlDocument(options)
    status = conduct_policies(doc, options, ControlRun, demo_sizes(options))
    print(doc.data["verdict"])
    return status


def demo_sizes(options: PolicyOptions) -> tuple[str, ...]:
    """Size of the target: the demo's own is all overhead, and is inflated."""
    if options.target == DEMO / "target":
        return options.model_sizes or ("90m",)
    return options.model_sizes
