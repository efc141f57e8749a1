"""Rates and ratios, from samples and from the metrics that the product declares."""

import pytest
from prometheus_client import generate_latest

from tests.top.samples import URL, history, page, page_text, sample, status
from vllm_tide import metrics
from vllm_tide.top.local_figures import trainer_figures
from vllm_tide.top.metrics_page import parse_page
from vllm_tide.top.run_files import TrainerLook
from vllm_tide.top.server_figures import server_figures


def test_rates_are_over_the_window():
    found = server_figures(history(), URL)
    assert found.seconds == 10
    assert found.tokens_per_s == 100
    assert found.prompt_tokens_per_s == 200
    assert found.captured_rows_per_s == 400
    assert found.dropped_rows_per_s == {"ring_full": 3}
    assert (found.running, found.waiting) == (4, 0)


def test_acceptance_is_vllm_s_definition_now_and_since_the_start():
    found = server_figures(history(), URL)
    assert found.acceptance_length == 1 + (880 - 480) / (800 - 400)
    assert found.acceptance_length_total == 1 + 880 / 800
    assert found.acceptance_by_position == [300 / 400, 80 / 400, 20 / 400]


def test_the_chosen_length_and_why_drafting_was_off():
    found = server_figures(history(), URL)
    assert found.draft_length == (1900 - 900) / (1000 - 500)
    assert found.lengths == {"0": 0.1, "2": 0.6, "3": 0.3}
    assert found.off_share == pytest.approx(0.1)
    assert found.off_rounds == {"no_gain": 0.1}


def test_without_control_the_length_is_what_vllm_drafted():
    static = {"rounds": 0, "steps": 0, "lengths": {}, "off": {}}
    found = server_figures(history(static, static), URL)
    assert found.draft_length == (2400 - 1200) / (800 - 400)
    assert found.off_share is None


def test_positions_beyond_nine_are_in_order():
    before, after = (
        {"positions": [0] * 12},
        {"positions": [400 - 10 * i for i in range(12)]},
    )
    found = server_figures(history(before, after), URL)
    assert found.acceptance_by_position == sorted(
        found.acceptance_by_position, reverse=True
    )


def test_one_sample_has_totals_and_no_rates():
    found = server_figures([sample(0.0, page())], URL)
    assert found.tokens_per_s is None
    assert found.acceptance_length is None
    assert found.acceptance_length_total == 1 + 480 / 400


def test_a_restarted_server_begins_a_new_window():
    samples = [
        sample(0.0, page(0.0, generated=90000)),
        sample(2.0, page(2.0, generated=100)),
        sample(4.0, page(4.0, generated=300)),
    ]
    found = server_figures(samples, URL)
    assert (found.seconds, found.tokens_per_s) == (2, 100)


def test_a_gap_begins_a_new_window_and_a_gone_server_says_why():
    samples = [
        sample(0.0, page(0.0)),
        sample(2.0, "does not answer (Connection refused)"),
    ]
    assert server_figures(samples, URL).error.startswith("does not answer")
    samples.append(sample(4.0, page(4.0)))
    assert server_figures(samples, URL).tokens_per_s is None


def test_a_server_without_tide_is_told():
    pages = [page(t, tide=False) for t in (0.0, 1.0)]
    found = server_figures([sample(p.t_s, p) for p in pages], URL)
    assert not found.tide
    assert found.acceptance_length_total is not None


def test_the_names_are_those_that_the_server_exports():
    """Of the real collectors every figure is found again."""
    server = metrics.TideProm({0: ["demo", "0"]})
    try:
        first = parse_page(generate_latest().decode() + page_text(tide=False), 0.0)
        server.observe(
            {
                "rows": 50,
                "swaps": 2,
                "rounds": 10,
                "draft_steps": 20,
                "dropped": {"ring_full": 5},
                "off_rounds": {"slo": 1},
                "rounds_by_length": {2: 10},
                "slo_requests": {"met": 3, "missed": 1},
                "slo_misses": 7,
                "refused": {"norm": 1},
                "faults": {"capture": 2},
                "draft_version": 9,
                "ring_used_bytes": 1024,
                "ring_capacity_bytes": 4096,
                "consumer_alive": True,
                "predicted_step_s": 0.02,
                "measured_step_s": 0.03,
                "throughput_ratio": 0.9,
                "time_error": 0.1,
                "swap_seconds": [0.02, 0.01],
            }
        )
        second = parse_page(generate_latest().decode() + page_text(tide=False), 10.0)
    finally:
        metrics._unregister()
    found = server_figures([sample(0.0, first), sample(10.0, second)], URL)
    assert found.tide
    assert (found.draft_version, found.swaps) == (9, 2)
    assert found.captured_rows_per_s == 5
    assert found.dropped_rows_per_s == {"ring_full": 0.5}
    assert (found.draft_length, found.off_rounds) == (2, {"slo": 0.1})
    assert (found.slo_met, found.slo_missed, found.slo_rounds_missed) == (3, 1, 7)
    assert (found.swap_seconds_last, found.swap_seconds_max) == (0.01, 0.02)
    assert found.refused_drafts == {"norm": 1}
    assert found.faults == {"capture": 2}
    assert (found.ring_used_bytes, found.ring_capacity_bytes) == (1024, 4096)
    assert found.ring_consumer_alive is True
    assert (found.predicted_step_s, found.measured_step_s) == (0.02, 0.03)
    assert (found.throughput_ratio, found.time_model_error) == (0.9, 0.1)


def test_a_trainer_s_figures():
    found = trainer_figures(
        TrainerLook("e1", status(last_publish_unix=100.0), 1.0), 132.0
    )
    assert found.seconds_since_publish == 32
    assert not found.silent
    assert (found.schedule_mode, found.collecting, found.shifts) == ("gated", True, 2)
    assert found.canary_undecided
    assert found.engines == 1


@pytest.mark.parametrize(
    ("state", "age_s", "silent"),
    [("training", 60, True), ("training", 3, False), ("stopped", 60, False)],
)
def test_a_trainer_that_says_nothing_is_silent(state, age_s, silent):
    look = TrainerLook("e1", status(state=state), age_s)
    assert trainer_figures(look, 0.0).silent is silent


def test_fields_of_the_wrong_kind_are_not_known():
    wrong = {
        "pid": "x",
        "state": 3,
        "loss": "nan",
        "schedule": [],
        "canary": {"undecided": 1, "requests": {}},
        "engines": 5,
        "updated_unix": 0,
    }
    found = trainer_figures(TrainerLook("e1", wrong, 1.0), 0.0)
    assert (found.pid, found.state, found.loss) == (0, "unknown", None)
    assert not found.canary_undecided
