"""Tokens that do not pay are judged too, and the calibration error knows of them."""

import numpy as np
import pytest

from tests.control.toys import Acceptance, World, published, sigmoid
from vllm_tide.control.calibration import Exploration
from vllm_tide.control.online_time import OnlineTime
from vllm_tide.control.policies import AdaSpecPolicy, ControlSettings

MODEL = "Llama-3.3-70B"


@pytest.mark.parametrize(("n", "price"), [(1, 0.6), (32, 0.05), (256, 0.0)])
def test_exploration_keeps_its_share_of_time_and_is_never_none(n, price):
    share, rounds, k = 0.005, 4000, 7
    explorer = Exploration(share)
    seconds = 1.0 + price * np.arange(n * k + 1) / (n * k)
    whole, wanted, spent, drawn = np.full(n, k), np.zeros(n, int), 0.0, 0
    for _ in range(rounds):
        explorer.draw(n, True)
        assert 0.0 < explorer.chance <= 0.25
        lengths = explorer.widen(wanted, whole, seconds)
        drawn += np.count_nonzero(lengths)
        spent += seconds[lengths.sum()] - seconds[0]
    assert drawn > 0.001 * rounds * n
    assert spent <= (share + 0.002 * price) * rounds + price


def test_no_share_or_a_limit_explores_nothing():
    for share, allowed in ((0.0, True), (0.005, False)):
        explorer = Exploration(share)
        for _ in range(200):
            explorer.draw(64, allowed)
            assert explorer.chance == 0.0
            wanted = np.ones(64, int)
            found = explorer.widen(wanted, np.full(64, 7), np.ones(64 * 7 + 1))
            assert (found == wanted).all()


def test_who_explores_does_not_depend_on_confidences_and_its_chance_is_told():
    def run(shift):
        rng, n, k = np.random.default_rng(3), 128, 7
        policy = AdaSpecPolicy(
            ControlSettings(max_requests=n), OnlineTime(published(MODEL))
        )
        world = World(n, published(MODEL), Acceptance(), seed=1)
        for slot in range(n):
            policy.add(slot, False, 0.0)
        policy._exploration._price = 0.3
        policy.plan(world.batch(), 0.0)
        drawn, chance = policy._exploration._drawn, policy._exploration.chance
        step, more = 0, True
        while more and step < k:
            step += 1
            more = policy.go_on(step, sigmoid(rng.normal(shift, 1.5, n)))
        lengths = policy.choose()
        told = policy.verify_chance
        wanted = policy._exploration.wanted
        only = (wanted == 0) & drawn
        assert (told[only] == chance).all() and (told[~only] == 1.0).all()
        assert (lengths[drawn] == np.minimum(world.batch().room, step)[drawn]).all()
        assert (lengths[~drawn] == wanted[~drawn]).all()
        return drawn, np.count_nonzero(only)

    (one, some), (other, _) = run(-1.0), run(2.0)
    assert (one == other).all() and some
