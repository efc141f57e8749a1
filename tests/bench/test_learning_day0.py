import json
import shutil
from pathlib import Path

import pytest
import torch

from bench.harness import session as learning_session
from bench.harness.models import DEMO
from bench.suites import day0 as day0_suite
from bench.suites.ceiling import (
    FINAL,
    LEARN,
    CeilingOptions,
    keep_published,
    train_ceiling,
)
from bench.suites.day0 import (
    Day0Options,
    blocks,
    day0_stream,
    requests_to_reach,
    run,
    slowdowns,
)
from tests.bench.learning_toys import arm_run, options_for, request, result
from vllm_tide.config import parse_tide
from vllm_tide.draft.fresh import is_fresh
from vllm_tide.train.sample import Sample


def served(count, seconds, segment="0 learn"):
    return [
        result(request(i, segment), seconds * i, seconds * (i + 1))
        for i in range(count)
    ]


def test_blocks_stay_within_a_segment_and_a_short_rest_joins_the_last():
    results = served(9, 1.0) + [
        result(request(i, "1 final"), i, i + 1.0) for i in range(9, 12)
    ]
    assert [(name, len(part)) for name, part in blocks(results, 4)] == [
        ("0 learn", 4),
        ("0 learn", 5),
        ("1 final", 3),
    ]


def test_the_worst_block_is_found_and_the_noise_of_the_machine_beside_it():
    slow = served(8, 1.0)
    for item in slow[4:]:
        item.end_s += 0.4
    found = slowdowns([served(8, 1.0), served(8, 1.02)], slow, 4)
    assert found["first_request"] == [0, 4]
    assert found["worst"] == pytest.approx(5.6 / 4.04 - 1, abs=1e-3)
    assert found["noise"] == pytest.approx(0.02, abs=1e-3)
    assert 0 < found["whole"] < found["worst"]
    assert slowdowns([served(8, 1.0)], slow, 4)["noise"] is None


def test_requests_needed_are_counted_to_the_first_window_that_reaches_the_share():
    curve = {
        "requests": [0, 8, 16, 24],
        "end_requests": [8, 16, 24, 32],
        "acceptance_length": [1.1, 1.9, 1.7, 2.0],
    }
    found = requests_to_reach(curve, 2.0, 0.9)
    assert found["wanted"] == 1.8 and found["requests"] == 8
    assert found["window_end"] == 16 and found["kept"]
    assert requests_to_reach(curve, 3.0, 0.9)["requests"] is None
    assert requests_to_reach(curve, None, 0.9)["wanted"] is None


def options(tmp_path, **changes):
    given = {"requests": (12,), "output_tokens": 8, "window_requests": 4}
    return options_for(Day0Options, "day0", tmp_path, **(given | changes))


def test_the_last_part_of_the_stream_is_held_back(tmp_path):
    stream = day0_stream(options(tmp_path))
    assert [r.segment for r in stream] == [LEARN] * 9 + [FINAL] * 3
    both = day0_stream(options(tmp_path, domains=("python", "c"), requests=(8, 4)))
    assert [r.domain for r in both[:3]].count("c") == 1  # in turn
    assert [r.index for r in both] == list(range(12))


def document(key, hidden=256):
    random = torch.Generator().manual_seed(key)
    return Sample.offline(
        torch.randint(0, 4096, (20,), generator=random),
        torch.randn(20, 3 * hidden, generator=random).bfloat16(),
        torch.randn(20, hidden, generator=random).bfloat16(),
        num_prompt_tokens=4,
        key=key,
    )


def test_the_ceiling_is_trained_saved_and_held_against_the_online_head(tmp_path):
    parts = {
        LEARN: [document(k) for k in range(9)],
        FINAL: [document(k) for k in range(9, 12)],
    }
    how = CeilingOptions(
        target=DEMO / "target",
        fresh={"draft_vocab_size": 64},
        train={"batch_tokens": 128},
        steps=8,
        depth=2,
        dtype="float32",
    )
    folder, online = tmp_path / "ceiling", tmp_path / "online.safetensors"
    said = []
    found = train_ceiling(parts, how, folder, online, said.append)
    assert len(found["curve"]) == len(said) == 8 and found["steps"] == 8
    assert found["day0"] is None and (folder / "config.json").exists()
    shutil.copy(folder / "model.safetensors", online)
    again = train_ceiling(parts, how, folder, online, said.append)
    assert again["day0"] == again["ceiling"] == found["ceiling"]
    assert not keep_published(tmp_path / "nobody", online)


def test_the_suite_serves_a_fresh_head_between_two_runs_without(tmp_path, monkeypatch):
    ran = []
    monkeypatch.setattr("bench.suites.day0.LEAST_DRAFTS", 1)  # toys draft less

    def fake(arm, stream, hooks):
        ran.append(arm)
        seconds = {"fresh": 2.02, "ceiling": 1.0}.get(arm.name, 2.0)
        made = arm_run(arm.name, stream, seconds, {"ceiling": 2.0}.get(arm.name, 1.9))
        for sample in made.samples:
            hooks.on_sample(sample)
        return made

    def ceiling(parts, how, folder, online, say):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        heads = {"first_head": 1.1, "day0": 2.4, "ceiling": 2.5}
        return {name: {"greedy": value} for name, value in heads.items()}

    monkeypatch.setattr(learning_session, "run_arm", fake)
    monkeypatch.setattr(day0_suite, "train_ceiling", ceiling)
    monkeypatch.setattr(day0_suite._Day0, "_capture", lambda _: {})
    given = options(tmp_path)
    assert run(given) == 0
    assert [arm.name for arm in ran] == ["none", "fresh", "none-again", "ceiling"]
    text = Path(ran[1].server.speculative_config).read_text()
    config = json.loads(text)
    # Of the target as it is: the served one's MLP is inflated.
    assert is_fresh(Path(config["model"]))
    width = json.loads((given.target / "config.json").read_text())["intermediate_size"]
    head = json.loads((Path(config["model"]) / "config.json").read_text())
    assert head["intermediate_size"] == width
    tide = parse_tide(config["tide"])
    assert tide.control.policy == "adaspec" and tide.train.autostart
    ceiling_config = json.loads(Path(ran[3].server.speculative_config).read_text())
    assert not parse_tide(ceiling_config["tide"]).capture.enabled
    report = json.loads(given.json.read_text())
    goal = report["results"]["day0"]
    assert goal["held_out_ratio"] == 0.96
    assert goal["served_ratio"] == pytest.approx(2.9 / 3, abs=1e-3)
    assert goal["reach"]["requests"] == 0
    assert goal["worst_slowdown"] == pytest.approx(0.01, abs=1e-3)
    assert goal["noise"] == 0.0
