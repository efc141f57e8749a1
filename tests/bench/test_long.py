"""The suite of long outputs: groups, rows, arms."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from bench.harness.arms import make_arm, speculative_config
from bench.suites.long import (
    rows_of,
)
from vllm_tide.config import parse_tide, starts_trainer


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


@pytest.mark.parametrize(
    ("name", "policy", "memory", "adapt"),
    [
        ("memory", "static", "ngram", "off"),
        ("adaspec_memory", "adaspec", "ngram", "off"),
        ("shared", "static", "off", "shared"),
        ("memory_shared", "static", "ngram", "shared"),
        ("exact", "static", "off", "exact"),
        ("everything", "adaspec", "ngram", "shared"),
    ],
)
def test_arms_that_adapt_within_a_request_are_valid(
    name, policy, memory, adapt, tmp_path
):
    arm = make_arm(name, {"min_gain": 0.1})
    text = speculative_config(arm, Path("/draft"), tmp_path)
    tide = parse_tide(json.loads(text)["tide"])
    assert (tide.test_time.memory, tide.test_time.adapt) == (memory, adapt)
    assert tide.control.policy == policy and tide.control.min_gain == 0.1
    trains = adapt != "off"
    assert arm.adapts == tide.capture.enabled == tide.swap.enabled == trains
    # Visits have a cache salt: without it nothing of them would be captured.
    assert tide.capture.salted == starts_trainer(tide) == trains
    # The training between requests counts for the arm with everything on.
    if trains:
        assert (tide.train.min_new_tokens < 10**6) == (name == "everything")
