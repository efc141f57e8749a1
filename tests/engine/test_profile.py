"""`vllm-tide profile` in short: it measures, keeps, and leaves the engine as it was."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests import toys
from tests.engine.offline_engine import OfflineEngine
from tests.engine.shared_engine import engine_case
from vllm_tide.config import ControlConfig
from vllm_tide.control.policies import StaticPolicy, ThresholdPolicy
from vllm_tide.control.profile_store import load

pytestmark = pytest.mark.vllm


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "runner", ["v1", pytest.param("v2", marks=pytest.mark.nightly)]
)
def test_the_command_writes_a_profile_the_engine_accepts(tmp_path, monkeypatch, runner):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    target = toys.make_target(tmp_path / "target")
    draft = toys.make_draft(tmp_path / "draft", target)
    out = tmp_path / "profile.json"
    command = ["profile", "--quick", "--model", str(target), "--draft", str(draft)]
    command += ["--out", str(out), "--num-speculative-tokens", "2", "--seconds", "2"]
    command += ["--dtype", "float32", "--", "--enforce-eager", "--max-model-len", "256"]
    command += ["--max-num-seqs", "4"]
    code = "import sys; sys.path.insert(0, 'tests/engine')\n"
    if runner == "v2":
        code += "from v2_on_cpu import prepare; prepare(asynchronous=False)\n"
    code += "from vllm_tide.cli.main import main; sys.exit(main(sys.argv[1:]))"
    argv = [sys.executable, "-c", code, *command]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "R2 " in done.stdout
    stored = load(out)
    assert stored.facts["max_num_seqs"] == 4 and stored.facts["runner"] == runner
    assert stored.model.target_curve(2, 100, 4).min() > 0


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_without_a_profile_v2_starts_its_trainer_and_serves_with_nothing_set(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run_dir = tmp_path / "run"
    case = engine_case(run_dir, {"runner": "v2", "tide": {}})
    case["speculative_config"]["tide"] = {"run_dir": str(run_dir)}
    with OfflineEngine(case) as engine:
        report = engine.work([list(range(20)), [7]], params={"max_tokens": 12})
        assert list(run_dir.glob("trainer-*.log"))  # it was started with the engine
    assert report["control_faults"] == report["faults"] == {}
    assert report["control"]["drafted_tokens"] > 0 and report["rows"] > 0


@pytest.mark.parametrize("policy", ["adaspec", "threshold"])
@pytest.mark.parametrize("adaptive", [False, True])
def test_without_times_a_policy_stands_in_that_needs_none(
    policy, adaptive, monkeypatch, caplog
):
    from vllm_tide.engine import policy_start
    from vllm_tide.engine.worker_v2 import WorkerTideV2

    monkeypatch.setattr(policy_start, "stored_times", lambda *given: None)
    tide = WorkerTideV2.__new__(WorkerTideV2)
    tide.control = SimpleNamespace(
        policy=None,
        num_speculative_tokens=3,
        capacity=8,
        trims=True,
        cut_on_device=False,
    )
    tide._leader, tide._worker, tide._adaptive = True, None, adaptive
    tide._config = SimpleNamespace(control=ControlConfig(policy=policy))
    tide.warm_up()
    if adaptive and policy != "threshold":
        assert tide.control.policy is None  # vLLM measures times when it captures
    else:
        kind = ThresholdPolicy if policy == "threshold" else StaticPolicy
        assert type(tide.control.policy) is kind
    said = [r.getMessage() for r in caplog.records if "'static'" in r.getMessage()]
    assert len(said) == (policy != "threshold" and not adaptive)
    assert all("run `vllm-tide profile`" in line for line in said)
