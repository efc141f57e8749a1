"""Steps at an 8B's shape: cost by batch and depth, traces, swaps under load."""

from __future__ import annotations

import gzip
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from inprocess import Engine, shape
from place import Place
from torch.profiler import profile

K = 5
STEPS, SWAPS = 10, 5


def start(place: Place) -> Engine:
    """Start an engine of an 8B's shape with dummy weights."""
    tide = {"capture": {"ring_mib": 1024}, "control": {"policy": "threshold"}}
    most = 512 if place.dry else 8192
    more = {"max_num_seqs": 256, "gpu_memory_utilization": 0.85, "load_format": "dummy"}
    more |= {"max_num_batched_tokens": most, "skip_tokenizer_init": True}
    return Engine(place, shape(place), K, tide, **more)


def load(engine: Engine, batch: int) -> None:
    """Replace all requests by `batch` long ones with dummy prompts."""
    engine.drain()
    for i in range(batch):
        engine.add([(7 * i + j) % 4000 + 5 for j in range(128)], 1900)


def step(engine: Engine, steps: int, collect: bool) -> None:
    """Run steps, with capture into an always empty ring, or without capture."""
    from vllm_tide.transport.ring import Atomic

    ring = engine.tide._ring
    for _ in range(steps):
        ring._segment.store(Atomic.TAIL, ring._head)
        ring._segment.store(Atomic.COLLECT, int(collect))
        engine.step()
    torch.cuda.synchronize()


def curves(place: Place) -> None:
    """Measure step times by batch and depth with and without capture, and graphs."""
    engine = start(place)
    manager, tide = engine.runner.cudagraph_manager, engine.tide
    graphs = {mode.name: len(of) for mode, of in manager._capture_descs.items()}
    free = torch.cuda.mem_get_info()[0] / 2**30
    facts = {"start_s": engine.start_s, "graphs": graphs, "free_gib": free}
    place.part("start", lambda: facts)
    spent, write = [0.0], tide.capture.write

    def written(*args: Any) -> None:
        began = time.perf_counter()
        write(*args)
        spent[0] += time.perf_counter() - began

    tide.capture.write = written
    tide.control.stop()

    def cell(batch: int, depth: int, collect: bool) -> dict[str, Any]:
        if collect:
            load(engine, batch)
        tide.control.depth = depth
        step(engine, 12 if collect else 6, collect)
        engine.modes.clear()
        spent[0], rows = 0.0, tide.capture.rows
        steps, began = 4 if place.dry else 30, time.perf_counter()
        step(engine, steps, collect)
        return {
            "depth": depth, "capture": collect, "modes": dict(engine.modes),
            "ms": 1e3 * (time.perf_counter() - began) / steps,
            "write_ms": 1e3 * spent[0] / steps, "rows": tide.capture.rows - rows,
            "dropped": dict(tide.capture.dropped), "lost": tide._log.lost,
        }  # fmt: skip

    cells = [(depth, collect) for depth in (K, 3, 2, 1, 0) for collect in (True, False)]
    for n in (1, 8, 12, 32, 64, 128, 256)[: 2 if place.dry else None]:
        place.part(f"batch {n}", lambda n=n: [cell(n, *of) for of in cells])


def seams(place: Place) -> None:
    """Measure swaps, then steps with everything, without capture, and of upstream."""
    engine = start(place)
    engine.tide.control.stop()
    place.part("swaps", lambda: _swaps(place, engine))

    def trace(name: str, run: Any) -> dict[str, Any]:
        load(engine, 2 if place.dry else 64)
        run(12)
        steps, began = 4 if place.dry else 60, time.perf_counter()
        run(steps)
        ms = (
            1e3 * (time.perf_counter() - began) / steps
        )  # before the profiler, which slows the host
        with profile() as profiled:
            run(STEPS)
        file = place.work / f"trace_{name}.json.gz"
        profiled.export_chrome_trace(str(file))
        return {"ms": ms, **_gaps(file)}

    def upstream(steps: int) -> None:
        for _ in range(steps):
            engine.step()
        torch.cuda.synchronize()

    for name, collect in ("all", True), ("control", False):
        on = lambda steps, c=collect: step(engine, steps, c)  # noqa: E731
        place.part(name, lambda n=name, on=on: trace(n, on))
    runner = engine.runner
    engine.worker.tide = runner.tide = runner.speculator.tide = None
    del runner.sample, runner.speculator.propose  # remove vllm_tide's instance wrappers
    place.part("upstream", lambda: trace("upstream", upstream))


def _gaps(file: Path) -> dict[str, Any]:
    """Return a trace's step time, idle time of the busiest stream, and waits."""
    with gzip.open(file, "rt") as text:
        events = json.load(text)["traceEvents"]
    streams: dict[Any, list[tuple[float, float]]] = {}
    waits: Counter[str] = Counter()
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            spans = streams.setdefault(event["args"].get("stream"), [])
            spans.append((event["ts"], event["ts"] + event["dur"]))
        name = str(event.get("name"))
        waits[name] += "Synchronize" in name or "DtoH" in name
    result = {"waits": {name: n / STEPS for name, n in waits.items() if n}}
    if not streams:
        return result
    spans = sorted(max(streams.values(), key=lambda of: sum(b - a for a, b in of)))
    idle, end = 0.0, spans[0][0]
    for begin, last in spans:
        idle, end = idle + max(begin - end, 0.0), max(end, last)
    whole = (end - spans[0][0]) / STEPS
    return {"step_us": whole, "idle_us": idle / STEPS, **result}


def _swaps(place: Place, engine: Any) -> list[dict[str, Any]]:
    swapper, rows = engine.tide.swapper, []
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    draft, install = engine.runner.get_draft_model(), swapper.install_ordered
    addresses = [p.data_ptr() for p in draft.parameters()]

    def install_ordered(version: int) -> None:
        events[0].record()
        install(version)
        events[1].record()

    swapper.install_ordered = install_ordered
    for version in range(1, (2 if place.dry else SWAPS) + 1):
        load(engine, 2 if place.dry else 64)
        step(engine, 12, True)
        times, began = [], time.perf_counter()
        engine.publish(place.work / "draft", version)
        published = time.perf_counter()
        while swapper.version != version:
            at = time.perf_counter()
            assert at < published + 60, f"not installed: {swapper.stager.refused}"
            step(engine, 1, True)
            times.append(1e3 * (time.perf_counter() - at))
        took = {
            "publish_s": published - began,
            "gpu_ms": events[0].elapsed_time(events[1]),
        }
        rows.append(
            took | {"swap_step_ms": times[-1], "ms": sorted(times)[len(times) // 2]}
        )
    assert addresses == [p.data_ptr() for p in draft.parameters()], "weights moved"
    return rows
