"""The soak's verdict."""

import pytest

from tests.faults.flat import grown, growth
from tests.faults.soak import latencies


def minutes(count=12, **changes):
    """Minutes of a flat run; a change is a function of the minute's number."""
    made = []
    for number in range(count):
        minute = {
            "engine_rss_mib": 300.0 + number % 3,
            "engine_fds": 40.0,
            "shm_bytes": 1e6,
            "latency_ms_p95": 100.0 + 5 * (number % 2),
            "swaps": 20.0,
            "right": 500.0,
        }
        made.append(minute | {k: float(f(number)) for k, f in changes.items()})
    return made


def test_a_flat_run_is_flat():
    assert grown(minutes()) == []
    # Warming up is no growth, nor are more answers.
    first = minutes(engine_rss_mib=lambda n: 100 if n < 3 else 300, right=lambda n: n)
    assert grown(first) == []


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("engine_rss_mib", lambda n: 300 + 6 * n),
        ("engine_fds", lambda n: 40 + n),
        ("shm_bytes", lambda n: 1e6 + n),
        ("latency_ms_p95", lambda n: 100 + 10 * n),
    ],
)
def test_growth_is_named(name, values):
    (said,) = grown(minutes(**{name: values}))
    assert said.startswith(f"{name} grew from ")


def test_a_minute_without_a_swap_is_named():
    assert grown(minutes(swaps=lambda n: n != 7)) == ["no swap in minute 8"]


def test_a_short_run_says_nothing():
    assert growth(minutes(2)) == {}
    assert growth(minutes(4)) != {}


def test_latencies_are_percentiles_in_ms():
    found = latencies([(0.0, n / 1000) for n in range(1, 101)])
    assert found["latency_ms_p50"] == pytest.approx(50.5)
    assert found["latency_ms_p50"] < found["latency_ms_p95"] < found["latency_ms_p99"]
    assert latencies([]) == {}
