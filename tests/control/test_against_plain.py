"""What control tells about its gain over plain decoding, in seconds."""

from __future__ import annotations

import numpy as np
import pytest

from tests.control.test_adaspec import EASY, HARD, NonePolicy, adaspec, world
from vllm_tide.control.gate import AgainstPlain


def emitted(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int64)


def test_a_plain_step_gives_every_request_one_token():
    made = AgainstPlain()
    made.add(0.01, emitted(3, 1), 0.014, 0)
    assert (made.plain_s, made.round_s) == pytest.approx((0.02, 0.014))
    # Requests that got nothing (a prefill in parts) are no reason to run a step.
    made.add(0.01, emitted(3, 1, 0), 0.014, 0)
    assert (made.plain_s, made.round_s) == pytest.approx((0.04, 0.028))


def test_undrafted_rounds_that_passed_count_one_token_each():
    made = AgainstPlain()
    made.add(0.01, emitted(1, 1), 0.042, 3)
    assert (made.plain_s, made.round_s) == pytest.approx((0.04, 0.042))


@pytest.mark.parametrize("tokens", [(), (0, 0)])
def test_a_round_without_a_token_says_nothing(tokens):
    made = AgainstPlain()
    made.add(0.01, emitted(*tokens), 0.01, 0)
    assert (made.plain_s, made.round_s) == (0.0, 0.0)


@pytest.mark.parametrize(("acceptance", "rests"), [(EASY, False), (HARD, True)])
def test_the_seconds_tell_the_speed_up(acceptance, rests):
    model, n = "gpt-oss-120b", 8
    policy = adaspec(n, model)
    found = world(n, model, acceptance).run(policy, 600, rests=rests)
    plain = world(n, model, acceptance).run(NonePolicy(7), 600)
    stats = policy.stats()
    told = stats["plain_seconds"] / stats["round_seconds"]
    assert told == pytest.approx(found.throughput / plain.throughput, rel=0.02)
    assert told > 1.3 if acceptance is EASY else 0.97 < told < 1.01
