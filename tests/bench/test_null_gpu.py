"""The kept table of the null GPU: every run, whole, priced, no wait more."""

from __future__ import annotations

import json
import lzma
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "scripts" / "bench" / "results"
KEPT = RESULTS / "null_gpu.json.xz"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts" / "null_gpu")
    monkeypatch.delitem(sys.modules, "run", raising=False)
    import run

    yield run
    del sys.modules["run"]


@pytest.fixture
def runs():
    return json.loads(lzma.decompress(KEPT.read_bytes()))["runs"]


def test_every_arm_was_run_both_ways_and_is_sound(script, runs):
    wanted = {f"{how}/{arm}" for how in ("async", "sync") for arm in script.ARMS}
    assert runs.keys() == wanted
    assert script.sound(runs)
    rows = script.table(runs)
    assert {f"{how}/adaptive/verifies_half" for how in ("async", "sync")} <= rows.keys()
    for how in "async", "sync":  # three kernels, and nothing else
        memory, all_of_it = (rows[f"{how}/{arm}"] for arm in ("memory", "all"))
        more = {name: memory[name] - count for name, count in all_of_it.items()}
        assert more == pytest.approx({**dict.fromkeys(more, 0), "launches": 3})
    swapped = [run["swap"] for run in runs.values() if "swap" in run]
    assert len(swapped) == 8
    for swap in swapped:
        assert swap["version"] == 1 and swap["new_weights_are_served"]
        assert swap["same_addresses"] and swap["same_graphs"]


@pytest.mark.parametrize("what", ["wait", "fault", "failed", "unpriced", "cut waits"])
def test_a_run_that_falls_short_is_told(script, runs, what):
    found = runs["async/adaptive"]
    if what == "wait":
        found["decode"]["synchronisations"] += 1
    elif what == "fault":
        found["faults"] = {"prices": 1}
    elif what == "failed":
        runs["async/adaptive"] = {"failed": 1}
    elif what == "unpriced":
        found["prices"]["used"] -= 1
    else:
        found["cuts"]["half"]["torch_allocations"] += 1
    assert not script.sound(runs)
