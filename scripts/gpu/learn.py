"""Serving while a trainer, started by these steps, trains on the same GPU."""

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
SHARES, SECONDS = (0.2, 1.0), 5.0
SERVING_S = SECONDS / 3 + SECONDS * (1 + 2 * len(SHARES))
"""Seconds of `shares` without the starts of engine and trainers."""
FULL = {"control": {"policy": "adaspec"}, "test_time": {"memory": "ngram"}}
# Arms of `gain`: maximum draft tokens, and the `tide` section.
GAIN: dict[str, tuple[int, Any]] = {
    "gain_none": (0, None),
    "gain_frozen": (3, None),
    "gain_tide": (5, FULL),
}


@contextlib.contextmanager
def _trainer(
    place: Place, engine: Engine, share: float, *module: str
) -> Iterator[None]:
    """Run a trainer; enter the context when it has attached to the ring."""
    train = {"device": "cpu" if place.dry else "cuda", "gpu_share": share}
    command = [sys.executable, *(module or ("-m", "vllm_tide", "train"))]
    command += ["--run-dir", str(place.work / "run"), "--config"]
    command += [json.dumps({"tide": {"train": train | {"min_new_tokens": 1024}}})]
    with (place.work / f"trainer-{len(module)}-{share}.log").open("w") as log:
        child = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            deadline = time.monotonic() + ATTACH_S * (5 if place.dry else 1)
            while not engine.tide._ring.stats().consumer_alive:
                assert child.poll() is None, f"the trainer ended: {log.name}"
                assert time.monotonic() < deadline, f"not attached in time: {log.name}"
                time.sleep(0.1)
            yield
            assert child.poll() is None, f"the trainer ended: {log.name}"
        finally:
            child.terminate()
            try:
                child.wait(30)
            except subprocess.TimeoutExpired:
                child.kill()


def _training_steps(place: Place) -> int:
    """Return the optimizer steps that the trainers have reported."""
    files = (place.work / "run").glob("trainer-*.json")
    return max((json.loads(f.read_text()).get("steps", 0) for f in files), default=0)


def shares(place: Place) -> None:
    """Measure throughput and slow steps without a trainer, and by its GPU share."""
    memory = {"gpu_memory_utilization": 0.6, "max_num_seqs": 64}
    engine, token_ids = Engine(place, wide(place), 3, {}, **memory), prompts()
    batch, seconds = (2, 2.0) if place.dry else (32, SECONDS)
    serve = lambda: engine.serve(token_ids, batch, seconds)  # noqa: E731
    engine.serve(token_ids, batch, seconds / 3)
    place.part("no trainer", serve)
    for share in SHARES:
        with _trainer(place, engine, share):
            serve()  # until it trains
            figures = place.part(
                f"share {share}", lambda: serve() | {"steps": _training_steps(place)}
            )
            place.check(figures["steps"] > 0, f"no training step at a share of {share}")


def shift(place: Place) -> None:
    """Measure a domain shift (acceptance, swaps), then plant a bad draft."""
    from bench.suites import planting as rollback_trainer
    from bench.suites.planting import order

    limits = {"gpu_memory_utilization": 0.3, "max_num_seqs": 16}
    engine = Engine(place, (DEMO / "target", DEMO / "draft"), 3, {}, **limits)
    batch, seconds = (2, 8.0) if place.dry else (16, 20.0)

    def serve(domain: str) -> dict[str, Any]:
        figures = engine.serve(prompts(domain), batch, seconds)
        return {**figures, "swaps": engine.tide.swapper.num_swaps}

    with _trainer(place, engine, 0.2):
        place.part("python", lambda: serve("python"))
        for part in range(1 if place.dry else 7):
            learnt = place.part(f"docs_en {part}", lambda: serve("docs_en"))
    place.check(learnt["swaps"] > 0, "no draft was installed")

    def plant() -> list[Any]:
        order(place.work / "run", 0, "permuted", 0)
        with _trainer(place, engine, 0.2, rollback_trainer.__file__):
            return [serve("docs_en") for _ in range(1 if place.dry else 4)]

    back = place.part("planted", plant)[-1]["swaps"] - learnt["swaps"]
    place.check(back >= 2, "the planted draft was not served, or not rolled back")


def gain(place: Place) -> None:
    """Measure a domain shift with a target inflated to the cost of a large one.

    The step's name selects the arm: without speculation, with a frozen draft, or with
    all features and a trainer on the same GPU.
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
        figures = engine.serve(prompts(domain), batch, seconds)
        swaps = 0 if tide is None else engine.tide.swapper.num_swaps
        return figures | {"swaps": swaps}

    with contextlib.nullcontext() if tide is None else _trainer(place, engine, 0.2):
        engine.serve(prompts("python"), batch, seconds / 3)
        place.part("python", lambda: serve("python"))
        for part in range(1 if place.dry else 2 if tide is None else 8):
            place.part(f"logs {part}", lambda: serve("logs"))
