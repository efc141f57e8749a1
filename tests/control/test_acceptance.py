import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.control.toys import sigmoid
from vllm_tide.control.acceptance import NODES, Acceptance

K, SLOTS = 7, 64


def logits_of(belief, confidence, slots, kind):
    clipped = np.asarray(confidence, np.float32)
    return belief.survival(clipped, slots, kind, np.full(len(slots), K))[0]


def test_probabilities_equal_those_of_numpy():
    rng, belief = np.random.default_rng(0), Acceptance(K, SLOTS)
    belief._curves += rng.normal(0.0, 0.5, belief._curves.shape)
    belief.requests.value += rng.normal(0.0, 0.5, SLOTS + 1)
    confidence = rng.random((K, 9)).astype(np.float32)
    confidence[2, 3], confidence[0, 5] = np.nan, 1.0
    slots, kind = rng.permutation(SLOTS)[:9], rng.random(9) < 0.5
    caps = rng.integers(0, K + 1, 9)
    logits, survival = belief.survival(confidence, slots, kind, caps)
    curves = [np.interp(confidence, sigmoid(NODES), curve) for curve in belief._curves]
    expected = np.where(kind, curves[1], curves[0]) + belief.requests.value[slots]
    beyond = np.arange(K)[:, None] >= caps
    np.testing.assert_allclose(logits, np.where(beyond, np.nan, expected))
    chance = np.cumprod(np.nan_to_num(sigmoid(expected)), axis=0)
    np.testing.assert_allclose(survival, np.where(beyond, -1.0, chance), rtol=1e-6)


def teach(belief, rng, steps, truth, *, sampled=False):
    """Labels; `truth`: log-odds of acceptance by those of confidence."""
    for _ in range(steps):
        z = rng.normal(1.0, 1.5, SLOTS)
        confidence = np.full((K, SLOTS), np.nan)
        confidence[0] = sigmoid(z)
        slots = np.full(SLOTS, SLOTS)  # no slot: measures the map, not requests
        kind = np.full(SLOTS, sampled)
        logits = logits_of(belief, confidence, slots, kind)
        hit = rng.random(SLOTS) < sigmoid(truth(z))
        belief.judged(confidence, logits, slots, kind, np.ones(SLOTS, int), hit * 1)
        belief.requests.reset()


def estimate(belief, z, sampled=False):
    kind = np.full(len(z), sampled)
    return sigmoid(logits_of(belief, sigmoid(z)[None], np.full(len(z), SLOTS), kind))[0]


@pytest.mark.parametrize(
    "truth",
    [
        lambda z: 0.6 * z - 1.0,
        lambda z: 2.0 * np.tanh(1.5 * z - 1.5),  # no line
        lambda z: z,
    ],
)
def test_the_map_converges_to_the_true_one_and_its_error_falls(truth):
    belief, rng = Acceptance(K, SLOTS), np.random.default_rng(0)
    assert np.isnan(belief.error())
    teach(belief, rng, 300, truth)
    z = np.array([-1.0, -0.5, 0.25, 1.75, 2.5])
    assert np.abs(estimate(belief, z) - sigmoid(truth(z))).max() < 0.1
    assert belief.error() < 0.05


def test_kinds_differ():
    belief, rng = Acceptance(K, SLOTS), np.random.default_rng(2)
    for _ in range(20):
        teach(belief, rng, 2, lambda z: z)
        teach(belief, rng, 2, lambda z: 0.5 * z - 1.0, sampled=True)
    z = np.array([0.5, 1.5])
    first, drawn = estimate(belief, z), estimate(belief, z, sampled=True)
    assert np.abs(first - sigmoid(z)).max() < 0.12
    assert np.abs(drawn - sigmoid(0.5 * z - 1.0)).max() < 0.12


def test_request_offsets_and_their_variance_are_learned():
    belief, rng = Acceptance(K, SLOTS), np.random.default_rng(3)
    ease = np.where(np.arange(SLOTS) < SLOTS // 2, 1.5, -1.5)
    slots, kind, one = np.arange(SLOTS), np.zeros(SLOTS, bool), np.ones(SLOTS, int)
    learnt, spread = [], [belief.requests.variance]
    for _ in range(3):  # generations of requests
        assert not belief.requests.value[:SLOTS].any()
        for _ in range(40):
            z = rng.normal(0.5, 1.0, SLOTS)
            confidence = np.full((K, SLOTS), np.nan)
            confidence[0] = sigmoid(z)
            logits = logits_of(belief, confidence, slots, kind)
            hit = rng.random(SLOTS) < sigmoid(z + ease)
            belief.judged(confidence, logits, slots, kind, one, hit.astype(int))
        easy, hard = np.split(belief.requests.value[:SLOTS], 2)
        learnt.append(min(easy.mean(), -hard.mean()))
        for slot in range(SLOTS):
            belief.requests.add(slot)
        spread.append(belief.requests.variance)
    assert learnt == sorted(learnt) and learnt[0] > 0.4 and learnt[-1] > 0.8
    assert spread == sorted(spread) and spread[-1] < 1.5**2
    belief.requests.value += 1.0
    belief.forget(0.2)
    assert not belief.requests.value.any()


def test_drafted_positions_update_the_map_verified_or_not():
    belief, rng = Acceptance(K, SLOTS), np.random.default_rng(4)
    for _ in range(200):
        drafts = rng.normal(2.0, 0.5, (K, SLOTS))
        drafts[4:] = np.nan
        belief.drafted(drafts, 0.0)
    np.testing.assert_allclose(belief.mean[:4], 2.0, atol=0.1)
    # Positions that were never drafted shift with the deepest that was.
    prior = Acceptance(K, SLOTS).mean
    assert belief.mean[4] - prior[4] == pytest.approx(belief.mean[3] - prior[3])
    assert belief.spread == pytest.approx(0.5, abs=0.1)


confidences = st.sampled_from([0.0, 1e-30, 0.5, 0.999, 1.0 - 1e-9, 1.0, float("nan")])


@settings(max_examples=25, deadline=None)
@given(
    k=st.integers(1, 8),
    phases=st.lists(
        st.tuples(confidences, st.floats(0.0, 1.0), st.integers(2, 20)),
        min_size=1,
        max_size=4,
    ),
    seed=st.integers(0, 3),
)
def test_every_estimate_stays_finite(k, phases, seed):
    rng, belief = np.random.default_rng(seed), Acceptance(k, SLOTS)
    slots, now = np.arange(SLOTS), 0.0
    for confidence, acceptance, steps in phases:
        for _ in range(steps):
            kind = rng.random(SLOTS) < 0.5
            shown = np.full((k, SLOTS), confidence)
            logits = logits_of(belief, shown, slots, kind)
            made = np.count_nonzero(~np.isnan(logits), axis=0)
            judged = np.minimum(rng.integers(0, k + 1, SLOTS), made)
            accepted = np.minimum(rng.binomial(k, acceptance, SLOTS), judged)
            belief.judged(shown, logits, slots, kind, judged, accepted)
            now += 0.1
            belief.drafted(logits, now)
        assert np.isfinite(belief.mean).all() and np.isfinite(belief.spread)
        assert np.isfinite(belief.requests.value).all()
        assert 0.0 <= belief.variance < np.inf
    belief.forget(0.2)
    z = np.linspace(-9.0, 9.0, 37)
    for sampled in (False, True):
        chance = estimate(belief, z, sampled=sampled)
        assert (chance > 0.0).all() and (chance < 1.0).all()
