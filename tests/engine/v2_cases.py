"""What Model Runner V2 must do with both kinds of scheduling, against V1.

V2's own kernels run in Triton's interpreter, so texts are short. Each file of a kind
collects these tests; they take their engine from `ENGINE` there.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.oracle import Oracle
from tests.engine.records import counted, drafted, floats, longest_drafts, metric
from tests.engine.sampling import check_distribution
from vllm_tide.cli.main import main
from vllm_tide.transport.record import Phase, Record
from vllm_tide.transport.ring import Collect
from vllm_tide.transport.versions import number_of

__all__ = [
    "test_any_lengths_give_the_same_tokens_and_right_counts",
    "test_any_lengths_keep_the_distribution_of_samples",
    "test_capture_is_switched_for_the_run_directory",
    "test_no_request_gets_more_drafts_than_it_asked_for",
    "test_records_and_tokens_are_those_of_v1_and_of_transformers",
    "test_a_swap_changes_the_drafts_and_no_address",
    "test_many_seeds_keep_the_distribution_of_samples",
]

PROMPTS = [
    list(b"hello world"),
    list(b"def main(argv):\n    return 0 " * 3),  # longer than a step may take
    [7],
]
# [draft steps, most verified (-1: a random prefix)] per step, over and over.
STATIC = [[3, 3]]
VARIED = [[3, -1], [3, 3], [0, 0], [0, 0], [1, 1], [2, -1], [3, 3]]
WORK = {"forget": True, "max_tokens": 12}


def by_content(records: list[Record]) -> list[Record]:
    return sorted(records, key=lambda r: (r.start, r.token_ids.tolist()))


def test_records_and_tokens_are_those_of_v1_and_of_transformers(
    served, engines, greedy, target
):
    """A salted request leaves none."""
    salts = [None, None, "pepper"]
    got = served(PROMPTS, script=STATIC, salts=salts, **WORK)
    want = engines("v1")(PROMPTS, salts=salts, **WORK)
    assert got["tokens"] == want["tokens"] == greedy(PROMPTS, 12)
    assert got["faults"] == got["control_faults"] == {}
    assert got["runner"] == "vllm.v1.worker.cpu.model_runner"
    assert want["runner"] == "vllm.v1.worker.cpu_model_runner"
    assert got["dropped"]["salted"] == want["dropped"]["salted"] == 1
    assert len(got["ended"]) == 2
    records = got["records"]
    assert counted(records) == counted(want["records"])
    verify = [r for r in records if r.phase == Phase.VERIFY]
    assert any(r.num_accepted > 0 for r in verify)
    assert any(r.num_accepted < r.num_rows - 1 for r in verify)
    assert any(r.phase == Phase.PREFILL and r.start for r in records)
    pairs = zip(by_content(records), by_content(want["records"]), strict=True)
    for mine, theirs in pairs:
        assert mine.num_prompt_tokens == theirs.num_prompt_tokens
        features = floats(mine.features), floats(theirs.features)
        torch.testing.assert_close(*features, atol=0.02, rtol=0.02)
    sequences = [p + t for p, t in zip(PROMPTS, got["tokens"], strict=True)]
    Oracle(target).check_whole(records, sequences[:2])


def test_a_swap_changes_the_drafts_and_no_address(served, own_draft, other_draft):
    before = served(PROMPTS, script=STATIC, **WORK)
    assert served.publish(other_draft) == ""
    after = served(PROMPTS, script=STATIC, **WORK)
    number = before["version"] + 1
    assert {number_of(r.draft_version) for r in after["records"]} == {number}
    assert served.publish(own_draft) == ""
    back = served(PROMPTS, script=STATIC, **WORK)
    assert before["tokens"] == after["tokens"] == back["tokens"]
    assert before["addresses"] == after["addresses"] == back["addresses"]
    drafts = [sorted(drafted(r["records"])) for r in (before, after, back)]
    assert drafts[0] == drafts[2] != drafts[1]
    assert after["faults"] == back["faults"] == {}


def test_any_lengths_give_the_same_tokens_and_right_counts(served, greedy):
    """Depths 0 to 3, prefixes of drafts (where V2 can cut them)."""
    report = served(PROMPTS, forget=True, max_tokens=24, script=VARIED)
    assert report["tokens"] == greedy(PROMPTS, 24)
    assert report["faults"] == report["control_faults"] == {}
    records = [r for r in report["records"] if r.phase == Phase.VERIFY]
    assert {r.num_rows - 1 for r in records} == {0, 1, 2, 3}
    verified = sum(r.num_rows - 1 for r in records)
    accepted = sum(r.num_accepted for r in records)
    # Metrics also count placeholders.
    padding = report["dropped"].get("placeholder", 0)
    assert metric(report, "draft_tokens") == verified + padding
    assert metric(report, "accepted_tokens") == accepted > 0
    seen = [report["outcomes"][name] for name in ("verified", "accepted")]
    if report["async"]:  # control also sees the steps that ran after a request's end
        assert seen[0] >= verified and seen[1] >= accepted
    else:
        assert seen == [verified, accepted]


def seeds(first: int, samples: int) -> list[int]:
    return (first + np.arange(samples)).tolist()


def test_any_lengths_keep_the_distribution_of_samples(served, target):
    given: dict[str, Any] = {"script": VARIED, "seeds": seeds(1, 64)}
    report = check_distribution(served, target, 64, 3, **given)
    assert report["outcomes"]["accepted"] > 10


@pytest.mark.nightly
@pytest.mark.parametrize("first", [1000, 2000, 3000])
def test_many_seeds_keep_the_distribution_of_samples(served, target, first):
    given: dict[str, Any] = {"script": VARIED, "seeds": seeds(first, 256)}
    check_distribution(served, target, 256, 6, **given)


def test_no_request_gets_more_drafts_than_it_asked_for(served):
    prompts = [[*b"hello", i] for i in range(4)]
    caps = [0, 1, None, 4]  # the last is above the maximum
    extra = [None if cap is None else {"tide_k_max": cap} for cap in caps]
    work = {"max_tokens": 8, "script": STATIC, "forget": True}
    free = served(prompts, **work)
    capped = served(prompts, extra=extra, **work)
    assert capped["tokens"] == free["tokens"] and capped["faults"] == {}
    assert longest_drafts(capped["records"], prompts) == [0, 1, 3, 3]


def test_capture_is_switched_for_the_run_directory(served):
    where = ["--run-dir", str(served.run_dir)]
    work = {"max_tokens": 4, "script": STATIC, "forget": True}
    assert main(["capture", "off", *where]) == 0
    until = time.monotonic() + 60
    while served(PROMPTS[:1], **work)["rows"]:
        assert time.monotonic() < until
    off = served(PROMPTS[:1], **work)
    assert off["records"] == [] and off["rows"] == 0 and off["faults"] == {}
    assert main(["capture", "on", *where]) == 0
    while not (on := served(PROMPTS[:1], **work))["rows"]:
        assert time.monotonic() < until
    assert on["tokens"] == off["tokens"] and on["records"]
    served.reader.set_collect(Collect.NOTHING)
    assert served(PROMPTS[:1], **work)["records"] == []
