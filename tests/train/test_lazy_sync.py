"""Distance between publications."""

from __future__ import annotations

import math

import pytest

from vllm_tide.config import DeployConfig
from vllm_tide.train.lazy_sync import (
    MAX_REQUESTS,
    LazySync,
    best_spacing,
    loss_per_request,
)

CHOSEN = DeployConfig(min_requests=None, min_seconds=None)


def measured(config=CHOSEN, *, swap=0.08, live=2.0, new=2.5, requests=100, period=0.5):
    """After a publication at 0 s, `requests` requests and an evaluation."""
    sync = LazySync(config)
    sync.request_done(0.0)
    sync.published(0.0)
    sync.swap_measured(swap)
    for i in range(requests):
        sync.request_done((i + 1) * period)
    sync.gain_measured(live, new)
    return sync


@pytest.mark.parametrize(("swap", "gain", "after"), [(0.05, 0.02, 400), (2, 0.3, 50)])
def test_best_spacing_is_the_minimum_of_the_loss(swap, gain, after):
    best = min(range(1, 5000), key=lambda n: loss_per_request(n, swap, gain, after))
    assert best_spacing(swap, gain, after) == pytest.approx(best, abs=1)


def test_loss_is_that_of_a_simulated_wait():
    # serve N requests, each losing what the draft at hand would have saved by then
    swap, rate, spacing = 0.5, 0.001, 40
    lost = swap + sum(rate * (i + 0.5) for i in range(spacing))
    assert loss_per_request(spacing, swap, rate * 10, 10) == pytest.approx(
        lost / spacing
    )


def test_at_the_best_spacing_waiting_has_cost_one_swap():
    n = best_spacing(0.08, 0.02, 100)
    assert 0.02 / 100 * n * n / 2 == pytest.approx(0.08)


def test_chosen_spacing_follows_from_what_was_measured():
    sync = measured()
    gain = (1 - 2.0 / 2.5) * 0.5
    wanted = math.sqrt(2 * 0.08 * 100 / gain)
    spacing = sync.spacing()
    assert spacing.requests == pytest.approx(wanted)
    assert spacing.seconds == pytest.approx(wanted * 0.5)
    assert "80.0 ms" in spacing.reason
    assert sync.ready(50.0)  # 100 requests are more than those 13
    assert not sync.ready(1.0)  # but not within a second
    sync.published(50.0)
    assert not sync.ready(1e6)


def test_costly_swaps_and_small_gains_lengthen_the_wait():
    plain = measured().spacing().requests
    assert measured(swap=8.0).spacing().requests == pytest.approx(10 * plain)
    assert measured(new=2.01).spacing().requests > 5 * plain
    assert measured(new=1.5).spacing().requests == MAX_REQUESTS


def test_a_shift_shortens_the_wait_at_once():
    sync = measured(new=2.02, swap=2.0)
    assert not sync.ready(50.0)
    sync.gain_measured(1.4, 2.4)
    assert sync.ready(50.0)


def test_the_first_publications_never_wait_for_measurements():
    sync = LazySync(CHOSEN)
    assert sync.ready(0.0)
    sync.published(0.0)
    assert sync.spacing().reason == "nothing measured yet"
    assert sync.ready(0.0)


def test_fixed_spacing_in_requests_and_seconds():
    sync = LazySync(DeployConfig(min_requests=3, min_seconds=10.0))
    assert sync.ready(0.0)
    sync.published(0.0)
    for now in (1.0, 2.0, 3.0):
        assert not sync.ready(20.0)
        sync.request_done(now)
    assert not sync.ready(9.9)
    assert sync.ready(10.0)
    assert sync.spacing().reason == "as configured"


def test_one_may_be_fixed_and_the_other_chosen():
    spacing = measured(DeployConfig(min_requests=7, min_seconds=None)).spacing()
    assert spacing.requests == 7
    assert spacing.seconds == pytest.approx(best_spacing(0.08, 0.1, 100) * 0.5)
    spacing = measured(DeployConfig(min_requests=None, min_seconds=1.0)).spacing()
    assert spacing.requests == pytest.approx(best_spacing(0.08, 0.1, 100))
    assert spacing.seconds == 1.0


def test_default_config_never_waits():
    sync = LazySync(DeployConfig())
    sync.published(0.0)
    assert sync.ready(0.0)


def test_cost_of_a_swap_follows_the_newest_ones():
    sync = LazySync(CHOSEN)
    for seconds in (1.0, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1):
        sync.swap_measured(seconds)
    assert 0.1 < sync.swap_seconds < 0.15


def test_busy_seconds_are_taken_before_the_clock():
    sync = LazySync(CHOSEN)
    for i in range(20):
        sync.request_done(100.0 * i, 0.25)
    assert sync.request_seconds == pytest.approx(0.25)


@pytest.mark.parametrize("lengths", [(math.nan, 2.0), (2.0, math.nan), (2.0, 0.0)])
def test_an_evaluation_without_a_result_changes_little(lengths):
    sync = measured()
    sync.gain_measured(*lengths)
    assert math.isfinite(sync.spacing().requests)
