"""Tokens that do not pay are judged too, and the calibration error knows of them."""

from dataclasses import replace

import numpy as np
import pytest

from tests.control.toys import Acceptance, World, published, sigmoid
from vllm_tide.control.calibration import Exploration
from vllm_tide.control.online_time import OnlineTime
from vllm_tide.control.policies import AdaSpecPolicy, ControlSettings

MODEL = "Llama-3.3-70B"


class Plateau(Acceptance):
    """No line in the confidence."""

    def draw(self, rng, ease, k):
        chance, seen = super().draw(rng, ease, k)
        logit = np.log(chance / (1.0 - chance))
        return 0.15 + 0.75 * sigmoid(2.5 * (logit - 0.5)), seen


class Earlier(Acceptance):
    """A token after doubtful ones is worse than its own confidence says."""

    def draw(self, rng, ease, k):
        chance, seen = super().draw(rng, ease, k)
        logit = np.log(chance / (1.0 - chance))
        before = np.cumsum(logit - 1.5, axis=0)
        before = np.vstack([np.zeros_like(before[:1]), before[:-1]])
        return sigmoid(logit + 0.5 * np.minimum(before, 0.0)), seen


def audited(n, acceptance, rounds=1200, **knobs):
    """Throughput, bias of P(accept | reached) of cut tokens, error reported and true.

    Over the second half, weighted by the true chance of reaching a token.
    """
    policy = AdaSpecPolicy(
        ControlSettings(max_requests=n, **knobs), OnlineTime(published(MODEL))
    )
    truth, acceptance = {}, replace(acceptance)
    draw, choose = acceptance.draw, policy.choose
    cut, bins, told, seen = np.zeros(2), np.zeros((2, 10)), [], [0]

    def drawn(*args):
        truth["chance"], seen_ = draw(*args)
        return truth["chance"], seen_

    def chosen():
        lengths = choose()
        seen[0] += 1
        if seen[0] > rounds / 2:
            step = policy._step
            found, chance = policy._values[2, :step], truth["chance"][:step]
            reach = np.vstack([np.ones((1, n)), np.cumprod(chance, axis=0)[:-1]])
            wanted = policy._exploration.wanted
            wanted = lengths if wanted is None else wanted
            reach = reach * (policy._survival[:step] >= 0)
            left = np.arange(step)[:, None] >= wanted
            cut[:] += (reach * (found - chance) * left).sum(), (reach * left).sum()
            cell = np.minimum((found * 10).astype(int), 9).ravel()
            bins[0] += np.bincount(cell, (reach * (found - chance)).ravel(), 10)
            bins[1] += np.bincount(cell, reach.ravel(), 10)
            told.append(policy.calibration.error())
        return lengths

    acceptance.draw, policy.choose = drawn, chosen
    result = World(n, published(MODEL), acceptance, seed=1, rounds_each=60).run(
        policy, rounds
    )
    true = np.abs(bins[0]).sum() / bins[1].sum()
    return result.throughput, cut[0] / cut[1], np.mean(told), true


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("n", "acceptance"),
    [(128, Plateau()), (32, Earlier()), (128, Acceptance(between=1.5))],
)
def test_what_is_cut_is_known_and_costs_little(n, acceptance):
    before, blind, _, _ = audited(n, acceptance, explore=False)
    throughput, bias, told, true = audited(n, acceptance)
    assert throughput > 0.99 * before
    assert abs(bias) < max(0.9 * abs(blind), 0.03)
    assert told == pytest.approx(true, abs=0.012)


@pytest.mark.nightly
def test_the_error_of_cut_tokens_is_reported():
    _, _, blind, true = audited(128, Plateau(), explore=False)
    assert true > 0.035 and blind < 0.6 * true, "verified tokens alone look better"


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
