"""Any draft, same answers: the claim of lossless speculation (V1).

The draft's logits become anything, at the seam where vLLM draws drafts from them; then
the drafts themselves do, by publications. Greedy answers stay the target's own, and
sampled ones keep its distribution.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.engine.sampling import drawn, prompt
from tests.engine.test_draft_bounds import ATTACK
from tests.engine.test_shared_v1 import PROMPTS
from tests.patches.test_cpu_sampling import chi_square_p

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

ENGINE = "v1"
COUNT = 4
TEMPERATURES = (0.3, 1.0)
# A correct sampler falls below this once in a million comparisons.
LEAST_P = 1e-6

FEW, MANY = (
    settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )
    for count in (4, 100)
)
seeds = st.integers(0, 2**31 - 1)
# As text: JSON has neither NaN nor infinity.
values = st.sampled_from(["nan", "inf", "-inf", "3e38", "-3e38", "0", "1e4"])
powers = st.floats(-38.0, 38.0).map(lambda power: 10.0**power)
changes = st.one_of(
    st.tuples(st.just("scale"), powers | powers.map(lambda by: -by)),
    st.tuples(st.just("permute"), seeds),
    st.tuples(st.just("fill"), st.sampled_from([1e-4, 0.5, 1.0]), values, seeds),
)
spoils = st.lists(changes, min_size=1, max_size=3)


@pytest.fixture(scope="module")
def plain(target):
    """Return `plain(samples, temperature)`: Transformers' samples without a draft."""
    return cache(lambda samples, t: drawn(target, prompt(), samples, COUNT, t))


def check(
    served: Any, greedy: Any, drawn: list[list[int]], temperature: float, **work: Any
) -> int:
    """Compare all answers and return the number of accepted drafted tokens."""
    report = served(PROMPTS, forget=True, max_tokens=12, **work)
    assert report["tokens"] == greedy(PROMPTS, 12)
    more = {"max_tokens": COUNT, "temperature": temperature, "seed": 1}
    sampled = served([prompt()] * len(drawn), forget=True, **more, **work)
    for position in range(COUNT):
        a, b = ([row[position] for row in side] for side in (drawn, sampled["tokens"]))
        assert chi_square_p(a, b) > LEAST_P, position
    assert report["faults"] == sampled["faults"] == {}
    return sum(r.num_accepted for r in sampled["records"])


def test_drafts_of_the_demo_are_accepted(served, greedy, plain):
    assert check(served, greedy, plain(96, 1.0), 1.0) > 96


@FEW
@example(spoil=[("fill", 1.0, "nan", 0)], temperature=1.0)
@example(spoil=[("fill", 0.5, "inf", 0)], temperature=1.0)
@given(spoil=spoils, temperature=st.sampled_from(TEMPERATURES))
def test_any_draft_logits_keep_the_answers(served, greedy, plain, spoil, temperature):
    check(served, greedy, plain(96, temperature), temperature, spoil=spoil)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@MANY
@given(spoil=spoils, temperature=st.sampled_from(TEMPERATURES))
def test_many_draft_logits_keep_the_answers(served, greedy, plain, spoil, temperature):
    check(served, greedy, plain(256, temperature), temperature, spoil=spoil)


def test_a_draft_that_grows_by_publications_keeps_the_answers(
    served, greedy, plain, own_draft
):
    """Scale four tensors by 15 again and again: attention would overflow at last."""
    tensors = dict(own_draft)
    named = [name for name in tensors if name.split(".")[-2] in ATTACK]
    drafted = []
    for _ in range(3):
        tensors |= {name: 15.0 * tensors[name] for name in named}
        drafted.append(served.publish(tensors))
    assert drafted == ["", "norm", "norm"]
    check(served, greedy, plain(96, 1.0), 1.0)
