"""Prefixes that were cached before a swap: kept with the old draft's KV, or left."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests import toys
from tests.engine.offline_engine import OfflineEngine, only_manifest
from tests.engine.test_swap import drafted, publish, settled
from vllm_tide.transport.ring import RingReader
from vllm_tide.transport.weights import WeightsWriter

pytestmark = pytest.mark.vllm

PREFIX = list(b"in a hole in the ground there lived one who " * 3)[:128]
FIRST, AFTER, AGAIN = (PREFIX + list(end) for end in (b"first", b"later", b"again"))
PART = PREFIX[:64] + list(b"the road goes ever on and on down from the door ") * 2


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    target = toys.make_target(folder / "target")
    drafts = {
        name: toys.make_draft(folder / name, target, seed=seed)
        for name, seed in (("a", 1), ("b", 2))
    }
    return {"target": target, **drafts}


def case(models: dict[str, Path], draft: str, run_dir: Path, **more: Any) -> dict:
    run = {"run_dir": str(run_dir), "capture": {"ring_mib": 16}}
    tide = run | {"train": {"autostart": False}} | more
    return {
        "target": str(models["target"]),
        "speculative_config": {
            "method": "eagle3",
            "model": str(models[draft]),
            "num_speculative_tokens": 3,
            "tide": {**tide, "control": {"policy": "static"}},
        },
        "engine": {"enable_prefix_caching": True, "block_size": 32},
    }


@pytest.fixture(scope="module")
def of_b(models, tmp_path_factory) -> tuple[list, list]:
    """Tokens and drafts of a request that only draft b ever served."""
    folder = tmp_path_factory.mktemp("b")
    with OfflineEngine(case(models, "b", folder)) as engine:
        reader = RingReader.attach(only_manifest(folder).ring)
        report = engine.work([AFTER], params={"max_tokens": 24})
        return report["tokens"], drafted(reader)


@pytest.mark.timeout(900)
def test_a_request_after_the_swap(models, of_b, tmp_path):
    run = case(models, "a", tmp_path)
    with OfflineEngine(run) as engine:
        manifest = only_manifest(tmp_path)
        reader = RingReader.attach(manifest.ring)
        engine.work([FIRST], params={"max_tokens": 4})
        before = engine.work([FIRST, PART], params={"max_tokens": 40})
        writer = WeightsWriter.attach(manifest.weights)
        publish(writer, load_file(models["b"] / "model.safetensors"), 1)
        time.sleep(0.5)
        # Their blocks, cached ones among them, are in use when the order comes.
        during = engine.work([FIRST, PART], params={"max_tokens": 40})
        assert during["tokens"] == before["tokens"]
        assert settled(engine)["version"] == 1
        drafted(reader)
        report = engine.work([AFTER], params={"max_tokens": 24})
        got = drafted(reader)
        assert report["tokens"] == of_b[0]
        assert got != of_b[1]  # its prefix has the KV of the draft before
        engine.work([AGAIN], params={"max_tokens": 24})
        time.sleep(0.6)  # the workers' next report
        report = settled(engine)
        verified = report["prefixes"]
    assert {"none", "most", "part"} <= set(verified)
    assert "most_old" in verified
    assert all(count > 0 for count in verified.values())
    # The same steps by their length so far; all prompts are short.
    accepted = sum(report["prefixes_accepted"].values())
    assert report["contexts_accepted"] == {"0-1k": accepted}
    assert 0 < report["contexts"]["0-1k"] <= sum(verified.values())
