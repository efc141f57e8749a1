"""DFlash in a real engine (V1): outputs, capture, learning, swaps and pauses."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.dflash_learning import DEPTH, TEXTS, documents, learn
from tests.engine.offline_engine import OfflineEngine
from tests.engine.oracle import Oracle
from tests.engine.records import metric
from tests.engine.sampling import check_distribution
from tests.engine.shared_engine import DEMO, KINDS, draft_tensors, engine_case
from tests.engine.test_shared_v1 import PROMPTS, sequences
from vllm_tide.draft import TargetRows, load_draft
from vllm_tide.train.evaluate import evaluate

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

ENGINE = "v1-dflash"
ALWAYS = [[DEPTH, DEPTH]]
VARIED = [[DEPTH, -1], [DEPTH, 1], [0, 0], [0, 0], [DEPTH, DEPTH]]


@pytest.fixture(scope="module")
def learnt(engines, tmp_path_factory) -> Path:
    """A draft that is trained on the engine's captured rows."""
    served = engines(ENGINE)
    report = served(TEXTS, forget=True, max_tokens=100, script=ALWAYS)
    return learn(served, report["records"], tmp_path_factory.mktemp("learnt"), 150)


def test_captured_rows_equal_transformers(served, greedy, target):
    report = served(PROMPTS, forget=True, max_tokens=24, script=ALWAYS)
    assert report["tokens"] == greedy(PROMPTS, 24)
    assert report["faults"] == report["control_faults"] == {} and not report["lost"]
    Oracle(target).check_whole(report["records"], sequences(PROMPTS, report))


def test_any_lengths_give_the_targets_own_tokens(served, greedy):
    report = served(PROMPTS, forget=True, max_tokens=48, script=VARIED)
    assert report["tokens"] == greedy(PROMPTS, 48)
    assert report["faults"] == report["control_faults"] == {} and not report["lost"]
    assert report["outcomes"]["verified"] == metric(report, "draft_tokens") > 0


def test_the_draft_drafts_after_a_pause_as_without_one(served):
    """Its context of the paused steps is written when drafting resumes."""
    script = [[0, 0], [0, 0], [0, 0], [DEPTH, 0]]
    paused = served(PROMPTS, forget=True, max_tokens=24, script=script)
    always = served(PROMPTS, forget=True, max_tokens=24, script=[[DEPTH, 0]])
    assert paused["tokens"] == always["tokens"]
    assert len([step for step in paused["drafts"] if step]) >= 6
    for fresh, late in zip(always["drafts"], paused["drafts"], strict=True):
        assert late in ({}, fresh)
    assert paused["holes"] == 0 and not paused["lost"]


def test_a_swapped_draft_drafts_as_in_an_engine_of_its_own(
    served, greedy, learnt, tmp_path
):
    """The fused weights of its context too, which upstream builds once."""
    before = served(PROMPTS, forget=True, max_tokens=32, script=ALWAYS)
    assert served.publish(draft_tensors(learnt)) == ""
    after = served(PROMPTS, forget=True, max_tokens=32, script=ALWAYS)
    assert before["tokens"] == after["tokens"] == greedy(PROMPTS, 32)
    kind = KINDS[ENGINE] | {"model": str(learnt)}
    with OfflineEngine(engine_case(tmp_path, kind)) as engine:
        alone = engine.work(PROMPTS, params={"max_tokens": 32}, script=ALWAYS)
    drafts = [
        [[*step.values()] for step in report["drafts"]]
        for report in (after, alone, before)
    ]
    assert drafts[0] == drafts[1] != drafts[2]
    accepted = [r["outcomes"]["accepted"] for r in (before, after)]
    assert accepted[1] > accepted[0] + 10


def test_served_acceptance_is_that_of_the_evaluation(served, learnt):
    assert served.publish(draft_tensors(learnt)) == ""
    texts = [[*b"five six ", i, *b" seven eight"] for i in range(16)]
    report = served(texts, forget=True, max_tokens=80, script=ALWAYS)
    target = TargetRows.load(DEMO / "target")
    draft = load_draft(learnt, target)
    samples = documents(served, report["records"])
    evaluation = evaluate(draft, target, samples, DEPTH)
    steps = metric(report, "drafts")
    length = 1 + metric(report, "accepted_tokens") / steps
    expected, error = (
        evaluation.acceptance("greedy"),
        evaluation.standard_error("greedy"),
    )
    assert length == pytest.approx(expected, abs=max(4 * error, 0.1))
    assert length > 1.3


def test_lengths_keep_the_distribution_of_samples(served, target, learnt):
    assert served.publish(draft_tensors(learnt)) == ""
    report = check_distribution(served, target, 256, 8, seed=1, script=VARIED)
    assert report["outcomes"]["accepted"] > 20 and not report["lost"]


def test_the_real_policy_cuts_a_block(served, greedy, learnt):
    assert served.publish(draft_tensors(learnt)) == ""
    report = served(PROMPTS, forget=True, max_tokens=48, script="adaspec")
    assert report["tokens"] == greedy(PROMPTS, 48)
    assert report["control_faults"] == {} and not report["lost"]
