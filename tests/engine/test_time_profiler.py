"""`vllm-tide profile` on toy models: real vLLM, real kernels, the runner left clean."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests import toys
from tests.engine.forked import run_forked

pytestmark = pytest.mark.vllm

# A caller of the command's own functions, so that the engine can be looked into.
SCRIPT = """
import json, os, sys
os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
from vllm import SamplingParams
import vllm_tide.engine.profiler as profile

target, draft = sys.argv[1:]
arguments = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "256",
             "--max-num-seqs", "4", "--max-num-batched-tokens", "64"]

def generate(engine, name):
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    engine.add_request(name, {"prompt_token_ids": list(range(20))}, params)
    while True:
        for output in engine.step():
            if output.finished:
                return list(output.outputs[0].token_ids)

def state(worker):
    import torch
    runner, control = worker.model_runner, worker.tide.control
    return {
        "requests": len(runner.requests),
        "batch": runner.input_batch.num_reqs,
        "random": torch.get_rng_state().sum().item(),
        "slots": len(control._table.slot_of),
        "listeners": len(control.on_round),
        "forced": control._forced,
        "policy": control.policy is not None,
        "missing": int(control._backlog.missing.sum()),
    }

with profile.open_engine(target, draft, 3, arguments) as engine:
    before = generate(engine, "a")
    states = engine.collective_rpc(state)
    samples, facts = engine.collective_rpc(
        profile.measure_worker, args=(True, 3, 3.0)
    )[0]
    states += engine.collective_rpc(state)
    after = generate(engine, "b")
shapes = [
    [s.requests, s.context, s.verified, s.prefill, s.steps, s.first_rows]
    for s in samples
]
print("REPORT " + json.dumps({
    "before": before, "after": after, "states": states, "shapes": shapes,
    "times": [[s.target_s, s.draft_first_s, s.draft_next_s] for s in samples],
    "facts": facts,
}))
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("models")
    target = toys.make_target(folder / "target")
    return str(target), str(toys.make_draft(folder / "draft", target))


def test_measuring_leaves_the_engine_as_it_was(models, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = run_forked([str(script), *models])
    lines = [line for line in done.stdout.splitlines() if line.startswith("REPORT ")]
    assert lines, done.stderr[-4000:]
    report = json.loads(lines[0].removeprefix("REPORT "))
    assert report["after"] == report["before"]
    before, after = report["states"]
    # Request "a" ended without a further step, so the runner still knows it.
    assert before["requests"] == 1
    nothing = {"batch": 0, "slots": 0, "missing": 0, "forced": None}
    assert after == before | nothing
    assert after["policy"]
    assert len(report["shapes"]) >= 10
    steps = {shape[4] for shape in report["shapes"]}
    assert steps >= {0, 3}
    assert any(shape[3] for shape in report["shapes"])  # prefill beside decoding
    for shape, times in zip(report["shapes"], report["times"], strict=True):
        requests, context, verified, prefill, drafted, first_rows = shape
        assert context >= 1
        assert times[0] > 0
        assert first_rows == (requests + verified + prefill if drafted else 0)
        assert (times[1] > 0) == (drafted >= 1)
        assert (times[2] > 0) == (drafted >= 2)
    assert report["facts"]["max_num_seqs"] == 4
    kept = list((tmp_path / "vllm_tide" / "profiles").glob("*.json"))
    assert len(kept) == 1  # the start-up's own measurement


def test_the_command_writes_a_profile_the_engine_accepts(models, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    out = tmp_path / "profile.json"
    command = [sys.executable, "-m", "vllm_tide", "profile", "--quick"]
    command += ["--model", models[0], "--draft", models[1], "--out", str(out)]
    command += ["--num-speculative-tokens", "2", "--dtype", "float32"]
    command += ["--seconds", "2", "--", "--enforce-eager", "--max-model-len", "256"]
    command += ["--max-num-seqs", "4"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "R2 " in done.stdout
    assert "k=2" in done.stdout
    from vllm_tide.control.profile_store import load

    stored = load(out)
    assert stored.facts["max_num_seqs"] == 4
    assert stored.model.target_curve(2, 100, 4).min() > 0
