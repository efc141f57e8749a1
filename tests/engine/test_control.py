"""Whatever the lengths are, outputs are the target's own and nothing is lost."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from tests import toys
from tests.e2e.test_serve import greedy
from tests.engine.forked import run_forked
from tests.patches.test_cpu_sampling import chi_square_p

pytestmark = pytest.mark.vllm

SCRIPT = Path(__file__).with_name("offline_control.py")
DEMO = Path(__file__).parents[2] / "scripts" / "demo"
PROMPTS = [
    list(b"hello world"),
    list(b"def main(argv):\n    return 0 " * 4),
    list(b"abc abc abc"),
    list(b"the quick brown fox jumps over the lazy dog " * 3),
    [7],
]
# Chunked prefill beside decoding: prompts of more than 32 tokens take several steps.
ENGINE = {"max_num_batched_tokens": 32, "max_num_seqs": 4, "block_size": 32}
DEMO_CASE = {
    "params": {"max_tokens": 48},
    "engine": {"max_num_batched_tokens": 64, "max_num_seqs": 4, "block_size": 32},
}


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    target = toys.make_target(folder / "target")
    return target, toys.make_draft(folder / "draft", target)


@pytest.fixture(scope="module")
def plain(toy) -> list[list[int]]:
    """The toy target's greedy tokens, by Transformers."""
    return [greedy(toy[0], prompt, 24) for prompt in PROMPTS]


def run(models: Any, run_dir: Path, script: Any = None, **case: Any) -> Any:
    """What an engine does under a script, or without speculation."""
    return run_each(models, run_dir, [script], **case)[0]


def run_each(models: Any, run_dir: Path, scripts: list[Any], **case: Any) -> list[Any]:
    speculative = None
    if scripts != [None]:
        control = {"policy": "adaspec", **case.pop("control", {})}
        test_time = case.pop("test_time", {})
        speculative = {
            "method": "eagle3",
            "model": str(models[1]),
            "num_speculative_tokens": case.pop("most", 3),
            "tide": {
                "run_dir": str(run_dir),
                "capture": {"enabled": False},
                "swap": {"enabled": False},
                "control": control,
                "test_time": test_time,
            },
        }
    work = {
        "target": str(models[0]),
        "speculative_config": speculative,
        "prompts": PROMPTS,
        "params": {"max_tokens": 24},
        "engine": ENGINE,
        "scripts": scripts,
        **case,
    }
    argv = [str(SCRIPT), json.dumps(work)]
    if "tensor_parallel_size" in work["engine"]:
        alone = [sys.executable, *argv]
        done = subprocess.run(alone, capture_output=True, text=True, check=False)
    else:
        done = run_forked(argv)
    lines = [x for x in done.stdout.splitlines() if x.startswith("REPORT ")]
    assert len(lines) == len(scripts), done.stderr[-4000:]
    return [json.loads(line.removeprefix("REPORT ")) for line in lines]


@pytest.fixture(scope="module")
def scripted(toy, tmp_path_factory) -> list[Any]:
    """Paused, probed, always drafting."""
    paused = [[0, 0, 0], [0, 0, 0], [0, 0, 1], [3, 0, 0]]
    scripts = [paused, [[0, 0, 0], [0, 0, 1]], [[3, 0, 0]]]
    return run_each(toy, tmp_path_factory.mktemp("run"), scripts)


def test_after_a_pause_the_draft_drafts_as_if_it_had_never_paused(scripted):
    """Off for steps (prefill too), probed, then on: the same drafts each time."""
    paused, _, always = scripted
    assert paused["tokens"] == always["tokens"]
    assert len(paused["drafts"]) == len(always["drafts"])
    drafted = [step for step in paused["drafts"] if step]
    assert len(drafted) >= 6
    for fresh, late in zip(always["drafts"], paused["drafts"], strict=True):
        assert late in ({}, fresh)
    assert paused["holes"] == 0 and not paused["lost"]


def test_a_steps_drafts_come_with_its_output(scripted):
    """Drafted or not: vLLM's own way is two messages between two steps."""
    assert [report["asked"] for report in scripted] == [0, 0, 0]
    assert any(scripted[2]["drafts"])


def test_a_probe_sees_what_drafting_would_have_seen(toy, scripted, tmp_path):
    # Prefilled whole: at the end of a chunk upstream feeds the draft the prompt's last
    # token instead of the next one, and catching up does not repeat that.
    engine = ENGINE | {"max_num_batched_tokens": 256}
    always = run(toy, tmp_path, script=[[1, 0, 0]], engine=engine)
    probed = scripted[1]
    assert probed["tokens"] == always["tokens"]
    assert len(probed["probes"]) >= 6
    assert probed["written"] == 0  # to the target's table of tokens
    seen = {round(value, 4) for step in always["confidences"] for value in step}
    for _, confidence, _ in probed["probes"]:
        assert any(abs(confidence - value) < 2e-4 for value in seen)


def test_without_memory_for_it_a_pause_leaves_holes_and_right_outputs(
    toy, plain, tmp_path
):
    holes = run(
        toy,
        tmp_path,
        script=[[0, 0, 0], [0, 0, 1], [3, 3, 0]],
        constants={"vllm_tide.engine.control_v1.CATCHUP_MIB": 0},
    )
    assert holes["tokens"] == plain
    assert holes["holes"] > 0 and not holes["lost"]


@pytest.fixture(scope="module")
def plain_demo(tmp_path_factory) -> list[list[int]]:
    """The demo target's greedy tokens: in fp32 the same compiled or not."""
    demo = (DEMO / "target", DEMO / "draft")
    return run(demo, tmp_path_factory.mktemp("plain"), **DEMO_CASE)["tokens"]


@pytest.mark.parametrize("eager", [True, False])
def test_any_lengths_give_the_targets_own_greedy_tokens(plain_demo, tmp_path, eager):
    """A trained draft, so that tokens are accepted; random steps, prefixes, pauses."""
    demo = (DEMO / "target", DEMO / "draft")
    script = [[5, -1, 0], [1, 1, 0], [0, 0, 0], [0, 0, 1], [5, 5, 0], [2, -1, 0]]
    steered = run(demo, tmp_path, script=script, most=5, eager=eager, **DEMO_CASE)
    assert steered["tokens"] == plain_demo
    assert steered["outcomes"]["accepted"] > 10
    assert steered["faults"] == {} and not steered["lost"]


def test_any_lengths_keep_the_distribution_of_samples(tmp_path):
    """256 samples of one prompt at temperature 1, with a draft that gets accepted."""
    demo = (DEMO / "target", DEMO / "draft")
    tokenizer = Tokenizer.from_file(str(DEMO / "target" / "tokenizer.json"))
    prompt = tokenizer.encode('{"id": "queue.Queue", "line": 12, "name": "').ids

    def sample(seed: int, **case: Any) -> dict[str, Any]:
        return run(
            demo,
            tmp_path,
            prompts=[prompt] * 256,
            params={"max_tokens": 8, "temperature": 1.0},
            engine={"max_num_seqs": 64, "seed": seed},
            **case,
        )

    plain = sample(0)
    script = [[3, 3, 0], [3, -1, 0], [1, 1, 0], [0, 0, 1]]
    steered = sample(1, script=script)
    assert steered["outcomes"]["accepted"] > 50 and not steered["lost"]
    for position in range(8):
        a, b = ([row[position] for row in side["tokens"]] for side in (plain, steered))
        # Fixed seeds: a pass today is a pass tomorrow. 8 comparisons in all.
        assert chi_square_p(a, b) > 1e-4, position
    joint = [len({tuple(row) for row in side["tokens"]}) for side in (plain, steered)]
    assert joint[1] > 0.85 * joint[0]


SEEDED = {"max_tokens": 40, "temperature": 1.0, "seed": 11}
VARIED = [[5, -1, 0], [1, 1, 0], [0, 0, 0], [0, 0, 1], [5, 5, 0], [2, -1, 0]]


def test_a_seed_gives_the_same_answer_at_every_length_and_with_every_draft(tmp_path):
    """Chunked prefill too: upstream takes back what it drew, which a CPU cannot."""
    target = DEMO / "target"
    other = tmp_path / "other"
    shutil.copytree(DEMO / "draft", other)
    weights = load_file(other / "model.safetensors")
    for name in weights:
        if "proj" in name:
            weights[name] = weights[name] * 0.7
    save_file(weights, other / "model.safetensors")
    case = {"most": 5, "params": SEEDED, "engine": DEMO_CASE["engine"]}
    scripts = [[[0, 0, 0]], [[5, 5, 0]], VARIED]
    reports = run_each((target, DEMO / "draft"), tmp_path / "run", scripts, **case)
    reports += run_each((target, other), tmp_path / "run", scripts[1:2], **case)
    plain, static, varied, swapped = reports
    assert plain["drafts"].count({}) == len(plain["drafts"])
    assert static["outcomes"]["accepted"] > 10
    assert swapped["drafts"] != static["drafts"] != varied["drafts"]
    assert len({tuple(row) for row in plain["tokens"]}) == len(PROMPTS)
    for report in (static, varied, swapped):
        assert report["tokens"] == plain["tokens"]
        assert not report["lost"]


def test_a_seed_gives_the_same_answer_to_a_preempted_request(toy, tmp_path):
    """Penalties, top-k and top-p as well, and prefixes cached the second time."""
    params = {"max_tokens": 60, "temperature": 0.8, "top_p": 0.9, "top_k": 40}
    params |= {"seed": 3, "presence_penalty": 0.3, "logprobs": 1}
    few = ENGINE | {"num_gpu_blocks_override": 12}
    scripts = [[[0, 0, 0]], VARIED, [[3, 3, 0]]]
    reports = run_each(toy, tmp_path, scripts, params=params, engine=few)
    reports += run_each(toy, tmp_path, scripts[:1], params=params, engine=ENGINE)
    for report in reports:
        assert report["tokens"] == reports[0]["tokens"]


def test_preempted_requests_keep_their_outputs(toy, tmp_path):
    engine = ENGINE | {"num_gpu_blocks_override": 12, "enable_prefix_caching": False}
    script = [[3, -1, 0], [0, 0, 0], [0, 0, 1], [2, 2, 0]]
    params = {"max_tokens": 60}
    steered = run(toy, tmp_path, script=script, engine=engine, params=params)
    assert steered["tokens"] == [greedy(toy[0], prompt, 60) for prompt in PROMPTS]
    assert not steered["lost"]


@pytest.mark.alone
def test_all_tensor_parallel_ranks_follow_the_leader(toy, plain, tmp_path, monkeypatch):
    # The workers are processes of their own: they measure, and the real policy decides.
    engine = ENGINE | {"tensor_parallel_size": 2}
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    steered = run(toy, tmp_path, script=[], engine=engine)
    assert steered["tokens"] == plain
    assert list((tmp_path / "cache" / "vllm_tide" / "profiles").glob("*.json"))
