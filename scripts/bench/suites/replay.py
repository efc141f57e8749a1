"""The suites that replay arrival traces: latency and attainment under each policy.

Arms take turns on a trace, and every other trace and repeat takes them backwards, so
that a drift of the machine does not favour the arms at one end. Arm `none` opens every
trace of the first repeat: it settles the TPOT limits.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from bench.harness.arms import SLO_KEY, Arm
from bench.harness.blocks import NONE, Cell
from bench.harness.common import percentile
from bench.harness.measure import Measured, measure_open
from bench.harness.ratios import trace_summary
from bench.harness.server import BROKEN, ServerPool, VllmServer, sentence
from bench.harness.session import Document
from bench.harness.summary import tpots_ms
from bench.suites.serving import PolicyRun, conduct_policies, place_of
from bench.suites.traces import Replay, RunOptions, load_traces, replays

# Arrivals later than this are not the trace's any more.
LATE_MS = 50.0


def turn(arms: Sequence[Arm], repeat: int, place: int) -> list[Arm]:
    """Order of the arms' visits to one trace."""
    order = list(arms) if (repeat + place) % 2 == 0 else list(reversed(arms))
    if repeat == 0:
        order.sort(key=lambda arm: arm.name != NONE)  # stable: the rest stays
    return order


class ReplayDocument(Document):
    """The report: a cell is a visit."""

    def __init__(self, options: RunOptions) -> None:
        lists: dict[str, Any] = {name: [] for name in ("cells", "calibration")}
        maps: dict[str, Any] = {
            name: {} for name in ("summary", "identity", "schedules")
        }
        super().__init__(
            options.json, options.suite, options.to_json(), {**lists, **maps}
        )

    def write(self) -> None:
        traces = trace_summary(
            self.data["cells"], self.data["options"].get("slo_scales")
        )
        self.data["summary"] = {"traces": traces}
        super().write()


class ReplayRun(PolicyRun):
    """Measures trace after trace."""

    options: RunOptions
    doc: ReplayDocument

    def visits(self, servers: ServerPool) -> None:
        most = self.options.num_seqs
        self.p90_tpot_ms: dict[Cell, float] = {}
        rates = self.calibrate(servers, [most])
        capacity = rates.get((NONE, most), float("nan"))
        traces = replays(self.options, self.pool, capacity)
        order = [
            (cell, arm, repeat)
            for repeat in range(self.options.repeats)
            for place, cell in enumerate(traces)
            for arm in turn(self.arms, repeat, place)
        ]
        self.progress.start([cell for cell, _, _ in order])
        self.progress.say(f"{self.target.name}: {len(order)} visits")
        for cell, arm, repeat in order:
            self.check_time(cell)
            seconds = 0.0
            if not self.given_up(arm):
                seconds = self._visit(servers, cell, arm, repeat, traces[cell])
            self.progress.done(cell, seconds)

    def _visit(
        self, servers: ServerPool, cell: Cell, arm: Arm, repeat: int, trace: Replay
    ) -> float:
        began = time.monotonic()
        try:
            limit_ms = self._limit_ms(arm, cell)
            measured = self._measure(servers.get(arm), cell, arm, repeat, trace)
        except BROKEN as error:
            self.failed(servers, arm, cell.name, sentence(error))
            return time.monotonic() - began
        tpots = tpots_ms(measured.results)
        if arm.name == NONE and tpots:
            self.p90_tpot_ms.setdefault(cell, percentile(tpots, 90))
        self.book.add((cell.name, repeat), arm.name, measured.results)
        record = {
            **place_of(cell, arm, self.target),
            "repeat": repeat,
            "slo_tpot_ms": limit_ms,
            "keep": trace.keep,
            "offered_tokens_per_s": trace.offered_tokens_per_s,
            "trace_requests": trace.unthinned,
            **measured.record,
        }
        where = f"{self.target.name}, {cell.name}, {arm.name}"
        if record["failed"]:
            self.doc.problem(f"{where}: {record['failed']} requests failed")
        late_ms = record["send_late_ms_p99"]
        if late_ms is not None and late_ms > LATE_MS:
            self.doc.problem(
                f"{where}: the client was late, {late_ms:.0f} ms at the 99th "
                "percentile; is the machine busy with something else?"
            )
        self.doc.data["identity"][self.target.name] = self.book.to_json()
        self.doc.data["cells"].append(record)
        self.doc.write()
        self.progress.say(
            f"{cell.name}, {arm.name}, repeat {repeat + 1}: "
            f"{record['output_tokens_per_s']} tokens/s, e2e {record['mean_e2e_s']} s, "
            f"TPOT p90 {record['tpot_ms_p90']} ms"
        )
        return time.monotonic() - began

    def _limit_ms(self, arm: Arm, cell: Cell) -> float | None:
        if arm.slo_scale is None:
            return None
        if cell not in self.p90_tpot_ms:
            raise RuntimeError("arm 'none' did not give a TPOT limit")
        return round(arm.slo_scale * self.p90_tpot_ms[cell], 4)

    def _measure(
        self, server: VllmServer, cell: Cell, arm: Arm, repeat: int, trace: Replay
    ) -> Measured:
        step = max(1, len(trace.requests) // 4)

        def on_progress(done: int) -> None:
            if done % step == 0:
                self.progress.say(
                    f"{cell.name}, {arm.name}: {done}/{len(trace.requests)} requests"
                )

        # Arms that differ in the limit share a server, not what it has cached.
        extra: dict[str, Any] = {"cache_salt": f"{cell.name} {arm.name} {repeat}"}
        limit_ms = self._limit_ms(arm, cell)
        if limit_ms is not None:
            extra["vllm_xargs"] = {SLO_KEY: limit_ms}
        drain_s = self.options.drain_s
        return measure_open(server, trace.requests, drain_s, on_progress, extra)


def run(options: RunOptions) -> int:
    """Replays the traces; returns 0 only if every output was right."""
    options.check()
    # A trace that is not there is said before a server starts.
    load_traces(options.trace_dir, options.traces, options.trace_seconds, options.seed)
    doc = ReplayDocument(options)
    return conduct_policies(doc, options, ReplayRun, options.model_sizes)
