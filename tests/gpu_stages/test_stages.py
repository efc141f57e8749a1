"""scripts/gpu/run.sh where there is no GPU: what works in seconds, and what it says."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from vllm_tide.bench import identity

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments):
    env = {**os.environ, "TIDE_PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    command = ["bash", str(ROOT / "scripts/gpu/run.sh"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=200)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_a_stage_ends_with_one_sentence(tmp_path):
    done = run("smoke", "--json", tmp_path / "f.json")
    assert done.returncode == 2
    assert done.stderr == (
        "error: smoke needs a GPU and there is none; --cpu proves that it works\n"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow  # three processes that import torch
@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
def test_kernels_run_in_the_interpreter_and_are_not_measured_twice(tmp_path):
    file = tmp_path / "f.json"
    done = run("kernels", "--cpu", "--json", file)
    assert done.returncode == 0, done.stderr
    whole = json.loads(file.read_text())
    assert whole["complete"] and whole["chip"] == "no GPU (--cpu)"
    names = ["copy", "pack_rows", "topk_teacher", "kl_rows", "select_tokens"]
    assert list(whole["parts"]) == names
    again = run("kernels", "--cpu", "--json", file)
    assert again.returncode == 0 and again.stdout == ""
    other = run("swap", "--cpu", "--json", file)
    assert other.returncode == 2 and "give another file" in other.stderr


def test_greedy_text_may_differ_at_near_ties_only(monkeypatch):
    """The demo's target itself judges: its second choice is a wrong one."""
    monkeypatch.syspath_prepend(ROOT / "scripts" / "gpu")
    import serving

    prompt = [10, 20, 30, 40]
    scorer = identity.transformers_scorer(serving.DEMO / "target", "float32")
    wide = torch.tensor(scorer(prompt)[1])
    best, second = wide.topk(2).indices.tolist()
    plain = {"prompts": [prompt], "tokens": [[best, 5]]}
    assert serving.judge({"none": plain, "a": plain}, "float32") == []
    other = {"prompts": [prompt], "tokens": [[second, 5]]}
    with pytest.raises(AssertionError, match="no near tie"):
        serving.judge({"none": plain, "a": plain, "b": other}, "float32")
    # Between types that round so much that the two cannot be told apart, it is none.
    monkeypatch.setattr(identity, "TOLERANCE_ERRORS", 1e9)
    (tie,) = serving.judge({"none": plain, "b": other}, "float32")
    assert tie["near_tie"] and tie["arms"] == ["none", "b"] and tie["position"] == 0


def test_heads_are_staged_at_their_sizes(tmp_path):
    file = tmp_path / "f.json"
    done = run("swap", "--cpu", "--only", "stage", "--json", file)
    assert done.returncode == 0, done.stderr
    whole = json.loads(file.read_text())
    assert not whole["complete"]  # nothing was installed
    for size in (0.006, 0.012):
        part = whole["parts"][f"stage {size:g} GB"]
        assert part["bytes"] == pytest.approx(size * 1e9, rel=0.2)
        assert len(part["stage_s"]) == 5
