"""The C++ of control refuses arrays of inconsistent lengths."""

import numpy as np
import pytest

from vllm_tide._shm import best_set, survival


def chosen(**changed):
    given = {
        "order": np.sort(np.ones(6, np.float32)),
        "survival": np.ones((3, 2), np.float32),
        "plain_tokens": 2.0,
        "seconds": np.ones(7),
        "limit": np.inf,
        "bar": np.nan,
        "lengths": np.zeros(2, np.int64),
    }
    return best_set(*(given | changed).values())


def test_matching_arrays_are_accepted():
    assert chosen()[0] == 6


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"order": np.ones(5, np.float32)}, ValueError),
        ({"seconds": np.ones(6)}, ValueError),
        ({"lengths": np.zeros(4, np.int64)}, ValueError),
        ({"lengths": np.zeros(4, np.int32)}, TypeError),
        ({"survival": np.ones((3, 2))}, TypeError),
        ({"order": bytes(24)}, TypeError),
    ],
)
def test_other_arrays_are_refused(changed, error):
    with pytest.raises(error):
        chosen(**changed)


def survivals(**changed):
    given = {
        "confidence": np.ones((3, 2), np.float32),
        "slots": np.array([0, 4]),
        "sampled": np.zeros(2, bool),
        "caps": np.full(2, 3),
        "knots": np.array([0.1, 0.9]),
        "curves": np.zeros((2, 2)),
        "requests": np.zeros(5),
        "logits": np.zeros((3, 2)),
        "survival": np.zeros((3, 2), np.float32),
    }
    given |= changed
    survival(*given.values())
    return given["survival"]


def test_matching_survivals_are_accepted():
    assert survivals().tolist() == [[0.5] * 2, [0.25] * 2, [0.125] * 2]
    none = np.zeros(0, np.int64)
    empty = dict.fromkeys(("confidence", "survival"), np.zeros(0, np.float32))
    survivals(
        slots=none, caps=none, sampled=none.astype(bool), logits=none * 1.0, **empty
    )


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"slots": np.array([0, 5])}, ValueError),
        ({"slots": np.array([-1, 0])}, ValueError),
        ({"slots": np.arange(3)}, ValueError),
        ({"caps": np.ones(3, int)}, ValueError),
        ({"caps": np.ones(2, np.int32)}, TypeError),
        ({"sampled": np.zeros(2, np.uint8)}, TypeError),
        ({"knots": np.ones(1), "curves": np.zeros(2)}, ValueError),
        ({"curves": np.zeros(2)}, ValueError),
        ({"confidence": np.ones((3, 2))}, TypeError),
        ({"logits": np.zeros((2, 2))}, ValueError),
        ({"survival": np.zeros((3, 2))}, TypeError),
    ],
)
def test_other_survivals_are_refused(changed, error):
    with pytest.raises(error):
        survivals(**changed)
