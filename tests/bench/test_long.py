"""The suite of long outputs: groups, rows, arms."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from bench.harness.arms import make_arm, speculative_config
from bench.harness.client import RequestResult
from bench.harness.common import BenchError, read_json
from bench.suites.long import (
    POSITION_EDGES,
    LongDocument,
    LongOptions,
    by_position,
    distinct_share,
    rows_of,
    sort_prompts,
)
from vllm_tide.config import parse_tide


def options(tmp_path: Path, **given) -> LongOptions:
    return LongOptions(
        suite="long", json=tmp_path / "out.json", work=tmp_path / "work", **given
    )


def test_prompts_are_sorted_by_what_the_target_says_to_them():
    loop, fresh = [1, 2, 3, 4] * 50, list(range(200))
    assert distinct_share(loop) == pytest.approx(4 / 197)
    assert distinct_share(fresh) == 1.0
    shares = [0.9, 0.1, 0.5, 0.4, 0.95, 0.2]
    assert sort_prompts(shares) == {"repetitive": [1, 5], "other": [0, 4]}


def test_tokens_per_message_by_generated_position():
    result = RequestResult(0, "long", 0.0)
    result.chunks = [(0.1, 1), (0.2, 3), *[(0.3, 4)] * 50]
    found = by_position([result])
    assert found[0] == pytest.approx((4 + 49 * 4) / 51, abs=1e-4)
    assert found[1] == 4.0
    assert found[2:] == [None] * (len(POSITION_EDGES) - 1)


def visit(arm, block, rate, group="repetitive", concurrency=1):
    return {
        "arm": arm,
        "group": group,
        "concurrency": concurrency,
        "block": block,
        "output_tokens_per_s": rate,
        "acceptance_length": None if arm == "none" else 2.0,
        "by_position": [1.0, 2.0, None, None, None],
    }


def test_ratios_are_taken_within_a_block():
    visits = [
        *(visit("static", block, 100.0 * block) for block in (1, 2, 3)),
        *(visit("memory", block, 120.0 * block) for block in (1, 2, 3)),
        visit("none", 1, 50.0),
        visit("memory", 1, 10.0, "other"),
    ]
    rows = {(row["arm"], row["group"]): row for row in rows_of(visits)}
    memory = rows["memory", "repetitive"]
    assert memory["ratio_to_static"] == memory["low"] == memory["high"] == 1.2
    assert memory["by_position"] == [1.0, 2.0, None, None, None]
    assert memory["acceptance_length"] == 2.0
    assert rows["none", "repetitive"]["ratio_to_static"] == 0.5
    assert rows["none", "repetitive"]["low"] is None, "one block has no interval"
    assert rows["memory", "other"]["ratio_to_static"] is None
    assert math.isclose(memory["output_tokens_per_s"], 240.0)


@pytest.mark.parametrize("name", ["memory", "adaspec_memory"])
def test_arms_with_a_memory_are_valid(name, tmp_path):
    arm = make_arm(name, {"min_gain": 0.1})
    text = speculative_config(arm, Path("/draft"), tmp_path)
    import json

    config = json.loads(text)
    tide = parse_tide(config["tide"])
    assert tide.test_time.memory == "ngram"
    assert tide.control.policy == ("static" if name == "memory" else "adaspec")
    assert tide.control.min_gain == 0.1
    assert arm.server_key != make_arm("static3").server_key


def test_the_report_is_what_others_read(tmp_path):
    doc = LongDocument(options(tmp_path))
    doc.write()
    assert read_json(doc.path)["identical"] is None
    doc.data["visits"] = [visit("static", 1, 100.0), visit("memory", 1, 120.0)]
    doc.data["identity"] = {"90m": {"memory": {"identical": True}}}
    doc.write()
    told = read_json(doc.path)
    assert told["identical"] is True and len(told["rows"]) == 2
    assert told["rows"][0].keys() >= {
        *("arm", "concurrency", "group", "output_tokens_per_s", "ratio_to_static"),
        *("low", "high", "acceptance_length", "by_position"),
    }
    doc.data["identity"]["90m"]["static3"] = {"identical": False}
    doc.write()
    assert read_json(doc.path)["identical"] is False


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"arms": ("none", "memory")}, "needs none and static"),
        ({"groups": ("odd",)}, "--groups"),
        ({"output_tokens": 4000}, "--max-model-len 2048 is too short"),
        ({"sorted_prompts": 2}, "--sorted-prompts is at least 3"),
    ],
)
def test_bad_options_are_refused(given, said, tmp_path):
    with pytest.raises(BenchError, match=said):
        options(tmp_path, **given).check()


def test_static_is_the_length_that_the_memory_has(tmp_path):
    assert options(tmp_path).arm_names == ("none", "static3", "memory")
    assert make_arm("memory").num_tokens == make_arm("static3").num_tokens
