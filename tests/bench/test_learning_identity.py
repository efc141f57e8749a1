from pathlib import Path

from bench.harness.identity import Rescored, identity_of, identity_problems
from bench.harness.session import Outputs
from tests.bench.learning_toys import request, result


def arm(count=3, **changed):
    results = [result(request(i), i, i + 1.0) for i in range(count)]
    for index, tokens in changed.items():
        results[int(index[1:])].token_ids = tokens
    return results


def judge(near):
    def rescore(differences, _target, _dtype):
        return [Rescored(d, 0.0, 0.0, 0.0, near) for d in differences]

    return rescore


def test_equal_outputs_are_identical_and_a_shorter_arm_is_compared_where_it_ran():
    found = identity_of(
        {"none": arm(), "gated": arm(), "ceiling": arm(2), "gone": []},
        Path("target"),
        "float32",
        judge(False),
    )
    assert found["compared_with"] == "none"
    assert found["arms"]["ceiling"]["compared"] == 2
    assert all(v["identical"] for v in found["arms"].values())
    assert "gone" not in found["arms"] and identity_problems(found) == []


def test_a_difference_is_wrong_unless_it_is_a_near_tie():
    arms = {"none": arm(), "gated": arm(r1=[7, 7, 9, 7, 7, 7, 7, 7])}
    near = identity_of(arms, Path("t"), "float32", judge(True))
    assert near["arms"]["gated"]["near_ties"] == 1
    wrong = identity_of(arms, Path("t"), "float32", judge(False))
    assert wrong["differences"][0]["position"] == 2
    assert identity_problems(wrong, "shift, ") == [
        "shift, gated: outputs differ from none (1 not near ties)"
    ]


def test_nothing_to_compare_is_said():
    found = identity_of({"none": arm()}, Path("t"), "float32", judge(True))
    assert found == {"compared_with": None, "arms": {}, "differences": []}


def test_outputs_come_back_from_their_file(tmp_path):
    outputs = Outputs(tmp_path)
    outputs.save("shift-none", arm())
    back = outputs.load("shift-none")
    assert [r.token_ids for r in back] == [r.token_ids for r in arm()]
    assert back[0].prompt_token_ids == [1, 2] and back[2].end_s == 3.0
    assert outputs.load("never") == []
