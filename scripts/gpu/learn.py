"""Serving while a trainer learns on the same GPU, which is started anew by hand."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from arms import prompts, wide
from inprocess import Engine
from place import DEMO, Place

from inflate_model import inflate

ATTACH_S = 40
FULL = {"control": {"policy": "adaspec"}, "test_time": {"memory": "ngram"}}
# What serves the stream of `gain`: tokens that are drafted at most, and the rest.
GAIN: dict[str, tuple[int, Any]] = {
    "gain_none": (0, None),
    "gain_frozen": (3, None),
    "gain_tide": (5, FULL),
}


@contextlib.contextmanager
def _trainer(
    place: Place, engine: Engine, share: float, *module: str
) -> Iterator[None]:
    """A trainer, from when it reads what the engine captures."""
    from vllm_tide.transport.ring import consumer_alive

    train = {"device": "cpu" if place.dry else "cuda", "gpu_share": share}
    command = [sys.executable, *(module or ("-m", "vllm_tide", "train"))]
    command += ["--run-dir", str(place.work / "run"), "--config"]
    command += [json.dumps({"tide": {"train": train | {"min_new_tokens": 1024}}})]
    with (place.work / f"trainer-{len(module)}-{share}.log").open("w") as log:
        child = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            until = time.monotonic() + ATTACH_S * (5 if place.dry else 1)
            while not consumer_alive(engine.tide._ring._segment.load):
                assert child.poll() is None, f"the trainer ended: {log.name}"
                assert time.monotonic() < until, f"it does not attach: {log.name}"
                time.sleep(0.1)
            yield
            assert child.poll() is None, f"the trainer ended: {log.name}"
        finally:
            child.terminate()
            try:
                child.wait(30)
            except subprocess.TimeoutExpired:
                child.kill()


def shares(place: Place) -> None:
    """Throughput and slow steps at real widths: no trainer, then its shares."""
    memory = {"gpu_memory_utilization": 0.6, "max_num_seqs": 64}
    engine, given = Engine(place, wide(place), 3, {}, **memory), prompts()
    batch, seconds = (2, 2.0) if place.dry else (32, 15.0)
    engine.serve(given, batch, seconds / 3)
    place.part("no trainer", lambda: engine.serve(given, batch, seconds))
    for share in (0.2, 1.0):
        with _trainer(place, engine, share):
            engine.serve(given, batch, seconds)  # until it learns
            place.part(f"share {share}", lambda: engine.serve(given, batch, seconds))


def shift(place: Place) -> None:
    """The stream changes its domain: acceptance, swaps; then a bad head is planted."""
    from bench.suites import planting as rollback_trainer
    from bench.suites.planting import order

    limits = {"gpu_memory_utilization": 0.3, "max_num_seqs": 16}
    engine = Engine(place, (DEMO / "target", DEMO / "draft"), 3, {}, **limits)
    batch, seconds = (2, 8.0) if place.dry else (16, 20.0)

    def serve(domain: str) -> dict[str, Any]:
        found = engine.serve(prompts(domain), batch, seconds)
        return {**found, "swaps": engine.tide.swapper.num_swaps}

    with _trainer(place, engine, 0.2):
        place.part("python", lambda: serve("python"))
        for part in range(1 if place.dry else 7):
            learnt = place.part(f"docs_en {part}", lambda: serve("docs_en"))
    place.judge(learnt["swaps"] > 0, "no head was ever installed")

    def plant() -> list[Any]:
        order(place.work / "run", 0, "permuted", 0)
        with _trainer(place, engine, 0.2, rollback_trainer.__file__):
            return [serve("docs_en") for _ in range(1 if place.dry else 4)]

    back = place.part("planted", plant)[-1]["swaps"] - learnt["swaps"]
    place.judge(back >= 2, "the planted head was not served, or not taken back")


def gain(place: Place) -> None:
    """The target as slow as a large one; the stream changes its domain.

    Served by the arm that the step is named after: without speculation, with a draft
    that is never trained, or with everything on and a trainer on the same GPU.
    """
    k, tide = GAIN[place.data["stage"]]
    target = place.work / "target"
    if not target.exists():
        inflate(DEMO / "target", target, *((480, 0) if place.dry else (131072, 10)))
    limits: dict[str, Any] = {"gpu_memory_utilization": 0.5, "max_num_seqs": 64}
    if tide is not None:
        limits["adaptive"] = {"enable_adaptive_verification": True}
    engine = Engine(place, (target, DEMO / "draft"), k, tide, **limits)
    place.part("start_s", lambda: engine.start_s)
    batch, seconds = (2, 4.0) if place.dry else (32, 12.0)

    def serve(domain: str) -> dict[str, Any]:
        found = engine.serve(prompts(domain), batch, seconds)
        swaps = 0 if tide is None else engine.tide.swapper.num_swaps
        return found | {"swaps": swaps}

    with contextlib.nullcontext() if tide is None else _trainer(place, engine, 0.2):
        engine.serve(prompts("python"), batch, seconds / 3)
        place.part("python", lambda: serve("python"))
        for part in range(1 if place.dry else 2 if tide is None else 8):
            place.part(f"logs {part}", lambda: serve("logs"))
