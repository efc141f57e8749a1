"""All visits of one target: servers, order, limits, schedule, outputs."""

from __future__ import annotations

import math
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .arm_servers import BROKEN, make_servers, sentence
from .closed_loop import ClosedPlan
from .control_arms import SLO_KEY, Arm, BenchError, make_arms
from .document import Document
from .dynamic_table import best_lengths, calibration_plan, schedule_of
from .measure import WARM_UP_TOKENS, Measured, measure_closed, measure_open, warm_up
from .outputs import OutputBook
from .progress import Progress
from .prompt_pool import PromptPool, load_pool
from .request_figures import percentile, tpots_ms
from .run_options import RunOptions
from .server import VllmServer
from .server_pool import ServerPool
from .sizes import Target
from .visits import Cell, Visit, visit_order
from .workload import MIXED, Replay, closed_cells, closed_requests, replays

MOST_FAILURES = 2
# Arrivals later than this are not the trace's any more.
LATE_MS = 50.0


class OutOfTimeError(Exception):
    """``--max-minutes`` is over."""


class TargetRun:
    """Runs the visits of one target and puts them into the document."""

    def __init__(
        self, options: RunOptions, target: Target, doc: Document, progress: Progress
    ) -> None:
        """Load the prompts; nothing is started yet."""
        self.options, self.target, self.doc, self.progress = (
            options,
            target,
            doc,
            progress,
        )
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
        """Run everything, then compare the outputs.

        Raises:
            OutOfTimeError: The time is over; what was measured is in the document.
            BenchError: The traces asked for cannot be replayed.
        """
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
            raise OutOfTimeError

    def _visit(self, servers: ServerPool, visit: Visit, trace: Replay | None) -> float:
        """Measure once; what breaks is noted and the run goes on.

        Returns:
            Seconds the visit took, the start of its server apart.
        """
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
            self.doc.problem(
                f"{self.target.name}, {cell.name}, {arm.name}: {sentence(error)}"
            )
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
            self.doc.problem(
                f"{self.target.name}, {visit.cell.name}, {visit.arm.name}: "
                f"{cell['failed']} requests failed"
            )
        late_ms = cell.get("send_late_ms_p99")
        if late_ms is not None and late_ms > LATE_MS:
            self.doc.problem(
                f"{self.target.name}, {visit.cell.name}, {visit.arm.name}: the client "
                f"was late, {late_ms:.0f} ms at the 99th percentile; is the machine "
                "busy with something else?"
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
        assert cell.batch is not None  # noqa: S101 - a cell without trace has one
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
        """Return the capacity in output tokens/s; tunes ``vllm_dynamic`` if wanted."""
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
