"""One client's limit on time per token must not cost the other requests much."""

from __future__ import annotations

import numpy as np
import pytest

from tests.control.toys import Acceptance, FixedTimes, World, published
from vllm_tide.control.policies import AdaSpecPolicy, ControlSettings

STEPS = 200


class OneClient(World):
    """Request 0 is text that the draft never predicts, with a separate limit."""

    def __init__(self, n: int, time, seconds, by_operator) -> None:
        super().__init__(n, time, Acceptance(), steps_each=1 << 20)
        self.tight = np.full(n, np.inf)
        self.tight[0] = np.inf if seconds is None else seconds
        self.by_operator = by_operator

    def _eases(self, n):
        eases = super()._eases(n)
        eases[:1] = -20.0
        return eases

    def batch(self, limit=np.inf):
        batch = super().batch(limit)
        if self.by_operator:
            batch.limit = self.tight
        else:
            batch.asked = self.tight
        return batch


def throughput(name, n, factor, by_operator=False):
    time = published(name)
    plain = float(time.target_curve(n, 500 * n, 0)[0])
    seconds = None if factor is None else factor * plain
    world = OneClient(n, time, seconds, by_operator)
    policy = AdaSpecPolicy(ControlSettings(max_requests=n), FixedTimes(time))
    return world.run(policy, STEPS).throughput, policy.stats()


@pytest.mark.parametrize(
    ("name", "n"),
    [
        ("gpt-oss-120b", 8),
        pytest.param("gpt-oss-120b", 32, marks=pytest.mark.nightly),
        pytest.param("Llama-3.3-70B", 32, marks=pytest.mark.nightly),
        pytest.param("Qwen3-235B", 8, marks=pytest.mark.nightly),
        pytest.param("Qwen3-235B", 32, marks=pytest.mark.nightly),
    ],
)
def test_a_client_with_a_hard_limit_leaves_the_others_their_share(name, n):
    free, _ = throughput(name, n, None)
    for factor in (1.02, 1.1, 1.2, 1.3):
        limited, stats = throughput(name, n, factor)
        assert limited >= 0.9 * free, factor
        assert stats["client_limits_dropped"] > 0 or factor > 1.1


def test_the_operators_own_limit_is_met_at_any_cost():
    free, _ = throughput("Llama-3.3-70B", 32, None)
    limited, stats = throughput("Llama-3.3-70B", 32, 1.02, by_operator=True)
    assert limited < 0.6 * free
    assert stats["client_limits_dropped"] == 0
