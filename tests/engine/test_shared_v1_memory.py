"""Whatever the memory proposes, outputs are the target's own (V1)."""

from __future__ import annotations

import pytest

from tests.engine.sampling import check_distribution
from tests.engine.test_shared_v1 import LONG, PROMPTS
from tests.engine.test_shared_v1_control import VARIED

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

ENGINE = "v1-memory"
TEXTS = PROMPTS[:4]


def check(report, tokens):
    assert report["tokens"] == tokens
    assert report["faults"] == report["control_faults"] == {} and not report["lost"]


@pytest.mark.parametrize("script", [VARIED, "static", "adaspec"])
def test_greedy_outputs_are_the_targets_own_under_every_policy(served, greedy, script):
    """Random lengths and sources, static, weighed by times; skipped drafts."""
    report = served(TEXTS, forget=True, max_tokens=96, script=script)
    check(report, greedy(TEXTS, 96))
    proposals, accepted = report["memory"]["0"], report["memory"]["1"]
    assert accepted > proposals > 10
    if isinstance(script, str):
        assert report["policy"]["steps_without_drafts"]["memory"] > 5


def test_random_proposals_are_rejected_and_soon_not_verified(served, greedy):
    work = {"forget": True, "max_tokens": 96, "garbage": True}
    first = served(TEXTS, script=VARIED, **work)
    second = served(TEXTS, script="static", keep_memory=True, **work)
    for report in (first, second):
        check(report, greedy(TEXTS, 96))
    tried = first["memory"]["0"]
    assert tried > 50 and first["memory"].get("1", 0) < 0.1 * tried
    memory_steps = second["memory"].get("0", 0)
    assert memory_steps < 0.2 * tried, "its record of the first script was bad"
    assert second["policy"]["accepted_tokens"] > 20, "the draft drafts"


@pytest.mark.parametrize("garbage", [False, True])
def test_preempted_requests_and_cached_prefixes_keep_their_outputs(
    served, greedy, garbage
):
    work = {"forget": True, "max_tokens": 96, "garbage": garbage}
    report = served([*LONG, *TEXTS, *LONG], script=VARIED, **work)
    check(report, [*greedy(LONG, 96), *greedy(TEXTS, 96), *greedy(LONG, 96)])
    assert any("num_preemptions" in name for name in report["metrics"])


@pytest.mark.parametrize("garbage", [False, True])
def test_the_distribution_of_samples_is_preserved(served, greedy, target, garbage):
    """Samples of a repeating text; matches and random proposals."""
    texts = greedy(TEXTS, 96)
    best = min(texts, key=lambda t: len({tuple(t[i : i + 4]) for i in range(92)}))
    ids = [*TEXTS[texts.index(best)], *best[:80]]
    given = {"ids": ids, "temperature": 0.7, "seed": 1, "garbage": garbage}
    script = [[3, 3], [3, -1], [0, 0]]
    report = check_distribution(served, target, 256, 8, script=script, **given)
    proposals, accepted = report["memory"]["0"], report["memory"].get("1", 0)
    assert proposals > (400 if garbage else 60) and not report["lost"]
    assert garbage or accepted > 30
