"""`vllm-tide profile` on Model Runner V2, and a server that takes what it stored.

In Triton's interpreter: its times are its own, but they are measured, fitted, kept and
found again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import toys
from tests.engine.forked import run_forked
from tests.engine.offline_engine import OfflineEngine
from vllm_tide.control.profile_store import load

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

STEPS = 3
PROMPTS = [list(range(20)), list(range(5, 40)), [7]]
ENGINE = {"max_num_batched_tokens": 64, "max_num_seqs": 4, "block_size": 32}
SCRIPT = Path(__file__).with_name("offline_profile.py")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("models")
    target = toys.make_target(folder / "target")
    return str(target), str(toys.make_draft(folder / "draft", target))


def profiled(models: tuple[str, str], asynchronous: bool) -> dict[str, Any]:
    """Run the command; what it measured."""
    arguments = ["profile", "--quick", "--model", models[0], "--draft", models[1]]
    arguments += ["--num-speculative-tokens", str(STEPS), "--dtype", "float32"]
    arguments += ["--seconds", "20", "--", "--enforce-eager", "--max-model-len", "256"]
    for name, value in ENGINE.items():
        arguments += [f"--{name.replace('_', '-')}", str(value)]
    case = {"asynchronous": asynchronous, "arguments": arguments}
    done = run_forked([str(SCRIPT), json.dumps(case)], interpreted=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "R2 " in done.stdout and "written: " in done.stdout
    lines = [line for line in done.stdout.splitlines() if line.startswith("REPORT ")]
    return json.loads(lines[0].removeprefix("REPORT "))


def serve(models: tuple[str, str], runner: str, run_dir: Path) -> dict[str, Any]:
    """Serve with nothing set but where it meets its trainer."""
    case = {
        "target": models[0],
        "runner": runner,
        "stats": True,
        "engine": ENGINE,
        "speculative_config": {
            "method": "eagle3",
            "model": models[1],
            "num_speculative_tokens": STEPS,
            "tide": {"run_dir": str(run_dir)},
        },
    }
    with OfflineEngine(case) as engine:
        report = engine.work(PROMPTS, params={"max_tokens": 12})
        assert list(run_dir.glob("trainer-*.log"))  # it was started with the engine
        return report


def test_without_a_profile_v2_starts_and_serves_with_nothing_set(
    models, tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    report = serve(models, "v2", tmp_path / "run")
    assert report["control_faults"] == report["faults"] == {}
    assert report["control"]["drafted_tokens"] > 0 and report["rows"] > 0
    assert [len(tokens) for tokens in report["tokens"]] == [12] * len(PROMPTS)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_profile_of_v2_is_measured_kept_and_served_from(
    asynchronous, models, tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found = profiled(models, asynchronous)
    assert found["state"] == {
        "requests": 0,
        "slots": 0,
        "policy": True,  # the engine's own, given back
        "faults": {},
        "lost": 0,
        "async": asynchronous,
    }
    assert len(found["shapes"]) >= 10
    assert {shape[4] for shape in found["shapes"]} >= {1, STEPS}
    assert {shape[0] for shape in found["shapes"]} >= {1, 2, 4}
    assert any(shape[3] for shape in found["shapes"])  # prefill beside decoding
    for shape, times in zip(found["shapes"], found["times"], strict=True):
        requests, context, verified, prefill, drafted, first_rows = shape
        assert context >= 1 and verified <= requests * STEPS
        assert drafted >= 1  # the first pass runs in every step
        assert first_rows == requests + verified + prefill
        assert times[0] > 0 and times[1] > 0
        assert (times[2] > 0) == (drafted >= 2)
        if asynchronous and not prefill:
            assert verified % requests == 0  # the scheduler caps all alike
    (kept,) = (tmp_path / "cache" / "vllm_tide" / "profiles").glob("*.json")
    stored = load(kept)
    runner = "v2-async" if asynchronous else "v2"
    assert stored.facts["runner"] == runner
    assert stored.model.target_curve(2, 100, 4).min() > 0
    report = serve(models, runner, tmp_path / "run")
    assert report["control_faults"] == report["faults"] == {}
    control = report["control"]
    # Times are predicted, and were compared with what was measured.
    assert control["predicted_step_s"] > 0 and control["time_error"] >= 0
    assert [len(tokens) for tokens in report["tokens"]] == [12] * len(PROMPTS)
    assert list(kept.parent.glob("*.json")) == [kept]  # nothing was measured anew
