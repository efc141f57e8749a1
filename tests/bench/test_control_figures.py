import gzip
import io
import json
import lzma
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bench.harness import common
from bench.harness.client import RequestResult
from bench.harness.common import BenchError, Progress, clock_text, percentile
from bench.harness.identity import OutputBook
from bench.harness.models import kv_cache_bytes, mlp_width, parse_size
from bench.harness.ratios import (
    attained,
    attainment,
    trace_summary,
    trace_verdict,
)
from bench.harness.scrape import parse_metrics, speculation, tide_values, time_series
from bench.harness.session import read_document
from bench.harness.summary import request_figures, tpots_ms
from bench.suites.replay import ReplayDocument
from bench.suites.traces import RunOptions
from tests.bench.control_report import RATES, report


def result(index=0, tokens=5, start_s=1.0, ttft_s=0.5, end_s=2.5, error=None):
    return RequestResult(
        index,
        "matched",
        start_s,
        ttft_s,
        end_s,
        num_prompt_tokens=7,
        prompt_token_ids=[1],
        token_ids=list(range(tokens)),
        chunks=[(start_s + ttft_s, 1), (end_s, tokens - 1)],
        error=error,
    )


def test_tpot_is_the_time_after_the_first_token_by_token():
    # 1.5 s in all, 0.5 s to the first token, 4 tokens after it.
    assert tpots_ms([result()]) == [pytest.approx(250.0)]
    assert tpots_ms([result(tokens=1), result(error="x")]) == []


def test_percentiles_interpolate():
    assert percentile([3.0, 1.0, 2.0, 4.0], 50) == 2.5
    assert percentile([5.0], 90) == 5.0
    assert percentile([0.0, 10.0], 90) == pytest.approx(9.0)


def test_figures_have_vllms_names_and_the_issues():
    figures = request_figures([result(), result(1, error="x")], 2.0, 10, 1)
    assert figures["output_tokens_per_s"] == figures["output_throughput"] == 5.0
    assert figures["mean_e2e_s"] == 1.5 and figures["mean_e2el_ms"] == 1500.0
    assert figures["mean_ttft_s"] == 0.5 and figures["mean_ttft_ms"] == 500.0
    assert figures["tpot_ms_p50"] == figures["median_tpot_ms"] == 250.0
    assert figures["completed"] == 1 and figures["failed"] == 1
    assert figures["request_throughput"] == 0.5
    assert figures["median_itl_ms"] == 1000.0
    assert figures["total_input_tokens"] == 7
    assert {"p99_tpot_ms", "p99_e2el_ms", "duration", "tpot_ms_p90"} <= set(figures)
    json.dumps(request_figures([], 0.0, 0, 0), allow_nan=False)


METRICS = """# TYPE vllm:spec_decode_num_drafts counter
vllm:spec_decode_num_drafts_total{{model_name="m"}} {drafts}
# TYPE vllm:spec_decode_num_draft_tokens counter
vllm:spec_decode_num_draft_tokens_total{{model_name="m"}} {tokens}
# TYPE vllm:spec_decode_num_accepted_tokens counter
vllm:spec_decode_num_accepted_tokens_total{{model_name="m"}} {accepted}
# TYPE vllm:generation_tokens counter
vllm:generation_tokens_total{{model_name="m"}} {generated}
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{model_name="m"}} 3.0
"""
TIDE = """# TYPE vllm_tide:drafted_tokens counter
vllm_tide:drafted_tokens_total {drafted}
# TYPE vllm_tide:verified_tokens counter
vllm_tide:verified_tokens_total {tokens}
# TYPE vllm_tide:off_rounds counter
vllm_tide:off_rounds_total{{reason="no_gain"}} {off}
# TYPE vllm_tide:draft_length gauge
vllm_tide:draft_length 2.5
"""


def scrape(t_s, drafts, tokens, accepted, generated, drafted=None, off=0):
    text = METRICS.format(
        drafts=drafts, tokens=tokens, accepted=accepted, generated=generated
    )
    if drafted is not None:
        text += TIDE.format(drafted=drafted, tokens=tokens, off=off)
    return parse_metrics(text, t_s)


def test_plain_vllm_verifies_what_it_drafts():
    found = speculation(scrape(0, 10, 30, 5, 100), scrape(1, 20, 60, 15, 130))
    assert (found["drafted"], found["verified"], found["accepted"]) == (30, 30, 10)
    assert found["rounds"] == 10 and found["request_rounds"] == 20
    assert found["acceptance_length"] == 2.0
    assert found["verified_per_request_round"] == 1.5
    assert found["off_rounds"] is None and found["draft_steps"] is None


def test_tide_counts_drafted_and_verified_apart():
    found = speculation(
        scrape(0, 0, 0, 0, 0, drafted=0, off=2),
        scrape(1, 10, 20, 10, 30, drafted=50, off=5),
    )
    assert (found["drafted"], found["verified"]) == (50, 20)
    assert found["off_rounds"] == {"no_gain": 3}


def test_a_rate_is_of_one_source_and_never_above_one():
    """Our counters come up to half a second later: once 20 of 12 were accepted."""
    before, after = scrape(0, 0, 0, 0, 0, drafted=0), scrape(1, 10, 24, 20, 30)
    late = parse_metrics(TIDE.format(drafted=12, tokens=12, off=0), 1)
    after = replace(after, values=after.values | late.values)
    found = speculation(before, after)
    assert (found["verified"], found["accepted"]) == (24, 20)
    assert found["acceptance_rate"] == round(20 / 24, 4)
    assert found["drafted"] == 12


def test_tides_counters_are_kept_as_they_grew_and_gauges_as_they_are():
    assert tide_values(
        scrape(0, 0, 0, 0, 0, drafted=4, off=2),
        scrape(1, 10, 20, 10, 30, drafted=50, off=5),
    ) == {
        "vllm_tide:draft_length": 2.5,
        "vllm_tide:drafted_tokens_total": 46.0,
        "vllm_tide:off_rounds_total": {"no_gain": 3.0},
        "vllm_tide:verified_tokens_total": 20.0,
    }


def test_without_speculation_counts_are_none():
    empty = parse_metrics("", 0.0)
    found = speculation(empty, empty)
    assert found["drafted"] is None and found["acceptance_length"] is None


def test_the_series_counts_rounds_without_speculation_as_zero():
    samples = [
        scrape(0.5, 0, 0, 0, 0),
        scrape(1.0, 10, 30, 10, 30),
        scrape(1.5, 10, 30, 10, 50),
    ]
    series = time_series(samples)
    assert series["t_s"] == [1.0, 1.5]
    assert series["length"] == [1.5, 0.0]
    assert series["running"] == [3.0, 3.0]
    assert series["output_tokens_per_s"] == [60.0, 40.0]
    assert series["draft_length"] == [None, None]


def test_attainment_counts_failed_requests_as_missed():
    assert attained([1.0, 2.0, 3.0], 1, 2.0) == 0.5
    assert attained([], 0, 1.0) is None


def test_the_baseline_attains_nine_tenths_at_scale_one():
    tpots = [float(i) for i in range(1, 101)]
    found = attainment(
        {"none": (tpots, 0), "fast": ([50.0], 0), "fast@0.8": ([75.0], 0)}, (0.8, 1.0)
    )
    assert found["p90_tpot_ms"] == pytest.approx(90.1)
    assert found["arms"]["none"] == [0.72, 0.9]
    assert found["arms"]["fast"] == [1.0, 1.0]
    assert found["served"] == {"fast": [0.0, None]}
    assert attainment({"fast": ([1.0], 0)})["p90_tpot_ms"] is None


def test_trace_summaries_are_about_latency():
    found = trace_summary(report()["cells"], [0.9, 1.0])["90m: trace1"]
    assert found["best_static"] == "static3"
    assert found["arms"]["adaspec"]["speedup_over_none"]["mean"] == 1.5
    assert found["attainment"]["scales"] == [0.9, 1.0]
    assert found["attainment"]["served"] == {"adaspec": [1.0, None]}
    said = trace_verdict(trace_summary(report()["cells"]))
    assert said == (
        "adaspec: mean latency 0.867 of the best static length's; lower on 2 of 2 "
        "traces"
    )
    assert trace_verdict({}) is None


def test_the_document_is_on_disk_after_every_cell(tmp_path):
    path = tmp_path / "deep" / "run.json"
    options = {"suite": "traces", "json": path, "work": tmp_path, "keep": 1.0}
    document = ReplayDocument(RunOptions(**options))
    for cell in report()["cells"][:2]:
        document.data["cells"].append(cell)
        document.write()
        data = read_document(path)
        assert data["cells"][-1] == cell and data["complete"] is False
    assert set(report()) == set(read_document(path))
    needed = {"batch", "domain", "arm", "target", "output_tokens_per_s", "failed"}
    assert needed <= set(data["cells"][0])
    assert not list(tmp_path.rglob("*.part"))


@pytest.mark.parametrize("packed", [("gz", gzip), ("xz", lzma)], ids=["gz", "xz"])
def test_compressed_reports_are_read_as_they_are(tmp_path, packed):
    suffix, library = packed
    path = tmp_path / f"run.json.{suffix}"
    data = library.compress(json.dumps(report()).encode())
    path.write_bytes(data)
    assert read_document(path) == report()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(BenchError, match="run.json"):
        read_document(path)


@pytest.mark.parametrize("text", ["", "[]", '{"cells": []}'])
def test_a_file_that_is_no_report_is_refused(tmp_path, text):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(BenchError, match="x.json"):
        read_document(path)
    with pytest.raises(BenchError, match="cannot be read"):
        read_document(Path(tmp_path / "none.json"))


def test_outputs_are_compared_whichever_arm_came_first():
    book = OutputBook()
    same, other = result(0), result(1)
    other.token_ids = [9, *other.token_ids[1:]]
    book.add("cell", "static1", [same, other])
    assert book.to_json() == {}
    book.add("cell", "none", [result(0), result(1), result(2)])
    verdict = book.to_json()["static1"]
    assert verdict["requests"] == 2 and verdict["not_rescored"] == 1
    assert verdict["identical"] is None
    book.add("cell", "static3", [same, result(2, error="x")])
    assert book.to_json()["static3"]["identical"] is True


def test_the_time_left_follows_from_the_visits_done():
    out, now = io.StringIO(), [0.0]
    progress = Progress(deadline_s=100.0, out=out, clock=lambda: now[0])
    progress.start(["a", "b", "a", "b"])
    assert progress.left_s() is None
    progress.done("a", 10.0)
    progress.done("b", 30.0)
    assert progress.left_s() == 40.0
    now[0] = 69.0
    assert not progress.out_of_time("b")
    now[0] = 71.0
    assert progress.out_of_time("b") and not progress.out_of_time("a")
    progress.say("hello")
    assert "2/4" in out.getvalue() and "hello" in out.getvalue()
    assert [clock_text(s) for s in (9, 75, 3720)] == ["9s", "1m15s", "1h02m"]


def test_sizes_become_mlp_widths():
    config = {"hidden_size": 256, "num_hidden_layers": 6, "intermediate_size": 480}
    width = mlp_width(config, 4_443_392, parse_size("90m"))
    assert width % 64 == 0
    grown = 4_443_392 + (width - 480) * 3 * 256 * 6
    assert grown == pytest.approx(90e6, rel=0.01)
    with pytest.raises(BenchError, match="90x"):
        parse_size("90x")


def test_the_kv_cache_holds_the_largest_batch():
    config = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    config |= {"hidden_size": 256, "num_hidden_layers": 6}
    per_token = 2 * 7 * 2 * 64 * 4
    assert kv_cache_bytes(config, 48, 512, 4) >= 48 * 512 * per_token
    assert RATES["none"] == 100.0


def test_a_report_names_the_commit_in_a_bare_environment(tmp_path):
    """Of a checkout of another user, and without a configuration that allows it."""
    scripts = Path(common.__file__).parents[2]
    path = tmp_path / "scripts/bench/harness/common.py"
    path.parent.mkdir(parents=True)
    shutil.copy(common.__file__, path)
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(scripts)}
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]

    def git(*words, **more):
        command = ["git", *who, "-C", str(tmp_path), *words]
        done = subprocess.run(command, env=env | more, stdout=subprocess.PIPE)
        return done.stdout.decode().strip()

    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message", "all")
    made, theirs = git("rev-parse", "HEAD"), {"GIT_TEST_ASSUME_DIFFERENT_OWNER": "1"}
    assert len(made) == 40 and git("rev-parse", "HEAD", **theirs) == ""
    if git("-c", f"safe.directory={tmp_path}", "rev-parse", "HEAD", **theirs) != made:
        pytest.skip("git before 2.38 takes no such exception from its command line")
    said = "import runpy, sys; run = runpy.run_path(sys.argv[1]); "
    said += "print(run['environment']({'seed': 1}))"
    found = subprocess.check_output(
        [sys.executable, "-c", said, str(path)], env=env | theirs, text=True
    )
    assert f"'commit': '{made}', 'uncommitted_changes': False, 'seed': 1" in found
