"""DFlash in a real engine with Model Runner V2 (Triton's interpreter)."""

from __future__ import annotations

import pytest

from tests.engine.dflash_learning import DEPTH, TEXTS, learn
from tests.engine.oracle import Oracle
from tests.engine.shared_engine import draft_tensors
from tests.engine.test_shared_v1 import PROMPTS, sequences

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

ENGINE = "v2-dflash"
ALWAYS = [[DEPTH, DEPTH]]
VARIED = [[DEPTH, DEPTH], [1, 1], [0, 0], [0, 0], [DEPTH, DEPTH]]


def test_any_lengths_give_the_targets_own_tokens_and_right_rows(served, greedy, target):
    report = served(PROMPTS, forget=True, max_tokens=24, script=VARIED)
    assert report["tokens"] == greedy(PROMPTS, 24)
    assert report["faults"] == report["control_faults"] == {} and not report["lost"]
    Oracle(target).check_whole(report["records"], sequences(PROMPTS, report))


def test_a_trained_draft_is_swapped_in_and_accepted(served, greedy, tmp_path):
    before = served(TEXTS[:4], forget=True, max_tokens=48, script=ALWAYS)
    folder = learn(served, before["records"], tmp_path / "learnt", 60)
    assert served.publish(draft_tensors(folder)) == ""
    after = served(TEXTS[:4], forget=True, max_tokens=48, script=ALWAYS)
    assert before["tokens"] == after["tokens"] == greedy(TEXTS[:4], 48)
    accepted = [r["outcomes"]["accepted"] for r in (before, after)]
    assert accepted[1] > accepted[0] + 10
    assert after["faults"] == after["control_faults"] == {} and not after["lost"]
