"""Model Runner V2 with the memory, adaptive verification and AdaSpec at once.

Asynchronous scheduling, in Triton's interpreter, eager, with costs that were never
measured: all of adaptive verification but the graphs is a GPU's.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.records import metric
from tests.engine.shared_engine import CURVES
from vllm_tide.transport.record import Phase

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

ENGINE = "v2-everything"
# One that repeats itself at once, one that the target soon repeats, a short one.
PROMPTS = [
    list(b"one two three. " * 4),
    list(b"def main(argv):\n    return 0 " * 2),
    [7],
]
STEEP = [[[1, 0.3], [4, 0.3]], [[3, 1.0], [64, 200.0]]]


def by_source(report: dict[str, Any]) -> dict[bool, tuple[int, int, int]]:
    """Return steps, drafted and accepted tokens of the draft (False) and the memory."""
    counts = {}
    for memory in (False, True):
        own = [
            r
            for r in report["records"]
            if r.phase == Phase.VERIFY and r.num_rows > 1 and r.memory == memory
        ]
        verified = sum(r.num_rows - 1 for r in own)
        counts[memory] = (len(own), verified, sum(r.num_accepted for r in own))
    return counts


@pytest.mark.parametrize("garbage", [False, True])
def test_outputs_are_the_targets_own_and_each_source_is_counted_separately(
    served, greedy, other_draft, garbage
):
    """With a weak draft, so that the memory's tokens are the better ones."""
    assert served.publish(other_draft) == ""
    work = {"forget": True, "max_tokens": 40, "garbage": garbage, "curves": CURVES}
    report = served(PROMPTS, script="static", **work)
    assert report["tokens"] == greedy(PROMPTS, 40)
    assert report["faults"] == report["control_faults"] == {}
    by = by_source(report)
    steps, drafted, accepted = by[True]
    assert steps > 5
    assert accepted < 0.1 * drafted if garbage else accepted > steps
    counts = report["control"]
    # Control also sees the steps that ran after a request's end.
    assert counts["memory_proposals"] >= steps
    assert counts.get("verified_tokens", 0) >= by[False][1]
    # vLLM counts both, drafts that the device cuts too.
    both = [by[False][i] + by[True][i] for i in (1, 2)]
    assert metric(report, "draft_tokens") >= both[0]
    assert metric(report, "accepted_tokens") == both[1]
    assert sum(report["contexts_accepted"].values()) <= by[False][2]


def test_adaspec_starts_with_the_costs_that_vllm_measured(served, greedy):
    report = served(PROMPTS, forget=True, max_tokens=16, curves=CURVES)
    assert report["tokens"] == greedy(PROMPTS, 16)
    assert report["faults"] == report["control_faults"] == {}
    # Times are predicted, and were compared with measurements.
    assert report["policy"]["plain_step_seconds"] > 0
    assert report["policy"]["time_error"] >= 0


def test_drafts_are_cut_to_the_length_that_pays(served, greedy):
    work = {"forget": True, "max_tokens": 16, "script": [[3, 3]], "curves": STEEP}
    report = served(PROMPTS, **work)
    assert report["tokens"] == greedy(PROMPTS, 16)
    assert report["faults"] == report["control_faults"] == {}
    control = report["control"]
    assert 0 < control["trimmed_tokens"] < control["drafted_tokens"]
