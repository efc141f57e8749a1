"""At any draft length, outputs are the target's own and nothing is lost (V1)."""

from __future__ import annotations

import pytest

from tests.engine.offline_engine import OfflineEngine
from tests.engine.oracle import Oracle
from tests.engine.records import metric
from tests.engine.sampling import check_distribution
from tests.engine.shared_engine import KINDS, engine_case
from tests.engine.test_shared_v1 import LONG, PROMPTS, sequences

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

ENGINE = "v1-control"
VARIED = [[5, -1], [1, 1], [0, 0], [0, 0], [5, 5], [2, -1]]


def test_the_draft_drafts_after_a_pause_as_without_one(served):
    """Off for steps (prefill too), then on: the same drafts each time."""
    script = [[0, 0], [0, 0], [0, 0], [3, 0]]
    paused = served(PROMPTS, forget=True, max_tokens=24, script=script)
    always = served(PROMPTS, forget=True, max_tokens=24, script=[[3, 0]])
    assert paused["tokens"] == always["tokens"]
    assert len(paused["drafts"]) == len(always["drafts"])
    assert len([step for step in paused["drafts"] if step]) >= 6
    for fresh, late in zip(always["drafts"], paused["drafts"], strict=True):
        assert late in ({}, fresh)
    assert paused["holes"] == 0 and not paused["lost"]
    # A step's drafts come with its output: vLLM's own way is two messages more.
    assert any(always["drafts"]) and paused["asked"] == always["asked"] == 0


def test_any_lengths_give_the_targets_own_tokens_and_right_records(
    served, greedy, target
):
    """Random steps, prefixes, pauses; records with a top-k teacher."""
    report = served(PROMPTS, forget=True, max_tokens=48, script=VARIED)
    assert report["tokens"] == greedy(PROMPTS, 48)
    assert report["outcomes"]["accepted"] > 10
    assert report["faults"] == report["control_faults"] == {} and not report["lost"]
    assert all(r.teacher_topk_ids is not None for r in report["records"])
    Oracle(target).check_whole(report["records"], sequences(PROMPTS, report))
    for name in ("accepted", "verified"):
        counted = {"verified": "draft"}.get(name, name)
        assert 0 < report["outcomes"][name] <= metric(report, f"{counted}_tokens")


def test_any_lengths_keep_the_distribution_of_samples(served, target):
    script = [[3, 3], [3, -1], [1, 1], [0, 0]]
    report = check_distribution(served, target, 256, 8, seed=1, script=script)
    assert report["outcomes"]["accepted"] > 50 and not report["lost"]


def test_preempted_requests_keep_their_outputs(served, greedy):
    script = [[3, -1], [0, 0], [0, 0], [2, 2]]
    report = served(LONG, forget=True, max_tokens=96, script=script)
    assert report["tokens"] == greedy(LONG, 96)
    assert any("num_preemptions" in name for name in report["metrics"])
    assert not report["lost"]


def test_a_swap_at_any_lengths_keeps_the_outputs(served, greedy, other_draft):
    assert served.publish(other_draft) == ""
    report = served(PROMPTS, forget=True, max_tokens=24, script=VARIED)
    assert report["tokens"] == greedy(PROMPTS, 24)
    assert report["faults"] == report["control_faults"] == {} and not report["lost"]


@pytest.mark.nightly
def test_a_pause_without_backlog_memory_leaves_gaps_and_right_outputs(greedy, tmp_path):
    small = {"vllm_tide.engine.control_v1.CATCHUP_MIB": 0}
    case = engine_case(tmp_path, KINDS[ENGINE], constants=small)
    with OfflineEngine(case) as engine:
        script = [[0, 0], [0, 0], [3, 3]]
        report = engine.work(PROMPTS, params={"max_tokens": 24}, script=script)
    assert report["tokens"] == greedy(PROMPTS, 24)
    assert report["holes"] > 0 and not report["lost"]
