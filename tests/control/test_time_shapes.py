import dataclasses

import pytest

from vllm_tide.engine.profile_steps import Limits, batch_sizes, groups

CPU = Limits(requests=48, rows=2048, length=1900, cached=60_000, steps=7, group=15)


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize(
    "limits",
    [
        CPU,
        dataclasses.replace(CPU, requests=1),
        dataclasses.replace(CPU, rows=32, requests=4, length=100, steps=3),
        dataclasses.replace(CPU, cached=500),
        dataclasses.replace(CPU, group=2),
        Limits(requests=300, rows=8192, length=30_000, cached=10**6, steps=5, group=15),
    ],
)
def test_every_shape_fits_the_engine(limits, quick):
    found = list(groups(limits, quick=quick))
    assert found
    for group in found:
        assert 1 <= group.requests <= limits.requests
        assert 1 <= group.context <= limits.length
        assert group.requests * group.context <= limits.cached
        assert 1 <= len(group.steps) <= limits.group
        for step in group.steps:
            assert step.verified <= group.requests * limits.steps
            assert 0 <= step.steps <= limits.steps
            assert group.requests + step.verified + step.prefill <= limits.rows
            if step.prefill:
                assert group.requests < limits.requests


def test_full_has_more_contexts_per_size_and_all_lengths():
    quick, full = (list(groups(CPU, quick=flag)) for flag in (True, False))
    assert len(full) > 3 * len(quick)
    assert {group.requests for group in full} == set(batch_sizes(48))
    assert {step.steps for group in full for step in group.steps} >= {0, 1, 2, 7}
    assert any(step.prefill for group in full for step in group.steps)


def test_all_sizes_come_in_each_round():
    sizes = [group.requests for group in groups(CPU, quick=False)]
    assert sizes[:7] == batch_sizes(48) == [1, 2, 4, 8, 16, 32, 48]
