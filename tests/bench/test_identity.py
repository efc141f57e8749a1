from pathlib import Path

import pytest

from bench.harness.client import RequestResult
from bench.harness.identity import (
    Difference,
    Rescored,
    compare,
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


@pytest.mark.parametrize(
    ("wide", "error", "near"),
    [
        ([5.0, 5.0000019, 1.0], 1e-6, True),
        ([5.0, 5.001, 1.0], 1e-6, False),
        ([5.0, 5.0, 9.0], 1e-6, False),  # two equal losers
    ],
)
def test_candidates_within_rounding_of_the_best_are_a_near_tie(wide, error, near):
    difference = Difference(("a", "b"), 0, 0, (0, 1), (7,))
    served = [wide[0] + error, *wide[1:]]
    verdict = rescore(difference, lambda prefix: (served, wide))
    assert verdict.near_tie is near
    assert "tokens" not in verdict.summary() and "prefix" not in verdict.summary()


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (result(0, [1]), "shorter"),
        (result(1, [1, 2]), "different streams"),
        (result(0, [1, 2], prompt=(1,)), "tokenised differently"),
    ],
)
def test_arms_must_have_run_the_same_requests_to_the_same_length(other, message):
    with pytest.raises(ValueError, match=message):
        compare(("a", "b"), [result(0, [1, 2])], [other])
    bad = result(0, [], error="HTTP 500")
    assert compare(("a", "b"), [result(0, [1])], [bad]) == []


def arm(count=3, **changed):
    results = [result(i, [7] * 8) for i in range(count)]
    for index, tokens in changed.items():
        results[int(index[1:])].token_ids = tokens
    return results


def judge(near):
    def rescored(differences, _target, _dtype):
        return [Rescored(d, 0.0, 0.0, 0.0, near) for d in differences]

    return rescored


def test_a_shorter_arm_is_compared_over_its_length():
    arms = {"none": arm(), "shared": arm(), "exact": arm(2), "gone": []}
    result = identity_of(arms, Path("t"), "float32", judge(False))
    assert result["compared_with"] == "none"
    assert result["arms"]["exact"]["compared"] == 2
    assert all(v["identical"] for v in result["arms"].values())
    assert "gone" not in result["arms"] and identity_problems(result) == []
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
