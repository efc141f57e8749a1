"""At an 8B's shape: steps traced with our seams and without, and swaps under load."""

from __future__ import annotations

import gzip
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import curves
import torch
from place import Place
from torch.profiler import profile

STEPS, SWAPS = 10, 5


def seams(place: Place) -> None:
    """Swaps, then all on, then without capture, then upstream's own steps."""
    engine = curves.start(place, "threshold")
    engine.tide.control.stop()
    place.part("swaps", lambda: _swaps(place, engine))

    def trace(name: str, step: Any) -> dict[str, Any]:
        curves.load(engine, 2 if place.dry else 64)
        step(12)
        steps, began = 4 if place.dry else 60, time.perf_counter()
        step(steps)
        ms = 1e3 * (time.perf_counter() - began) / steps  # the profiler slows the host
        with profile() as profiled:
            step(STEPS)
        file = place.work / f"trace_{name}.json.gz"
        profiled.export_chrome_trace(str(file))
        return {"ms": ms, **_gaps(file)}

    def upstream(steps: int) -> None:
        for _ in range(steps):
            engine.step()
        torch.cuda.synchronize()

    for name, collect in ("all", True), ("control", False):
        on = lambda steps, c=collect: curves.step(engine, steps, c)  # noqa: E731
        place.part(name, lambda n=name, on=on: trace(n, on))
    runner = engine.runner
    engine.worker.tide = runner.tide = runner.speculator.tide = None
    del runner.sample, runner.speculator.propose  # ours, around the class's own
    place.part("upstream", lambda: trace("upstream", upstream))


def _gaps(file: Path) -> dict[str, Any]:
    """Of a trace: time of a step, of it the busiest stream's idle time, and waits."""
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
    found = {"waits": {name: n / STEPS for name, n in waits.items() if n}}
    if not streams:
        return found
    spans = sorted(max(streams.values(), key=lambda of: sum(b - a for a, b in of)))
    idle, end = 0.0, spans[0][0]
    for begin, last in spans:
        idle, end = idle + max(begin - end, 0.0), max(end, last)
    whole = (end - spans[0][0]) / STEPS
    return {"step_us": whole, "idle_us": idle / STEPS, **found}


def _swaps(place: Place, engine: Any) -> list[dict[str, Any]]:
    swapper, found = engine.tide.swapper, []
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    draft, install = engine.runner.get_draft_model(), swapper.install_ordered
    addresses = [p.data_ptr() for p in draft.parameters()]

    def install_ordered(version: int) -> None:
        events[0].record()
        install(version)
        events[1].record()

    swapper.install_ordered = install_ordered
    for version in range(1, (2 if place.dry else SWAPS) + 1):
        curves.load(engine, 2 if place.dry else 64)
        curves.step(engine, 12, True)
        times, began = [], time.perf_counter()
        engine.publish(place.work / "draft", version)
        published = time.perf_counter()
        while swapper.version != version:
            at = time.perf_counter()
            assert at < published + 60, f"not installed: {swapper.stager.refused}"
            curves.step(engine, 1, True)
            times.append(1e3 * (time.perf_counter() - at))
        took = {
            "publish_s": published - began,
            "gpu_ms": events[0].elapsed_time(events[1]),
        }
        found.append(
            took | {"swap_step_ms": times[-1], "ms": sorted(times)[len(times) // 2]}
        )
    assert addresses == [p.data_ptr() for p in draft.parameters()], "weights moved"
    return found
