from dataclasses import replace

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
        said, true = process.confidence[:, 0], process.survival[:, 0]
        assert said.mean() > true.mean() + 0.03
        assert 0.6 < np.corrcoef(said, true)[0, 1] < 0.98


def test_a_plateau_is_a_step_of_confidence_and_of_nothing_else():
    process = make_process(TRACE, REGIMES["shifting"], TOP, 0, TRUTHS["plateau"])
    survival = process.survival.astype(np.float64)
    chance = survival[:, 2] / survival[:, 1]
    order = np.argsort(process.confidence[:, 2])
    said, chance = process.confidence[order, 2], chance[order]
    assert (np.diff(chance) > -1e-5).all()
    assert chance[said < 0.5] == pytest.approx(0.15, abs=0.02)
    assert chance[said > 0.93] == pytest.approx(0.95, abs=0.02)
    assert (said < 0.5).mean() > 0.1 < (said > 0.93).mean()


def test_correlated_tokens_tell_of_each_other():
    process = make_process(TRACE, REGIMES["low"], TOP, 0, TRUTHS["correlated"])
    plain = make_process(TRACE, REGIMES["low"], TOP, 0)
    assert np.array_equal(process.confidence, plain.confidence)

    def second(of, rows):
        """How often a second token is right where the first one was."""
        return (of.run[rows & (of.run > 0)] > 1).mean()

    # Of equal confidence: what follows a high one is better than what follows a low.
    said = process.confidence
    alike = np.abs(said[:, 1] - 0.55) < 0.1
    high, low = said[:, 0] > 0.7, said[:, 0] < 0.4
    gap = second(process, alike & high) - second(process, alike & low)
    assert gap > second(plain, alike & high) - second(plain, alike & low) + 0.05
    # The state that nobody sees: survivals are more than products of what each token
    # is worth at the state's mean, and still what happens.
    fixed = make_process(
        TRACE, REGIMES["low"], TOP, 0, replace(TRUTHS["correlated"], hidden=0.0)
    )
    assert process.mean_survival()[4] > 1.2 * fixed.mean_survival()[4]


def test_requests_differ_and_their_confidence_need_not_say_so():
    def spread(of):
        """Between requests: standard deviations of acceptance and of confidence."""
        ends = [*of.start[1:].tolist(), len(of.run)]
        rows = [slice(*pair) for pair in zip(of.start.tolist(), ends, strict=True)]
        accepted = [of.survival[row, 0].mean() for row in rows]
        return np.std(accepted), np.std([of.confidence[row, 0].mean() for row in rows])

    found = {
        name: spread(make_process(TRACE, (LOW,), TOP, 0, TRUTHS[name]))
        for name in ("family", "different", "untold")
    }
    for name in ("different", "untold"):
        assert found[name][0] > 1.8 * found["family"][0]
    assert found["different"][1] > 1.8 * found["family"][1] > 1.8 * found["untold"][1]


def test_a_draft_looks_at_the_positions_it_would_write():
    process = make_process(TRACE, (LOW,), TOP, 0)
    q = process.survival[:, 1:] / process.survival[:, :-1]
    # Depth 2 from t and depth 1 from t + 1 are the same position, one decay apart.
    one = np.log(process.survival[1:, 0] / (1 - process.survival[1:, 0]))
    two = np.log(q[:-1, 0] / (1 - q[:-1, 0]))
    assert np.allclose(one - two, 0.12, atol=1e-2)
