"""Rows of `overhead.py` from time slices with known truth."""

import pytest

from scripts.bench import overhead
from scripts.bench.harness.time_slices import TimeSlice


def time_slice(
    ms: float, drafts: tuple[int, int], tokens: int, requests: int = 2
) -> TimeSlice:
    steps = tuple((ms + 0.01 * i, requests, *drafts) for i in range(5))
    return TimeSlice(tokens=tokens, steps=5, seconds=1.0, decode_steps=steps)


def test_only_steps_that_an_arm_is_about_count():
    for arm in ("none", "off", "off_capture"):
        assert overhead.counts(arm, (1.0, 2, 0, 0))
        assert not overhead.counts(arm, (1.0, 2, 0, 2))
        assert not overhead.counts(arm, (1.0, 2, 2, 0))
    for arm in ("static", "full"):
        assert overhead.counts(arm, (1.0, 2, 2, 2))
        assert not overhead.counts(arm, (1.0, 2, 1, 2))


def test_differences_and_ratios_are_of_the_same_moments():
    speed = [1.0, 2.0, 3.0]  # of the machine, in three groups
    slices = {"none": [], "static": [], "off": [], "full": []}
    for slow in speed:
        for _ in range(overhead.GROUP):
            slices["none"].append(time_slice(10 * slow, (0, 0), int(1200 / slow)))
            slices["static"].append(time_slice(10 * slow + 4, (2, 2), int(1500 / slow)))
            slices["off"].append(time_slice(10 * slow + 0.5, (0, 0), int(1140 / slow)))
            slices["full"].append(
                time_slice(10 * slow + 4.25, (2, 2), int(1500 / slow))
            )
    rows = {row["arm"]: row for row in overhead.rows_of(2, slices)}
    assert rows["none"]["over_none_ms"] == 0 and rows["none"]["tokens_ratio"] == 1
    assert rows["off"]["over_none_ms"] == pytest.approx(0.5)
    assert rows["off"]["none_ms_low"] == pytest.approx(0.5)
    assert rows["off"]["tokens_ratio"] == pytest.approx(0.95, abs=1e-3)
    assert rows["full"]["over_static_ms"] == pytest.approx(0.25)
    assert rows["full"]["steps"] == 5 * 3 * overhead.GROUP
    assert rows["full"]["over_none_ms"] == pytest.approx(4.25)
    assert "off" in overhead.line_of(rows["off"])


def test_an_arm_without_such_steps_has_no_figure():
    slices = {
        name: [time_slice(1, (0, 0), 9)] * overhead.GROUP for name in ("none", "full")
    }
    slices["static"] = slices["none"]
    row = {row["arm"]: row for row in overhead.rows_of(2, slices)}["full"]
    assert row["stepping_cpu_ms"] is None and row["over_static_ms"] is None
    assert "-" in overhead.line_of(row)
