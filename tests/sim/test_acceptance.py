import numpy as np

from sim.acceptance import HIGH, LOW, REGIMES, make_process
from sim.arrivals import synthetic
from tests.sim import toys

TRACE = synthetic("fluctuating", 120.0, 4.0, seed=0)
TOP = 7


def test_same_seed_same_process():
    one, two = (make_process(TRACE, REGIMES["low"], TOP, 5) for _ in range(2))
    other = make_process(TRACE, REGIMES["low"], TOP, 6)
    assert np.array_equal(one.run, two.run)
    assert np.array_equal(one.confidence, two.confidence)
    assert not np.array_equal(one.run, other.run)


def test_outcomes_follow_the_probabilities():
    process = make_process(TRACE, REGIMES["high"], TOP, 0)
    for depth in range(TOP):
        accepted = (process.run > depth).mean()
        assert abs(accepted - process.mean_survival()[depth]) < 0.01
    assert (np.diff(process.survival, axis=1) <= 0).all()


def test_low_is_low_and_confidence_is_informative_but_too_high():
    low = make_process(TRACE, REGIMES["low"], TOP, 0)
    high = make_process(TRACE, REGIMES["high"], TOP, 0)
    assert low.mean_survival()[0] < 0.45 < 0.7 < high.mean_survival()[0]
    for process in (low, high):
        said, true = process.confidence[:, 0], process.survival[:, 0]
        assert said.mean() > true.mean() + 0.03
        assert 0.6 < np.corrcoef(said, true)[0, 1] < 0.98


def test_shifting_changes_with_the_minute_of_arrival():
    trace = toys.trace(*[(float(t), 10, 400) for t in range(0, 120, 2)])
    process = make_process(trace, (HIGH, LOW), TOP, 0)
    first = process.survival[: process.start[30], 0].mean()
    second = process.survival[process.start[30] :, 0].mean()
    assert first > 0.7 and second < 0.45


def test_a_draft_looks_at_the_positions_it_would_write():
    process = make_process(TRACE, (LOW,), TOP, 0)
    q = process.survival[:, 1:] / process.survival[:, :-1]
    # Depth 2 from t and depth 1 from t + 1 are the same position, one decay apart.
    one = np.log(process.survival[1:, 0] / (1 - process.survival[1:, 0]))
    two = np.log(q[:-1, 0] / (1 - q[:-1, 0]))
    assert np.allclose(one - two, 0.12, atol=1e-2)
