"""What the C++ of control refuses: arrays that are not as long as the others say."""

import numpy as np
import pytest

from vllm_tide._shm import best_set, convolve, judge, learn_levels, table_chances

K, N, BINS = 3, 4, 5


def judged(**changed):
    given = {
        "values": np.ones((3, K, N)),
        "survival": np.ones((K, N), np.float32),
        "steps": K,
        "rows": np.arange(N),
        "verified": np.full(N, K),
        "accepted": np.zeros(N, np.int64),
        "slots": np.arange(N),
        "offset": np.zeros(N),
        "precision": np.ones(N),
        "keep": 0.9,
        "prior": 1.0,
        "limit": 3.0,
        "where": np.zeros((2, K * N), np.int64),
        "labels": np.zeros((3, K * N)),
    }
    return judge(*(given | changed).values())


def learnt(**changed):
    given = {
        "slots": np.arange(N),
        "logits": np.zeros((K, N)),
        "chances": np.full((K, N), 0.5),
        "drafted": np.ones((K, N), bool),
        "level": np.zeros(N),
        "place": np.zeros(N),
        "variance": np.ones(N),
        "fall": np.zeros(K),
        "counts": np.zeros((2, K, BINS)),
        "chance": np.exp(-np.arange(BINS, dtype=float)),
        "mean": 0.0,
        "keep": 1.0,
        "knobs": np.ones(10),
    }
    return learn_levels(*(given | changed).values())


def chances(**changed):
    given = {
        "values": np.zeros((3, K, N)),
        "step": 1,
        "confidence": np.full(N, 0.5),
        "table_of": np.zeros(N, np.int64),
        "offset": np.zeros(N),
        "value": np.zeros(2 * K * BINS),
        "rise": np.zeros(2 * K * BINS),
        "num_nodes": BINS,
        "stride": K * BINS,
        "first": -4.0,
        "per_node": 2.0,
        "least": 1e-4,
    }
    return table_chances(*(given | changed).values())


def test_arrays_that_fit_are_taken():
    count, tokens = judged()
    assert (count, tokens) == (N, N + K * N)
    assert learnt()[1] and chances() is None


def test_log_odds_are_those_of_numpy_for_any_confidence():
    rng = np.random.default_rng(0)
    odd = [np.nan, 0.0, 1.0, 1e-9, -1.0, np.inf]
    confidence = np.concatenate([rng.random(200), odd])
    n, kind = len(confidence), rng.integers(0, 2, len(confidence))
    value, rise = rng.normal(size=(2, 2 * K * BINS))
    held = np.fmin(np.fmax(confidence, 1e-4), 1.0 - 1e-4)
    z = np.log(held / (1.0 - held))
    at = np.clip((z + 4.0) * 2.0, 0.0, BINS - 1 - 1e-9)
    for step in range(1, K + 1):
        values, offset = np.zeros((3, K, n)), rng.normal(size=n)
        chances(
            values=values,
            step=step,
            confidence=confidence,
            table_of=kind,
            offset=offset,
            value=value,
            rise=rise,
        )
        cell = (kind * K + step - 1) * BINS + at.astype(int)
        logit = value[cell] + at % 1.0 * rise[cell] + offset
        wanted = z, logit, 1.0 / (1.0 + np.exp(-logit))
        np.testing.assert_allclose(values[:, step - 1], wanted, rtol=1e-9, atol=1e-9)


WRONG_TYPES = [
    (judged, {"accepted": np.zeros(2 * N, np.int32)}),
    (judged, {"survival": np.ones((K, N))}),
    (learnt, {"slots": np.zeros(N)}),
    (chances, {"confidence": np.ones(2 * N, np.float32)}),
    (chances, {"table_of": bytes(8 * N)}),
]


WRONG_SIZES = [
    (judged, {"rows": np.arange(1, N + 1)}),
    (judged, {"slots": np.arange(1, N + 1)}),
    (judged, {"steps": K + 1}),
    (judged, {"values": np.ones((3, K, N + 1))}),
    (learnt, {"slots": np.arange(1, N + 1)}),
    (learnt, {"logits": np.zeros((K, N - 1))}),
    (learnt, {"place": np.zeros(N + 1)}),
    (learnt, {"knobs": np.ones(9)}),
    (chances, {"step": 0}),
    (chances, {"values": np.zeros((3, K, N - 1))}),
    (chances, {"table_of": np.zeros(N - 1, np.int64)}),
    (chances, {"num_nodes": 1 << 62, "step": 5}),
    (chances, {"stride": 0}),
]


@pytest.mark.parametrize(
    "cases, error", [(WRONG_TYPES, TypeError), (WRONG_SIZES, ValueError)]
)
def test_others_are_refused(cases, error):
    for call, changed in cases:
        with pytest.raises(error):
            call(**changed)


def test_sets_and_products_of_other_sizes_are_refused():
    order, survival = np.sort(np.ones(6, np.float32)), np.ones((3, 2), np.float32)
    seconds, lengths = np.ones(7), np.zeros(2, np.int64)
    assert best_set(order, survival, 2.0, seconds, np.inf, np.nan, lengths)[0] == 6
    for wrong in (
        (order[:5], survival, 2.0, seconds, np.inf, np.nan, lengths),
        (order, survival, 2.0, seconds[:6], np.inf, np.nan, lengths),
        (order, survival, 2.0, seconds, np.inf, np.nan, np.zeros(4, np.int64)),
    ):
        with pytest.raises(ValueError):
            best_set(*wrong)
    single = np.ones((2, K, BINS))
    convolve(single, np.empty(2 * BINS * K * (K + 1) // 2), K, BINS)
    for gained, k in ((np.empty(7), K), (np.empty(90), 0), (np.empty(90), 4)):
        with pytest.raises(ValueError):
            convolve(single, gained, k, BINS)
    with pytest.raises(ValueError):
        convolve(b"", bytearray(), 1 << 32, 1 << 32)
