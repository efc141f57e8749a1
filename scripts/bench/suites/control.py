"""The control suites: policies of speculation in closed loops and over traces.

The visits of each target: servers, order, limits, schedule, outputs.
"""

from __future__ import annotations

import math
import shutil
import tempfile
import time
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bench.harness.arms import (
    SLO_KEY,
    Arm,
    Schedule,
    make_arms,
    speculative_config,
)
from bench.harness.common import BenchError, OutOfTimeError, Progress, percentile
from bench.harness.identity import OutputBook
from bench.harness.measure import (
    CLIENT_NICE,
    WARM_UP_TOKENS,
    ClosedPlan,
    Measured,
    measure_closed,
    measure_open,
    warm_up,
)
from bench.harness.models import Target, kv_cache_bytes, read_config, targets_of
from bench.harness.options import ELEMENT_BYTES
from bench.harness.ratios import summarise
from bench.harness.server import (
    BROKEN,
    MIB,
    ServerOptions,
    ServerPool,
    VllmServer,
    sentence,
)
from bench.harness.session import Document, conduct
from bench.harness.stream import PromptPool, load_pool
from bench.harness.summary import tpots_ms
from bench.suites.traces import (
    MIXED,
    Replay,
    RunOptions,
    closed_cells,
    closed_requests,
    load_traces,
    replays,
)
from bench.suites.turns import (
    Cell,
    Visit,
    best_lengths,
    calibration_plan,
    schedule_of,
    visit_order,
)

# What a server takes beside weights and KV cache, before one was seen.
SERVER_MIB = 1600.0


def make_servers(
    options: RunOptions,
    target: Target,
    run_dir: Path,
    schedule: Callable[[], Schedule | None],
    on_ready: Callable[[VllmServer], None],
    say: Callable[[str], None],
) -> ServerPool:
    """Pool of a target's servers; none is started yet."""
    kv_bytes = kv_cache_bytes(
        read_config(target.path),
        options.num_seqs,
        options.max_model_len,
        ELEMENT_BYTES[options.dtype],
    )

    def options_of(arm: Arm) -> ServerOptions:
        # Arms that share a server share its folder.
        own = run_dir / f"{zlib.crc32(arm.server_key.encode()):08x}"
        own.mkdir(mode=0o700, exist_ok=True)
        return ServerOptions(
            venv=options.venv,
            model=target.path,
            log_path=options.work / "logs" / f"{target.name}-{arm.name}.log",
            speculative_config=speculative_config(arm, options.draft, own, schedule()),
            dtype=options.dtype,
            engine_cpus=options.engine_cpus,
            other_cpus=options.other_cpus,
            kv_cache_bytes=kv_bytes,
            max_model_len=options.max_model_len,
            max_num_seqs=options.num_seqs,
            enforce_eager=not options.compile,
            # Prompts come again in later visits: a cached prefix would favour those.
            extra_args=("--no-enable-prefix-caching", *options.serve_args),
        )

    weights = sum(f.stat().st_size for f in target.path.glob("*.safetensors"))
    # Checkpoints are 16 bit.
    weights_mib = weights / MIB * ELEMENT_BYTES[options.dtype] / 2
    expected_mib = SERVER_MIB + 1.2 * weights_mib + kv_bytes / MIB
    return ServerPool(options_of, on_ready, say, expected_mib, options.resident)


MOST_FAILURES = 2
# Arrivals later than this are not the trace's any more.
LATE_MS = 50.0


class TargetRun:
    """Runs the visits of one target and puts them into the document."""

    def __init__(
        self, options: RunOptions, target: Target, doc: CellDocument, progress: Progress
    ) -> None:
        self.options, self.target = options, target
        self.doc, self.progress = doc, progress
        control = {
            key: value.replace("{target}", target.name)
            if isinstance(value, str)
            else value
            for key, value in options.control.items()
        }
        self.arms = make_arms(options.arm_names, control)
        self.pool: PromptPool = load_pool(options.prompts, target.path, options.domains)
        self.book = OutputBook()
        self.run_dir = Path(tempfile.mkdtemp(prefix="vtb-"))
        self.schedule: list[tuple[int, int, int]] | None = None
        self.num_measured: dict[Cell, int] = {}
        self.p90_tpot_ms: dict[Cell, float] = {}
        self.failures: dict[str, int] = {}

    def run(self, others_like_this: int) -> None:
        try:
            with make_servers(
                self.options,
                self.target,
                self.run_dir,
                lambda: self.schedule,
                self._warm_up,
                self.progress.say,
            ) as servers:
                self._visits(servers, others_like_this)
        finally:
            shutil.rmtree(self.run_dir, ignore_errors=True)
            self.progress.say("comparing outputs")
            self.book.rescore(self.target.path, self.options.dtype)
            self.doc.data["identity"][self.target.name] = self.book.to_json()
            self.doc.write()

    def _visits(self, servers: ServerPool, others_like_this: int) -> None:
        first = next((arm for arm in self.arms if arm.name == "none"), self.arms[0])
        if first.is_dynamic:
            first = next(arm for arm in self.arms if not arm.is_dynamic)
        try:
            servers.get(first)
        except BROKEN as error:
            raise BenchError(f"no server: {sentence(error)}") from None
        interleaved = servers.fits(len({arm.server_key for arm in self.arms}))
        traces: dict[Cell, Replay] = {}
        if self.options.is_replay:
            traces = replays(self.options, self.pool, self._calibrate(servers, first))
        cells = list(traces) or closed_cells(self.options)
        order = visit_order(
            cells,
            self.arms,
            self.options.repeats,
            interleaved=interleaved,
            defer_dynamic=not self.options.is_replay,
        )
        visits = list(order)
        self.progress.start([visit.cell for visit in visits], others_like_this)
        how = "taking turns" if interleaved else "one after the other, for memory"
        self.progress.say(f"{self.target.name}: {len(visits)} visits, arms {how}")
        facts = self.doc.data["environment"].setdefault("servers", {})
        facts[self.target.name] = {
            "interleaved": interleaved,
            "startup_s": servers.startup_s,
            "memory_mib": servers.memory_mib,
        }
        for place, visit in enumerate(visits, 1):
            self._check_time(visit.cell)
            seconds = 0.0
            if self.failures.get(visit.arm.server_key, 0) < MOST_FAILURES:
                seconds = self._visit(servers, visit, traces.get(visit.cell))
            ahead = [later.arm for later in visits[place:]]
            self.progress.further_s = servers.seconds_to_start(ahead)
            self.progress.done(visit.cell, seconds)

    def _check_time(self, cell: object) -> None:
        if self.progress.out_of_time(cell):
            limit = self.options.max_minutes
            raise OutOfTimeError(f"--max-minutes {limit:g} is over")

    def _visit(self, servers: ServerPool, visit: Visit, trace: Replay | None) -> float:
        arm, cell = visit.arm, visit.cell
        began = time.monotonic()
        try:
            if arm.is_dynamic and self.schedule is None:
                self._tune_from_cells()
            extra = self._extra(arm, cell)
            server = servers.get(arm)
            began = time.monotonic()
            measured = self._measure(server, visit, trace, extra)
        except BROKEN as error:
            self.failures[arm.server_key] = self.failures.get(arm.server_key, 0) + 1
            self.doc.problem(f"{self._where(visit)}: {sentence(error)}")
            self.progress.say(f"{cell.name}, {arm.name}: FAILED: {sentence(error)}")
            servers.drop(arm)
            self.doc.write()
            return time.monotonic() - began
        self.num_measured.setdefault(cell, len(measured.results))
        tpots = tpots_ms(measured.results)
        if arm.name == "none" and tpots:
            self.p90_tpot_ms.setdefault(cell, percentile(tpots, 90))
        self.book.add((cell.name, visit.repeat), arm.name, measured.results)
        self._record(visit, measured, trace, extra)
        return time.monotonic() - began

    def _where(self, visit: Visit) -> str:
        return f"{self.target.name}, {visit.cell.name}, {visit.arm.name}"

    def _record(
        self,
        visit: Visit,
        measured: Measured,
        trace: Replay | None,
        extra: Mapping[str, Any] | None,
    ) -> None:
        place: dict[str, Any] = {
            "batch": visit.cell.batch,
            "domain": visit.cell.domain,
            "arm": visit.arm.name,
            "target": self.target.name,
            "repeat": visit.repeat,
            "trace": visit.cell.trace,
            "slo_tpot_ms": extra["vllm_xargs"][SLO_KEY] if extra else None,
        }
        if trace is not None:
            place["keep"] = trace.keep
            place["offered_tokens_per_s"] = trace.offered_tokens_per_s
            place["trace_requests"] = trace.unthinned
        cell = {**place, **measured.record}
        if cell["failed"]:
            self.doc.problem(f"{self._where(visit)}: {cell['failed']} requests failed")
        late_ms = cell.get("send_late_ms_p99")
        if late_ms is not None and late_ms > LATE_MS:
            self.doc.problem(
                f"{self._where(visit)}: the client was late, {late_ms:.0f} ms at the "
                "99th percentile; is the machine busy with something else?"
            )
        self.doc.data["identity"][self.target.name] = self.book.to_json()
        self.doc.add_cell(cell)
        self.progress.say(
            f"{visit.cell.name}, {visit.arm.name}, repeat {visit.repeat + 1}: "
            f"{cell['output_tokens_per_s']} tokens/s, e2e {cell['mean_e2e_s']} s, "
            f"TPOT p90 {cell['tpot_ms_p90']} ms"
        )

    def _measure(
        self,
        server: VllmServer,
        visit: Visit,
        trace: Replay | None,
        extra: Mapping[str, Any] | None,
    ) -> Measured:
        if trace is not None:
            step = max(1, len(trace.requests) // 4)

            def on_progress(done: int) -> None:
                if done % step == 0:
                    self.progress.say(
                        f"{visit.cell.name}, {visit.arm.name}: "
                        f"{done}/{len(trace.requests)} requests"
                    )

            drain_s = self.options.drain_s
            return measure_open(server, trace.requests, drain_s, on_progress, extra)
        cell = visit.cell
        assert cell.batch is not None
        requests = closed_requests(self.options, self.pool, cell.domain, visit.repeat)
        plan = ClosedPlan(cell.batch, self.options.seconds, self.num_measured.get(cell))
        return measure_closed(server, requests, plan, extra)

    def _extra(self, arm: Arm, cell: Cell) -> dict[str, Any] | None:
        if arm.slo_scale is None:
            return None
        if cell not in self.p90_tpot_ms:
            raise RuntimeError("arm 'none' did not give a TPOT limit")
        limit_ms = arm.slo_scale * self.p90_tpot_ms[cell]
        return {"vllm_xargs": {SLO_KEY: round(limit_ms, 4)}}

    def _calibrate(self, servers: ServerPool, first: Arm) -> float:
        tuned = any(arm.is_dynamic for arm in self.arms)
        if not tuned and self.options.keep is not None:
            return math.nan  # nobody asks
        requests = closed_requests(self.options, self.pool, MIXED, -1)
        plan = calibration_plan(self.arms, first, self.options.num_seqs, tuned=tuned)
        self.progress.start([("calibration", batch) for _, batch in plan], 0)
        rates: dict[tuple[str, int], float] = {}
        counts: dict[int, int] = {}
        for arm, batch in plan:
            self._check_time(("calibration", batch))
            try:
                server = servers.get(arm)
                began = time.monotonic()
                seconds = self.options.calibration_seconds
                closed = ClosedPlan(batch, seconds, counts.get(batch))
                measured = measure_closed(server, requests, closed)
            except BROKEN as error:
                raise BenchError(
                    f"calibration of {arm.name} failed: {sentence(error)}"
                ) from None
            counts.setdefault(batch, len(measured.results))
            rates[arm.name, batch] = float(measured.record["output_tokens_per_s"])
            self.doc.data["calibration"].append(
                {
                    "target": self.target.name,
                    "arm": arm.name,
                    "batch": batch,
                    "output_tokens_per_s": rates[arm.name, batch],
                }
            )
            self.progress.done(("calibration", batch), time.monotonic() - began)
            self.progress.say(
                f"calibration: {arm.name}, batch {batch}: "
                f"{rates[arm.name, batch]} tokens/s"
            )
        if tuned:
            lengths = {arm.name: arm.num_tokens for arm in self.arms if arm.is_static}
            self._tune(
                {
                    (batch, MIXED, lengths[name]): rate
                    for (name, batch), rate in rates.items()
                    if name in lengths
                }
            )
        return rates[first.name, self.options.num_seqs]

    def _warm_up(self, server: VllmServer) -> None:
        requests = closed_requests(self.options, self.pool, MIXED, -2)
        warm_up(server, lambda index: requests(index, WARM_UP_TOKENS))

    def _tune_from_cells(self) -> None:
        lengths = {arm.name: arm.num_tokens for arm in self.arms if arm.is_static}
        self._tune(
            {
                (cell["batch"], cell["domain"], lengths[cell["arm"]]): cell[
                    "output_tokens_per_s"
                ]
                for cell in self.doc.data["cells"]
                if cell["target"] == self.target.name
                and cell["arm"] in lengths
                and cell["repeat"] == 0
                and cell["output_tokens_per_s"]
            }
        )

    def _tune(self, rates: Mapping[tuple[int, str, int], float]) -> None:
        best = best_lengths(rates)
        if not best:
            raise RuntimeError("cannot be tuned: no static arm was measured")
        self.schedule = schedule_of(best, self.options.num_seqs)
        self.doc.data["schedules"][self.target.name] = [list(r) for r in self.schedule]
        self.progress.say(f"vllm_dynamic tuned: {self.schedule}")


class CellDocument(Document):
    """The report of a control run: cells, and what they come to."""

    def __init__(self, path: Path, suite: str, options: dict[str, Any]) -> None:
        lists = {name: [] for name in ("cells", "calibration")}
        maps = {name: {} for name in ("summary", "identity", "schedules")}
        super().__init__(path, suite, options, {**lists, **maps})

    def add_cell(self, cell: dict[str, Any]) -> None:
        self.data["cells"].append(cell)
        self.write()

    def write(self) -> None:
        scales = self.data["options"].get("slo_scales")
        self.data["summary"] = summarise(self.data["cells"], scales)
        super().write()


def run(options: RunOptions) -> int:
    """Runs targets one after the other; returns 0 only if every output was right."""
    options.check()
    if options.is_replay:  # a trace that is not there is said before a server starts
        load_traces(
            options.trace_dir, options.traces, options.trace_seconds, options.seed
        )
    limit = options.max_minutes
    began = time.monotonic()
    progress = Progress(deadline_s=None if limit is None else began + 60 * limit)
    doc = CellDocument(options.json, options.suite, options.to_json())
    targets = targets_of(
        options.target, options.model_sizes, options.work / "models", progress.say
    )

    def facts() -> dict[str, Any]:
        return {
            "targets": {target.name: target.facts for target in targets},
            "target_dtype": options.dtype,
            "draft": options.draft.name,
            "engine_cpus": list(options.engine_cpus),
            "client_api_cpus": list(options.other_cpus),
            "omp_threads": len(options.engine_cpus),
            "enforce_eager": not options.compile,
            "prefix_caching": False,  # `make_servers` says why
            "seed": options.seed,
            "waiting_servers": "stopped with SIGSTOP",
            "client_nice": f"{CLIENT_NICE} while measuring, where permitted",
        }

    def measure() -> None:
        for place, target in enumerate(targets):
            TargetRun(options, target, doc, progress).run(len(targets) - place - 1)

    def verdict() -> list[str]:
        return [
            f"WRONG OUTPUTS: {target}, {arm} differs from none"
            for target, arms in doc.data["identity"].items()
            for arm, found in arms.items()
            if found["identical"] is False
        ]

    return conduct(doc, options, facts, measure, progress.say, verdict)
