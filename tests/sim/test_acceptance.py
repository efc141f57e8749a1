import numpy as np
import pytest

from sim.acceptance import HIGH, LOW, REGIMES, TRUTHS, make_process
from sim.arrivals import synthetic

TRACE = synthetic("fluctuating", 120.0, 4.0, seed=0)
TOP = 7


@pytest.mark.parametrize("truth", TRUTHS)
def test_outcomes_follow_the_probabilities(truth):
    process = make_process(TRACE, REGIMES["high"], TOP, 0, TRUTHS[truth])
    for depth in range(TOP):
        accepted = (process.run > depth).mean()
        assert abs(accepted - process.mean_survival()[depth]) < 0.01
    assert (np.diff(process.survival, axis=1) <= 0).all()


def test_low_is_low_and_confidence_is_informative_but_too_high():
    low = make_process(TRACE, REGIMES["low"], TOP, 0)
    high = make_process(TRACE, REGIMES["high"], TOP, 0)
    assert low.mean_survival()[0] < 0.45 < 0.7 < high.mean_survival()[0]
    mixed = make_process(TRACE, (HIGH, LOW), TOP, 0)  # by the minute of arrival
    second = mixed.start[np.searchsorted(TRACE.arrival, 60.0)]
    assert mixed.survival[:second, 0].mean() > 0.7
    assert mixed.survival[second:, 0].mean() < 0.45
    for process in (low, high):
        confidence, true = process.confidence[:, 0], process.survival[:, 0]
        assert confidence.mean() > true.mean() + 0.03
        assert 0.6 < np.corrcoef(confidence, true)[0, 1] < 0.98
