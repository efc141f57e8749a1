import numpy as np
import pytest

from vllm_tide.control.gate import Gate


def gate(**knobs):
    return Gate(**{"min_gain": 0.02, "probe_share": 0.01, **knobs})


def test_hysteresis():
    g = gate()
    assert g.decide(1.03, 1.03, 0.0) == ""
    assert g.decide(1.01, 1.01, 0.0) == "no_gain" and not g.on
    assert g.decide(1.03, 1.03, 0.0) != "", "needs hysteresis more to come on again"
    assert g.decide(1.05, 1.05, 0.0) == "" and g.on
    assert g.decide(1.03, 1.03, 0.0) == ""


def test_what_may_pay_is_tried_and_no_reason_to_distrust_the_draft():
    g = gate()
    assert g.decide(0.95, 0.95, 0.0, 0.08) == ""
    assert g.decide(0.9, 0.9, 0.0, 0.08) == "no_gain"
    for _ in range(40):
        g.drafting.add(20.0, 18.0)
    assert g.decide(1.03, 1.03, 0.0, 0.08) == "no_gain", "else no trial is made"


def test_what_one_size_of_batch_overspent_is_not_owed_by_another():
    g = gate()
    g.decide(0.9, 0.9, 0.0)
    g.size = 6
    g.overspent(1.0)  # of a share of 0.005: 200 s

    def due(size, now, cost=0.01):
        g.size, g.unchecked = size, 100
        return g.check_due(cost, now)

    assert not due(6, 100.0)
    assert due(3, 100.0)
    assert not due(3, 101.0) and due(3, 103.0), "it pays for its own"
    assert not due(6, 199.0)
    g.size = 3
    g.decide(1.5, 1.5, 190.0)
    assert due(6, 195.0, 0.0), "on, looks that cost nothing do not wait"
    g.size = 3
    g.decide(0.9, 0.9, 196.0)
    assert not due(6, 199.0) and due(6, 203.0), "who turned at 3 still owes at 6"
    g.overspent(1.0)
    assert not due(6, 300.0)
    g.eager()
    assert due(6, 300.0), "another draft owes nothing"


def test_a_limit_is_named():
    assert gate().decide(0.9, 1.5, 0.0) == "slo"


def test_probes_cost_at_most_their_share_and_become_rarer():
    g = gate()
    g.decide(0.9, 0.9, 0.0)
    cost, step, probes, now = 0.001, 0.01, [], 0.0
    for _ in range(100_000):
        now += step
        if g.probe_due(cost, now):
            probes.append(now)
    assert len(probes) * cost <= 0.01 * now
    first = sum(p < 10 for p in probes) / 10
    last = sum(p > now - 100 for p in probes) / 100
    assert first > 1.5 * last > 0


def test_a_model_that_flatters_drafting_is_overridden_and_reviewed():
    g = gate()
    for _ in range(20):
        g.drafting.add(20.0, 20.0)
        g.drafting.add_time(1.0, 1.6)
        g.plain.add_time(1.0, 1.0)
    assert g.decide(1.4, 1.4, 0.0) == "override"
    rounds = 0
    while g.decide(1.4, 1.4, 0.0):
        g.drafting.fade()
        rounds += 1
    assert 100 < rounds < 2000


def test_luck_is_not_evidence():
    g = gate()
    g.drafting.add(100.0, 96.0)
    assert g.drafting.ratio() == pytest.approx(1.0)
    for _ in range(100):
        g.drafting.add(100.0, 70.0)
    assert g.drafting.ratio() == pytest.approx(0.7, abs=0.05)


def test_rounds_of_a_noisy_machine_are_no_evidence():
    """Two or three slow ones in a row had turned speculation off for hundreds."""
    rng, g = np.random.default_rng(0), gate()
    trusted, noise = [], 0.0
    for _ in range(2000):
        noise = 0.9 * noise + 0.044 * rng.standard_normal()
        g.drafting.add_time(1.0, np.exp(noise))
        trusted.append(g.drafting.ratio())
    assert np.quantile(trusted, 0.02) > 0.94
    for _ in range(48):
        noise = 0.9 * noise + 0.044 * rng.standard_normal()
        g.drafting.add_time(1.0, 1.5 * np.exp(noise))
    assert g.drafting.ratio() < 0.8


def test_undrafted_rounds_cost_at_most_half_the_share_and_become_rarer():
    g = gate()
    cost, step, checks, now = 0.002, 0.01, [], 5.0
    for _ in range(100_000):
        now += step
        if g.check_due(cost, now):
            checks.append(now)
    assert len(checks) * cost <= 0.5 * 0.01 * now + cost
    gaps = np.diff(checks)
    assert gaps[-1] > 3 * gaps[0]
    assert min(gaps) > 16 * step
