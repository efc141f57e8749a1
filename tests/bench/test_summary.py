import pytest

from bench.harness.arm import ArmRun, SegmentRun
from bench.harness.client import RequestResult, take_event
from bench.harness.plots import draw
from bench.harness.quickstart_report import (
    ARMS,
    build_report,
    problems,
    sentence,
    table,
)
from bench.harness.scrape import Scrape
from bench.harness.summary import (
    arm_figures,
    swap_figures,
    swaps_after_shifts_s,
)
from tests.bench.toys import scrape


def result(index, segment, start_s, end_s, num_tokens=11, ttft_s=0.5):
    return RequestResult(
        index,
        segment,
        start_s,
        ttft_s,
        end_s,
        token_ids=[1] * num_tokens,
        chunks=[(start_s + ttft_s, 1), (end_s, num_tokens - 1)],
    )


def make_run(name="tide", **last):
    before = SegmentRun(
        "0 math",
        scrape(0),
        scrape(10, drafts=10, accepted=10),
        [result(0, "0 math", 0.0, 5.5), result(1, "0 math", 1.0, 10.0)],
    )
    after = SegmentRun(
        "1 sql",
        scrape(10, drafts=10, accepted=10),
        scrape(20, drafts=30, accepted=20),
        [result(2, "1 sql", 11.0, 20.0)],
    )
    end = scrape(30, drafts=40, accepted=40, **last)
    final = SegmentRun(
        "1 sql", scrape(20, drafts=30, accepted=20), end, [result(3, "1 sql", 25, 30)]
    )
    return ArmRun(name, [before, after, final], [scrape(0), end], 30.0)


def test_figures_of_an_arm():
    figures = arm_figures(make_run())
    assert figures["acceptance_length"] == {  # the final quarter is after the shift
        "before_shift": 2.0,
        "after_shift": 2.0,  # 1 + (10 + 20) / (20 + 10)
        "final": 3.0,
    }
    # 44 tokens in 10 s + 9 s + 5 s: drains between segments are not counted.
    assert figures["output_tokens_per_s"] == pytest.approx(44 / 24, abs=1e-3)
    assert figures["output_tokens_per_s_by_phase"]["final"] == pytest.approx(2.2)
    shifted = figures["stretches"][1]
    assert shifted["name"] == "1 sql" and shifted["whole"]["acceptance_length"] == 2.0
    assert shifted["final"] == {"output_tokens_per_s": 2.2, "acceptance_length": 3.0}
    assert figures["mean_e2e_s"] == pytest.approx((5.5 + 9 + 9 + 5) / 4)
    # TPOT = (e2e - TTFT) / (tokens - 1), in ms
    assert figures["tpot_ms"] == pytest.approx(1e3 * (5 + 8.5 + 8.5 + 4.5) / 40)


def test_swaps_missed_between_samples_fall_back_to_the_histogram():
    buckets = {
        ("vllm_tide:swap_seconds_bucket", (("le", "0.005"),)): 2.0,
        ("vllm_tide:swap_seconds_bucket", (("le", "+Inf"),)): 3.0,
    }
    last = scrape(1, swaps_total=3, last_swap_seconds=0.001, longest_swap_seconds=0.02)
    assert swap_figures([scrape(0), scrape(1)])["pause_ms_p50"] is None
    assert swap_figures([])["count"] == 0
    figures = swap_figures([scrape(0, swaps_total=0), Scrape(1, last.values | buckets)])
    assert figures["pause_ms_p50"] == 5.0
    assert figures["pause_ms_max"] == 20.0
    assert figures["pause_ms_p50_is"] != "exact"


def test_a_sound_run_has_no_problem():
    last = {"swaps_total": 1, "captured_rows_total": 9, "last_swap_seconds": 0.001}
    runs = {name: make_run(name, **last) for name in ARMS}
    report = build_report(runs, [], {"target_dtype": "float32"})
    assert problems(report, runs) == []
    assert report["outputs_identical"] and not report["failed_requests"]
    for name in ("none", "frozen"):
        assert report["gain"][f"final_over_{name}"] == 1.0
        assert report["gain"][f"whole_over_{name}"] == 1.0
    assert "1.00 times the tokens/s of the frozen draft" in sentence(report)
    assert "All answers are the same." in sentence(report)
    assert (report["swaps"]["count"], report["capture"]["rows"]) == (1, 9)
    assert "acceptance length, sql (2)" in table(report)


def test_a_phase_with_depth_0_by_control_is_sound():
    last = {"swaps_total": 1, "captured_rows_total": 9, "last_swap_seconds": 0.001}
    runs = {name: make_run(name, **last) for name in ARMS}
    before = runs["tide"].segments[0]
    before.end = before.start  # nothing was drafted
    problem_list = ["tide: nothing was drafted in some phase"]
    assert problems(build_report(runs, [], {}), runs) == problem_list
    values = runs["tide"].samples[-1].values
    values["vllm_tide:steps_without_drafts_total", (("reason", "gain"),)] = 5.0
    report = build_report(runs, [], {})
    assert problems(report, runs) == []
    assert report["arms"]["tide"]["acceptance_length"]["before_shift"] is None
    assert "-" in table(report)


def test_the_next_swap_after_each_shift():
    run = make_run()
    for segment in run.segments[1:]:
        segment.start.values["vllm_tide:swaps_total", ()] = 1.0
    run.samples = [scrape(t, swaps_total=n) for t, n in ((5, 1), (12, 1), (41.5, 2))]
    assert swaps_after_shifts_s(run) == [30.5]
    assert build_report({"tide": run}, [], {})["first_swap_after_shift_s"] == 30.5
    run.samples = run.samples[:2]
    assert swaps_after_shifts_s(run) == [None]
    run.segments = run.segments[:1]
    assert swaps_after_shifts_s(run) == []


def test_problems_of_a_run_are_reported():
    runs = {name: make_run(name) for name in ("none", "tide")}
    runs["none"].results[0].error = "HTTP 500: no"
    runs["tide"].problems.append("the server died")
    text = "\n".join(problems(build_report(runs, [], {}), runs))
    for reason in (
        "arm frozen is missing",
        "1 requests failed",
        "tide: the server died",
        "0 swaps",
        "nothing was captured",
    ):
        assert reason in text


@pytest.mark.slow
def test_the_plot_shows_every_arm(tmp_path):
    pytest.importorskip("matplotlib")
    last = {"swaps_total": 1, "captured_rows_total": 9, "last_swap_seconds": 0.001}
    runs = {name: make_run(name, **last) for name in ARMS}
    stream = {"domains": ["math", "sql"], "counts": [2, 2]}
    report = build_report(runs, [], {"stream": stream})
    assert report["swaps"]["at_s"] == [30]
    assert report["arms"]["tide"]["requests"]["index"] == [0, 1, 2, 3]
    draw(report, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000


def test_stream_events_fill_a_result():
    got = RequestResult(0, "0 math", 0.0)
    first = b'data: {"choices":[{"text":"a","token_ids":[5],"prompt_token_ids":[1,2]}]}'
    assert take_event(first, got)
    assert take_event(b'data: {"choices":[{"text":"","token_ids":[6,7]}]}', got)
    assert not take_event(b'data: {"choices":[],"usage":{"prompt_tokens":2}}', got)
    assert not take_event(b"data: [DONE]", got)
    assert not take_event(b"\n", got)
    assert (got.prompt_token_ids, got.token_ids) == ([1, 2], [5, 6, 7])
    assert (got.num_prompt_tokens, got.num_chunks, got.ok) == (2, 2, True)
    assert not take_event(b'data: {"error":{"message":"gone"}}', got)
    assert not got.ok and "gone" in got.error
