from pathlib import Path

import pytest

from bench.harness.client import RequestResult
from bench.harness.identity import (
    Difference,
    Rescored,
    compare,
    compare_arms,
    first_difference,
    identity_of,
    identity_problems,
    rescore,
)


def result(index, tokens, *, error=None, prompt=(7, 8)):
    return RequestResult(
        index,
        "before_shift",
        0.0,
        token_ids=list(tokens),
        prompt_token_ids=list(prompt),
        error=error,
    )


def test_equal_outputs_have_no_difference():
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert compare(("a", "b"), [result(0, [1, 2])], [result(0, [1, 2])]) == []


def test_only_the_first_difference_is_reported_with_its_common_prefix():
    found = compare(("a", "b"), [result(3, [1, 2, 4, 5])], [result(3, [1, 2, 9, 6])])
    assert found == [Difference(("a", "b"), 3, 2, (4, 9), (7, 8, 1, 2))]


def test_failed_requests_are_not_compared():
    bad = result(0, [], error="HTTP 500")
    assert compare(("a", "b"), [result(0, [1])], [bad]) == []


def test_a_shorter_output_is_an_error_not_a_difference():
    with pytest.raises(ValueError, match="shorter"):
        compare(("a", "b"), [result(0, [1, 2])], [result(0, [1])])


def test_arms_must_have_run_the_same_stream():
    with pytest.raises(ValueError, match="different streams"):
        compare(("a", "b"), [result(0, [1])], [result(1, [1])])
    with pytest.raises(ValueError, match="tokenised differently"):
        compare(("a", "b"), [result(0, [1])], [result(0, [1], prompt=(1,))])


def test_every_arm_is_compared_with_the_first():
    arms = {n: [result(0, [t])] for n, t in (("none", 1), ("frozen", 1), ("tide", 2))}
    assert [d.arms for d in compare_arms(arms)] == [("none", "tide")]


DIFFERENCE = Difference(("a", "b"), 0, 0, (0, 1), (7,))


def scorer(wide, error):
    return lambda prefix: ([wide[0] + error, *wide[1:]], wide)


def test_candidates_within_rounding_are_a_near_tie():
    verdict = rescore(DIFFERENCE, scorer([5.0, 5.0000019, 1.0], 1e-6))
    assert verdict.near_tie
    assert verdict.logit_gap == pytest.approx(1.9e-6)


def test_candidates_further_apart_than_rounding_are_not():
    assert not rescore(DIFFERENCE, scorer([5.0, 5.001, 1.0], 1e-6)).near_tie


def test_two_equal_losers_are_not_a_near_tie():
    assert not rescore(DIFFERENCE, scorer([5.0, 5.0, 9.0], 1e-6)).near_tie


def test_the_summary_of_a_difference_has_no_tokens():
    summary = rescore(DIFFERENCE, scorer([5.0, 5.0], 0.0)).summary()
    assert "tokens" not in summary and "prefix" not in summary
    assert summary["near_tie"] is True


def arm(count=3, **changed):
    results = [result(i, [7] * 8) for i in range(count)]
    for index, tokens in changed.items():
        results[int(index[1:])].token_ids = tokens
    return results


def judge(near):
    def rescored(differences, _target, _dtype):
        return [Rescored(d, 0.0, 0.0, 0.0, near) for d in differences]

    return rescored


def test_a_shorter_arm_is_compared_where_it_ran():
    arms = {"none": arm(), "shared": arm(), "exact": arm(2), "gone": []}
    found = identity_of(arms, Path("t"), "float32", judge(False))
    assert found["compared_with"] == "none"
    assert found["arms"]["exact"]["compared"] == 2
    assert all(v["identical"] for v in found["arms"].values())
    assert "gone" not in found["arms"] and identity_problems(found) == []
    alone = identity_of({"none": arm()}, Path("t"), "float32", judge(True))
    assert alone == {"compared_with": None, "arms": {}, "differences": []}


def test_a_difference_is_wrong_unless_it_is_a_near_tie():
    arms = {"none": arm(), "shared": arm(r1=[7, 7, 9, 7, 7, 7, 7, 7])}
    near = identity_of(arms, Path("t"), "float32", judge(True))
    assert near["arms"]["shared"]["near_ties"] == 1
    wrong = identity_of(arms, Path("t"), "float32", judge(False))
    assert wrong["differences"][0]["position"] == 2
    assert identity_problems(wrong) == [
        "shared: outputs differ from none (1 not near ties)"
    ]
