"""Whatever the memory proposes, outputs are the target's own, on real vLLM."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.test_control import DEMO, DEMO_CASE, PROMPTS, VARIED, run_each
from tests.patches.test_cpu_sampling import chi_square_p

pytestmark = pytest.mark.vllm

MODELS = (DEMO / "target", DEMO / "draft")
LONG = DEMO_CASE | {"params": {"max_tokens": 96}, "prompts": PROMPTS[:4]}


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> list[list[int]]:
    """The demo target's greedy tokens, which soon repeat themselves."""
    run_dir = tmp_path_factory.mktemp("plain")
    return run_each(MODELS, run_dir, [None], **LONG)[0]["tokens"]


def served(run_dir, scripts: list[Any], **case: Any) -> list[Any]:
    test_time = {"memory": "ngram"}
    return run_each(MODELS, run_dir, scripts, test_time=test_time, **case)


def test_greedy_outputs_are_the_targets_own_under_every_policy(plain, tmp_path):
    """Random lengths and sources, static, and weighed by times; drafts left out."""
    scripts = [VARIED, "static", "adaspec"]
    reports = served(tmp_path, scripts, most=5, **LONG)
    for report in reports:
        assert report["tokens"] == plain
        assert report["faults"] == {} and not report["lost"]
        proposals, accepted = report["memory"]
        assert accepted > proposals > 10
    for report in reports[1:]:
        assert report["counts"]["off_rounds"]["memory"] > 5


def test_garbage_is_rejected_and_soon_not_believed(plain, tmp_path):
    reports = served(tmp_path, [VARIED, "static"], most=5, garbage=True, **LONG)
    for report in reports:
        assert report["tokens"] == plain
        assert report["faults"] == {} and not report["lost"]
    (tried, right), (believed, _) = (report["memory"] for report in reports)
    assert tried > 50 and right < 0.1 * tried
    assert believed < 0.2 * tried, "its record of the first script was bad"
    assert reports[1]["counts"]["accepted_tokens"] > 20, "the draft drafts"


def test_preempted_requests_and_cached_prefixes_keep_their_outputs(plain, tmp_path):
    engine = LONG["engine"] | {"num_gpu_blocks_override": 14}
    case = LONG | {"engine": engine}
    case["prompts"] = [*LONG["prompts"], *LONG["prompts"]]
    for garbage in (False, True):
        (report,) = served(tmp_path, [VARIED], most=5, garbage=garbage, **case)
        assert report["tokens"] == [*plain, *plain]
        assert report["faults"] == {} and not report["lost"]


def test_the_distribution_of_samples_is_kept(plain, tmp_path):
    """256 samples of one text that repeats itself; garbage, and matches."""

    def distinct(row: int) -> int:
        return len({tuple(plain[row][i : i + 4]) for i in range(92)})

    best = min(range(4), key=distinct)
    prompt = [*PROMPTS[best], *plain[best][:80]]

    def sample(seed: int, scripts: list[Any], **case: Any) -> dict[str, Any]:
        case |= {
            "prompts": [prompt] * 256,
            "params": {"max_tokens": 8, "temperature": 0.7},
            "engine": {"max_num_seqs": 64, "seed": seed},
        }
        if scripts == [None]:
            return run_each(MODELS, tmp_path, scripts, **case)[0]
        return served(tmp_path, scripts, **case)[0]

    without = sample(0, [None])
    script = [[3, 3, 0], [3, -1, 0], [0, 0, 0]]
    for number, garbage in enumerate((False, True)):
        steered = sample(1 + number, [script], garbage=garbage)
        proposals, accepted = steered["memory"]
        assert proposals > (400 if garbage else 60) and not steered["lost"]
        assert garbage or accepted > 30
        for position in range(8):
            sides = (without, steered)
            a, b = ([row[position] for row in side["tokens"]] for side in sides)
            # Fixed seeds: a pass today is a pass tomorrow. 16 comparisons in all.
            assert chi_square_p(a, b) > 1e-4, (garbage, position)
