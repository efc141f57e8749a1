"""What a step costs at an 8B's shape: batch by depth, capture on and off, graphs."""

from __future__ import annotations

import time
from typing import Any

import torch
from inprocess import Engine, shape
from place import Place

K = 5


def curves(place: Place) -> None:
    """With a policy that has graphs for each length it offers."""
    _measure(place, "threshold", (K, 3, 2, 1, 0), (1, 8, 12, 32, 64, 128, 256))


def static(place: Place) -> None:
    """The same engine with one length: what the others cost at start and in memory."""
    _measure(place, "static", (K,), (1, 64, 256))


def start(place: Place, policy: str) -> Engine:
    """The engine of an 8B's shape, its weights made up."""
    tide = {"capture": {"ring_mib": 1024}, "control": {"policy": policy}}
    most = 512 if place.dry else 8192
    more = {"max_num_seqs": 256, "gpu_memory_utilization": 0.85, "load_format": "dummy"}
    more |= {"max_num_batched_tokens": most, "skip_tokenizer_init": True}
    return Engine(place, shape(place), K, tide, **more)


def load(engine: Engine, batch: int) -> None:
    """Serve so many requests, of any tokens, which do not end soon, and no others."""
    engine.drain()
    for i in range(batch):
        engine.add([(7 * i + j) % 4000 + 5 for j in range(128)], 1900)


def step(engine: Engine, steps: int, collect: bool) -> None:
    """Step, capturing for a reader that never lags, or not."""
    from vllm_tide.transport.ring import Word

    ring = engine.tide._ring
    for _ in range(steps):
        ring._segment.store(Word.TAIL, ring._head)
        ring._segment.store(Word.COLLECT, int(collect))
        engine.step()
    torch.cuda.synchronize()


def _measure(
    place: Place, policy: str, depths: tuple[int, ...], batches: tuple[int, ...]
) -> None:
    engine = start(place, policy)
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
    if policy != "static":
        tide.control.stop()

    def cell(batch: int, depth: int, collect: bool) -> dict[str, Any]:
        if collect:
            load(engine, batch)
        if policy != "static":
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

    cells = [(depth, collect) for depth in depths for collect in (True, False)]
    for n in batches[: 2 if place.dry else None]:
        place.part(f"batch {n}", lambda n=n: [cell(n, *of) for of in cells])
