"""Steps at an 8B's shape: cost by batch and depth, traces, swaps under load."""

from __future__ import annotations

import gzip
import json
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from inprocess import Engine, publish_draft, shape
from place import Place
from torch.profiler import profile

K = 5
STEPS, SWAPS = 10, 5


# Arms of `price`: the `tide` section; None is vLLM's own EAGLE-3 without the section.
ARMS: dict[str, dict[str, Any] | None] = {
    "price_upstream": None,
    "price_control": {"capture": {"enabled": False}, "train": {"autostart": False}},
    "price_default": {},
}
ADAPTIVE = {"enable_adaptive_verification": True}


def start(place: Place, tide: dict[str, Any] | None, **more: Any) -> Engine:
    """Start an engine of an 8B's shape with dummy weights."""
    most = 512 if place.dry else 8192
    more |= {
        "max_num_seqs": 256,
        "gpu_memory_utilization": 0.85,
        "load_format": "dummy",
    }
    more |= {"max_num_batched_tokens": most, "skip_tokenizer_init": True}
    return Engine(place, shape(place), K, tide, **more)


def load(engine: Engine, batch: int) -> None:
    """Replace all requests by `batch` long ones with dummy prompts."""
    engine.drain()
    for i in range(batch):
        engine.add([(7 * i + j) % 4000 + 5 for j in range(128)], 1900)


def step(engine: Engine, steps: int, collect: bool, wait: bool = True) -> None:
    """Run steps, with capture into an always empty ring, or without capture."""
    from vllm_tide.transport.ring import Atomic

    ring = engine.tide._ring
    for _ in range(steps):
        ring._segment.store(Atomic.TAIL, ring._head)
        ring._segment.store(Atomic.COLLECT, int(collect))
        engine.step()
    if wait:
        torch.cuda.synchronize()


def price(place: Place) -> None:
    """Measure the step time of the arm in the step's name, all drafting K tokens.

    Acceptance means nothing with dummy weights, so the depth is fixed, but the policy
    works. The arms may verify different numbers of tokens, which are counted; the first
    steps of TIDE's, which verify all of them, are left out. Also measure the host time
    of the engine's calls into vllm_tide.
    """
    from vllm_tide.engine import verification

    verification._WARMUP_STEPS = 0
    engine = start(place, ARMS[place.data["stage"]], adaptive=ADAPTIVE)
    spent = timed(engine.tide) if engine.tide is not None else {}
    steps = 4 if place.dry else 200
    place.part("start", lambda: {"start_s": engine.start_s})

    def cell(batch: int) -> dict[str, Any]:
        load(engine, batch)
        if engine.depths is not None:
            engine.depths.freeze(K)
        run(engine, 24)
        for times in spent.values():
            times.clear()
        if engine.depths is not None:
            engine.depths.clear()
        before = _work(engine)
        times = run(engine, steps)
        if engine.depths is not None:
            engine.depths.check()
        host = {name: percentiles(of, 1e6) for name, of in spent.items() if of}
        counts = {name: (n - before[name]) / steps for name, n in _work(engine).items()}
        return {"ms": percentiles(times, 1e3), "host_us": host, "per_step": counts}

    for batch in (1, 8, 64, 256)[: 2 if place.dry else None]:
        place.part(f"batch {batch}", lambda n=batch: cell(n))


def _work(engine: Engine) -> dict[str, float]:
    """Return counts of what an arm's steps do: they may differ in an equal depth."""
    named = {metric.name: metric for metric in engine.llm.get_metrics()}
    verified = named.get("vllm:spec_decode_num_draft_tokens")
    counts = {"verified": verified.value if verified else 0.0}
    if engine.tide is not None and engine.tide.capture is not None:
        counts["captured_rows"] = engine.tide.capture.rows
        counts["dropped_rows"] = sum(engine.tide.capture.dropped.values())
    return counts


def run(engine: Engine, steps: int) -> list[float]:
    """Run steps and wait for the last; return the host's time of each (s)."""
    times = []
    for _ in range(steps):
        began = time.perf_counter()
        if engine.tide is not None and engine.tide._ring is not None:
            step(engine, 1, True, wait=False)
        else:
            engine.step()
        times.append(time.perf_counter() - began)
    torch.cuda.synchronize()
    return times


def timed(tide: Any) -> dict[str, list[float]]:
    """Time the calls of a step into vllm_tide; return the times (s) by call."""
    spent: dict[str, list[float]] = {}

    def time_calls(owner: Any, name: str) -> None:
        inner, times = getattr(owner, name), spent.setdefault(name, [])

        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            result = inner(*args, **kwargs)
            times.append(time.perf_counter() - began)
            return result

        setattr(owner, name, call)

    for name in ("begin_step", "on_logits", "on_step"):
        time_calls(tide, name)
    if tide._verification is not None:  # before the target's launch, as begin_step
        time_calls(tide._verification, "_tables")
    if tide.control is not None:
        time_calls(tide.control, "learn")
    if tide.capture is not None:
        time_calls(tide.capture, "stage")
        time_calls(tide.capture, "write")
    return spent


def percentiles(times: list[float], unit: float) -> dict[str, float]:
    ordered = sorted(times)
    return {f"p{p}": unit * ordered[len(ordered) * p // 100] for p in (50, 90, 99)}


def curves(place: Place) -> None:
    """Measure step times by batch and depth with and without capture, and graphs."""
    engine = start(place, {"capture": {"ring_mib": 1024}}, adaptive=ADAPTIVE)
    manager, tide = engine.runner.cudagraph_manager, engine.tide
    graphs = {mode.name: len(of) for mode, of in manager._capture_descs.items()}
    free = torch.cuda.mem_get_info()[0] / 2**30
    facts = {"start_s": engine.start_s, "graphs": graphs, "free_gib": free}
    place.part("start", lambda: facts)

    def cell(batch: int, depth: int, collect: bool) -> dict[str, Any]:
        if collect:
            load(engine, batch)
        engine.depths.freeze(depth)
        step(engine, 12 if collect else 6, collect)
        engine.modes.clear()
        engine.depths.clear()
        rows = tide.capture.rows
        steps, began = 4 if place.dry else 30, time.perf_counter()
        step(engine, steps, collect)
        ms = 1e3 * (time.perf_counter() - began) / steps
        engine.depths.check()
        return {
            "depth": depth, "capture": collect, "modes": dict(engine.modes), "ms": ms,
            "rows": tide.capture.rows - rows, "dropped": dict(tide.capture.dropped),
            "lost": tide._log.lost,
        }  # fmt: skip

    depths = engine.depths.choices[::-1]
    cells = [(depth, collect) for depth in depths for collect in (True, False)]
    for n in (1, 8, 64, 256)[: 2 if place.dry else None]:
        place.part(f"batch {n}", lambda n=n: [cell(n, *of) for of in cells])


def restart(place: Place) -> None:
    """Start an engine while drafts are published, as after a restart with a trainer.

    An upload during the capture of a CUDA graph would invalidate it.
    """
    published, ended = [0], threading.Event()

    def publish() -> None:
        from vllm_tide.transport.rendezvous import read_manifests

        run_dir, draft = place.work / "run", shape(place)[1]
        while not ended.wait(0.2 if not published[0] else 2.0):
            if engines := read_manifests(run_dir) if run_dir.exists() else []:
                published[0] += 1
                shared = set(engines[0].shared)
                publish_draft(engines[0].weights, draft, published[0], shared)

    shape(place)
    thread = threading.Thread(target=publish, daemon=True)
    thread.start()
    try:
        engine = start(place, {}, adaptive=ADAPTIVE)
        before = published[0]
        load(engine, 4)
        deadline = time.monotonic() + 30
        while not engine.tide.swapper.version and time.monotonic() < deadline:
            step(engine, 1, True)
    finally:
        ended.set()
        thread.join()
    faults, version = dict(engine.tide._faults()), engine.tide.swapper.number
    result = {"published_at_start": before, "version": version, "faults": faults}
    result |= {"refused": dict(engine.tide.swapper.stager.refused)}
    place.part("restart", lambda: result | {"start_s": engine.start_s})
    assert before and version and not faults, f"{result}"


def seams(place: Place) -> None:
    """Measure swaps, then trace steps with everything and without capture."""
    engine = start(place, {"capture": {"ring_mib": 1024}}, adaptive=ADAPTIVE)
    engine.depths.freeze(K)
    place.part("swaps", lambda: _swaps(place, engine))

    def trace(name: str, collect: bool) -> dict[str, Any]:
        load(engine, 2 if place.dry else 64)
        step(engine, 12, collect)
        engine.depths.clear()
        with profile() as profiled:
            step(engine, STEPS, collect)
        engine.depths.check()
        file = place.work / f"trace_{name}.json.gz"
        profiled.export_chrome_trace(str(file))
        return _gaps(file)

    for name, collect in ("all", True), ("control", False):
        place.part(name, lambda n=name, c=collect: trace(n, c))


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
        engine.publish(shape(place)[1], version)
        published = time.perf_counter()
        while swapper.number != version:
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
