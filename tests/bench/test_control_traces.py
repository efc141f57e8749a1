import gzip

import numpy as np
import pytest

from bench.harness.common import BenchError
from bench.harness.stream import PromptPool, joined_prompt
from bench.suites.traces import (
    Limits,
    TraceChoice,
    clip,
    keep_for_load,
    load_traces,
    parse_choices,
    requests_of,
    thin,
)
from sim.arrivals import Trace


def trace(count=1000, spacing_s=0.25):
    ones = np.ones(count, dtype=np.int64)
    return Trace("t", np.arange(count) * spacing_s, 1000 * ones, 300 * ones)


def test_thinning_is_fixed_by_its_seed_and_keeps_times():
    whole = trace()
    kept = thin(whole, 0.3, 7)
    assert (thin(whole, 0.3, 7).arrival == kept.arrival).all()
    assert len(kept) == pytest.approx(300, abs=60)
    assert np.isin(kept.arrival, whole.arrival).all()
    assert not np.array_equal(thin(whole, 0.3, 8).arrival, kept.arrival)


def test_a_lower_probability_keeps_a_subset():
    few, many = thin(trace(), 0.1, 0), thin(trace(), 0.5, 0)
    assert np.isin(few.arrival, many.arrival).all()


@pytest.mark.parametrize("keep", [0.0, -1.0, 1.5])
def test_only_a_probability_thins(keep):
    with pytest.raises(BenchError, match="probability"):
        thin(trace(), keep, 0)


def test_nothing_left_is_an_error():
    with pytest.raises(BenchError, match="leaves none"):
        thin(trace(2), 1e-9, 0)


def test_lengths_are_clipped_both_ways():
    clipped = clip(trace(3), Limits(16, 100, 8, 90))
    assert clipped.prompt.tolist() == [100] * 3 and clipped.output.tolist() == [90] * 3
    short = clip(Trace("t", np.zeros(1), np.array([1]), np.array([1])), Limits())
    assert (short.prompt[0], short.output[0]) == (16, 8)


def test_the_load_wanted_gives_the_share_kept():
    # 4 requests/s of 300 tokens = 1200 tokens/s offered.
    assert keep_for_load(trace(), 250.0, 400.0, 0.6) == pytest.approx(0.2)
    assert keep_for_load(trace(), 250.0, 1e6, 0.6) == 1.0


def write(folder, name, times):
    rows = "".join(f"{t},100,20\n" for t in times)
    text = "arrival_s,input_tokens,output_tokens\n" + rows
    (folder / f"{name}.csv.gz").write_bytes(gzip.compress(text.encode()))


def test_windows_start_where_asked_and_times_are_not_stretched(tmp_path):
    write(tmp_path, "trace1_x", range(100))
    write(tmp_path, "other", range(100))
    found = load_traces(tmp_path, [TraceChoice("trace1_x", 40.0)], 10.0, 0)
    assert found["trace1_x"].arrival.tolist() == list(range(10))
    assert list(load_traces(tmp_path, [], 10.0, 0)) == ["trace1_x"]


def test_the_default_window_of_the_first_pattern_is_around_its_drop(tmp_path):
    write(tmp_path, "trace1_rate_drop", [*range(0, 400, 2)])
    rows = load_traces(tmp_path, [], 100.0, 0)["trace1_rate_drop"]
    assert rows.arrival[0] == 0.0 and len(rows) == 50
    rows = load_traces(tmp_path, [], 1000.0, 0)["trace1_rate_drop"]
    assert len(rows) == 200


def test_without_a_folder_the_three_patterns_are_made_up():
    found = load_traces(None, [], 30.0, 0)
    assert len(found) == 3
    again = load_traces(None, [], 30.0, 0)
    assert all((found[n].arrival == again[n].arrival).all() for n in found)


@pytest.mark.parametrize(
    ("choices", "message"),
    [([TraceChoice("nope")], "no trace 'nope'"), ([TraceChoice("a", 1e9)], "empty")],
)
def test_traces_that_are_not_there_are_named(tmp_path, choices, message):
    write(tmp_path, "a", range(10))
    with pytest.raises(BenchError, match=message):
        load_traces(tmp_path, choices, 5.0, 0)


def test_choices_are_parsed():
    assert parse_choices("a,b@30") == (TraceChoice("a"), TraceChoice("b", 30.0))
    with pytest.raises(BenchError, match="--traces"):
        parse_choices("a@x")


def test_prompts_have_exactly_the_lengths_of_the_trace():
    pool = PromptPool({"m": [(1, 2, 3), (4, 5)], "u": [(9,) * 7]})
    clipped = clip(trace(40), Limits(1, 11, 1, 5))
    requests = requests_of(clipped, pool, ("m", "u"), 0)
    assert {len(r.prompt) for r in requests} == {11}
    assert {r.max_tokens for r in requests} == {5}
    assert {r.segment for r in requests} == {"m", "u"}
    assert [r.arrival_s for r in requests] == clipped.arrival.tolist()
    assert requests == requests_of(clipped, pool, ("m", "u"), 0)
    assert joined_prompt([(1, 2, 3), (4, 5)], 1, 4) == (4, 5, 1, 2)
