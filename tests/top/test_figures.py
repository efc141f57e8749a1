"""Rates and ratios, from samples and from the metrics that the product declares."""

import re
import time
from dataclasses import replace

import pytest
from prometheus_client import generate_latest

from tests.top.page_server import serve_page
from tests.top.samples import (
    URL,
    history,
    page,
    page_text,
    sample,
    status,
    write_status,
)
from tests.transport.test_rendezvous import make_manifest
from vllm_tide import metrics
from vllm_tide.top.collect import Sampler, parse_page, trainer_figures
from vllm_tide.top.figures import make_picture, server_figures, verdict
from vllm_tide.transport.rendezvous import write_manifest


def test_rates_are_over_the_window():
    found = server_figures(history(), URL)
    assert found["seconds"] == 10
    assert found["tokens_per_s"] == 100
    assert found["prompt_tokens_per_s"] == 200
    assert found["captured_rows_per_s"] == 400
    assert found["dropped_rows_per_s"] == {"ring_full": 3}
    assert (found["running"], found["waiting"]) == (4, 0)


def test_acceptance_is_vllm_s_definition_now_and_since_the_start():
    found = server_figures(history(), URL)
    assert found["acceptance_length"] == 1 + (880 - 480) / (800 - 400)
    assert found["acceptance_length_total"] == 1 + 880 / 800
    assert found["acceptance_by_position"] == [300 / 400, 80 / 400, 20 / 400]


def test_acceptance_leaves_out_what_the_memory_drafted():
    memory = {"memory": (100, 200)}
    found = server_figures(history({}, memory), URL)
    assert found["acceptance_length"] == 1 + (400 - 200) / (400 - 100)
    every = {"drafts": 400, "accepted": 600, "memory": (400, 600)}
    assert server_figures(history({}, every), URL)["acceptance_length_total"] is None


def test_the_chosen_length_and_why_drafting_was_off():
    found = server_figures(history(), URL)
    assert found["draft_length"] == (1900 - 900) / (1000 - 500)
    assert found["lengths"] == {"0": 0.1, "2": 0.6, "3": 0.3}
    assert found["off_share"] == pytest.approx(0.1)
    assert found["off_rounds"] == {"no_gain": 0.1}


def test_without_control_the_length_is_what_vllm_drafted():
    static = {"rounds": 0, "steps": 0, "lengths": {}, "off": {}}
    found = server_figures(history(static, static), URL)
    assert found["draft_length"] == (2400 - 1200) / (800 - 400)
    assert found["off_share"] is None


def test_positions_beyond_nine_are_in_order():
    before, after = (
        {"positions": [0] * 12},
        {"positions": [400 - 10 * i for i in range(12)]},
    )
    found = server_figures(history(before, after), URL)
    assert found["acceptance_by_position"] == sorted(
        found["acceptance_by_position"], reverse=True
    )


def test_one_sample_has_totals_and_no_rates():
    found = server_figures([sample(0.0, page())], URL)
    assert found["tokens_per_s"] is None
    assert found["acceptance_length"] is None
    assert found["acceptance_length_total"] == 1 + 480 / 400


def test_a_restarted_server_begins_a_new_window():
    samples = [
        sample(0.0, page(0.0, generated=90000)),
        sample(2.0, page(2.0, generated=100)),
        sample(4.0, page(4.0, generated=300)),
    ]
    found = server_figures(samples, URL)
    assert (found["seconds"], found["tokens_per_s"]) == (2, 100)


def test_a_gap_begins_a_new_window_and_a_gone_server_says_why():
    samples = [
        sample(0.0, page(0.0)),
        sample(2.0, "does not answer (Connection refused)"),
    ]
    assert server_figures(samples, URL)["error"].startswith("does not answer")
    samples.append(sample(4.0, page(4.0)))
    assert server_figures(samples, URL)["tokens_per_s"] is None


def test_a_server_without_tide_is_told():
    pages = [page(t, tide=False) for t in (0.0, 1.0)]
    found = server_figures([sample(p.t_s, p) for p in pages], URL)
    assert not found["tide"]
    assert found["acceptance_length_total"] is not None


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
    assert found["tide"]
    assert (found["draft_version"], found["swaps"]) == (9, 2)
    assert found["captured_rows_per_s"] == 5
    assert found["dropped_rows_per_s"] == {"ring_full": 0.5}
    assert (found["draft_length"], found["off_rounds"]) == (2, {"slo": 0.1})
    assert (found["slo_met"], found["slo_missed"], found["slo_rounds_missed"]) == (
        3,
        1,
        7,
    )
    assert (found["swap_seconds_last"], found["swap_seconds_max"]) == (0.01, 0.02)
    assert found["refused_drafts"] == {"norm": 1}
    assert found["faults"] == {"capture": 2}
    assert (found["ring_used_bytes"], found["ring_capacity_bytes"]) == (1024, 4096)
    assert found["ring_consumer_alive"] is True
    assert (found["predicted_step_s"], found["measured_step_s"]) == (0.02, 0.03)
    assert (found["throughput_ratio"], found["time_model_error"]) == (0.9, 0.1)


def test_a_trainer_s_figures():
    found = trainer_figures("e1", status(last_publish_unix=time.time() - 32), 1.0)
    assert found["seconds_since_publish"] == pytest.approx(32, abs=10)
    assert not found["silent"]
    assert (found["schedule_mode"], found["collecting"], found["shifts"]) == (
        "tide",
        True,
        2,
    )
    assert found["canary_undecided"]
    assert found["engines"] == 1


@pytest.mark.parametrize(
    ("state", "age_s", "silent"),
    [("training", 60, True), ("training", 3, False), ("stopped", 60, False)],
)
def test_a_trainer_that_says_nothing_is_silent(state, age_s, silent):
    assert trainer_figures("e1", status(state=state), age_s)["silent"] is silent


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
    found = trainer_figures("e1", wrong, 1.0)
    assert (found["pid"], found["state"], found["loss"]) == (0, "unknown", None)
    assert not found["canary_undecided"]
    assert (found["schedule_mode"], found["canary_requests"]) == ("", 0)
    assert found["engines"] == 0


SPEED = {"plain_seconds": 5.0, "round_seconds": 4.0}


def said(before=None, after=None, first=None, trainers=()):
    """Verdict after ten seconds; `first` is the page of the first draft."""
    old, new = history(before, after)
    firsts = {} if first is None else {URL: page(-60.0, version=0, **first)}
    trainers = [trainer_figures("e1", status(**fields), 1.0) for fields in trainers]
    new = replace(new, first_pages=firsts, trainers=trainers)
    (found,) = make_picture([old, new], "")["helping"]
    return found["helps"], found["sentence"]


def test_acceptance_that_rose_helps():
    helps, sentence = said(first={"accepted": 200})
    assert helps is True
    assert re.fullmatch(
        r"Helps: 1\.50 -> 2\.00 tokens a verify step since \d\d:\d\d\.", sentence
    )


def test_acceptance_that_did_not_rise_does_not_help():
    helps, sentence = said(first={"accepted": 398})
    assert helps is False
    assert sentence.startswith("Does not help yet: 2.00 -> 2.00 tokens a verify step")


def test_slower_than_plain_does_not_help_whatever_is_accepted():
    slow = {"plain_seconds": 3.8, "round_seconds": 4.0}
    helps, sentence = said({}, slow, first={"accepted": 200})
    assert helps is False
    assert "1.50 -> 2.00 tokens a verify step, 0.95x of plain" in sentence


def test_speed_over_plain_decides_where_both_are_known():
    first = {"accepted": 200, "plain_seconds": 6.0, "round_seconds": 4.0}
    helps, sentence = said({}, SPEED, first=first)
    assert helps is False
    assert "1.25x of plain" in sentence
    assert "1.50x before" in sentence
    first = {"accepted": 399, "plain_seconds": 4.4, "round_seconds": 4.0}
    assert said({}, SPEED, first=first)[0] is True


def test_few_drafts_decide_nothing():
    helps, sentence = said(first={"drafts": 99, "accepted": 20})
    assert helps is None
    assert sentence.startswith("Not known: too few drafts; 1.20 -> 2.00")


def test_the_checkpoint_s_draft_is_no_help_of_training():
    assert said({"version": 0}, SPEED | {"version": 0}) == (
        False,
        "Does not help yet: no trained draft serves; 2.00 tokens a verify step, "
        "1.25x of plain.",
    )


def test_a_first_draft_that_was_not_seen_leaves_it_to_the_canary():
    decided = {"canary": status()["canary"] | {"undecided": False}}
    assert said()[1] == (
        "Not known: the first draft was not seen serving; 2.00 tokens a verify step."
    )
    assert said(trainers=[decided]) == (
        True,
        "Helps: 1.91x -> 2.07x of plain with the last swap (+8% +- 4%); 2.00 tokens a "
        "verify step.",
    )
    assert said(trainers=[{}])[0] is None
    worse = {"canary": decided["canary"] | {"change": -0.08}}
    assert said(trainers=[worse])[0] is False
    unsure = {"canary": decided["canary"] | {"error": 0.09}}
    assert said(trainers=[unsure])[0] is None
    assert said(trainers=[decided | {"model_name": "other"}])[0] is None
    assert said(trainers=[decided | {"state": "stopped"}])[0] is None


def test_a_swap_that_was_not_compared_is_not_known():
    sentence = "no swap was compared with the draft before it yet"
    assert sentence in said(trainers=[{"canary": {}}])[1]


def test_nothing_drafted_is_told_apart_from_drafting_left_off():
    none = {"drafts": 400, "draft_tokens": 1200, "accepted": 480}
    idle = {"off": {"no_gain": 90, "slo": 10}, "rounds": 500}
    assert said({}, none | idle) == (None, "Not known: nothing drafted lately.")
    never = {"drafts": 0, "accepted": 0}
    assert said(never, never | idle) == (None, "Not known: nothing drafted yet.")
    off = {"off": {"no_gain": 590, "slo": 10}, "rounds": 1000}
    helps, sentence = said({}, none | off)
    assert helps is False
    assert "control drafts nothing, plain decoding is faster" in sentence


def test_a_server_without_tide_or_answer_is_not_known():
    pages = [page(t, tide=False) for t in (0.0, 1.0)]
    found = verdict([sample(p.t_s, p) for p in pages], URL, None)
    assert found["sentence"] == "Not known: tide is not configured on this server."
    gone = sample(2.0, "does not answer (Connection refused)")
    assert make_picture([gone], "")["helping"] == [
        {
            "name": URL,
            "helps": None,
            "sentence": "Not known: the server does not answer (Connection refused).",
        }
    ]


def test_without_a_server_the_canary_of_each_trainer_tells():
    look = trainer_figures("e1", status(), 1.0)
    alone = replace(sample(0.0, ""), pages={}, trainers=[look])
    (found,) = make_picture([alone], "")["helping"]
    assert (found["name"], found["helps"]) == ("e1", None)
    assert "undecided, 1.91x -> 2.07x of plain with the last swap" in found["sentence"]


def test_the_first_draft_is_remembered_for_a_run_of_the_server(tmp_path):
    with serve_page(page_text(version=0, accepted=200)) as server:
        sampler = Sampler(tmp_path, [server.url])
        sampler.take()
        server.text = page_text(drafts=900, generated=2000, accepted=800)
        sampler.take()
        (found,) = make_picture(sampler.history, "")["helping"]
        assert found["helps"] is True
        assert "1.50 -> 2.20 tokens a verify step" in found["sentence"]
        server.text = page_text(drafts=900, generated=10)
        sampler.take()
        assert sampler.history[-1].first_pages == {}


# What scripts read: a name that goes breaks them.
SERVER = [
    "acceptance_by_position",
    "acceptance_length",
    "acceptance_length_total",
    "captured_rows_per_s",
    "draft_length",
    "draft_version",
    "dropped_rows_per_s",
    "error",
    "faults",
    "lengths",
    "measured_step_s",
    "models",
    "off_rounds",
    "off_share",
    "predicted_step_s",
    "prompt_tokens_per_s",
    "refused_drafts",
    "ring_capacity_bytes",
    "ring_consumer_alive",
    "ring_used_bytes",
    "running",
    "seconds",
    "slo_met",
    "slo_missed",
    "slo_rounds_missed",
    "swap_seconds_last",
    "swap_seconds_max",
    "swaps",
    "throughput_ratio",
    "tide",
    "time_model_error",
    "tokens_per_s",
    "url",
    "waiting",
]
ENGINE = [
    "alive",
    "corrupt_records",
    "draft",
    "dropped_rows_per_s",
    "engine_id",
    "installed_version",
    "num_speculative_tokens",
    "pid",
    "policy",
    "published_version",
    "refused_reason",
    "refused_version",
    "ring_capacity_bytes",
    "ring_consumer_alive",
    "ring_used_bytes",
    "rows_per_s",
    "swap_pause_ms",
    "target",
]
TRAINER = [
    "age_s",
    "backoff_cycles",
    "canary_requests",
    "canary_undecided",
    "collecting",
    "cycles",
    "engines",
    "holdout_acceptance_live",
    "holdout_acceptance_new",
    "installed_version",
    "last_decision",
    "long_average",
    "loss",
    "model_name",
    "name",
    "pid",
    "publications",
    "published_version",
    "refused_versions",
    "rollbacks",
    "rows_read",
    "schedule_mode",
    "schedule_reason",
    "seconds_since_publish",
    "shifts",
    "short_average",
    "silent",
    "speed_after",
    "speed_before",
    "speed_change",
    "speed_error",
    "state",
    "steps",
    "train_tokens",
    "waiting_for",
]


def test_the_fields_of_json_are_these(tmp_path):
    write_manifest(tmp_path, make_manifest())
    write_status(tmp_path)
    with serve_page(page_text()) as server:
        sampler = Sampler(tmp_path, [server.url])
        sampler.take()
    sampler.take()  # the server is gone: the same fields
    for sample_ in sampler.history:
        found = make_picture([sample_], "")
        assert sorted(found) == sorted(
            ["engines", "helping", "old_trainers", "run_dir"]
            + ["servers", "trainers", "unix_s"]
        )
        assert [sorted(one) for one in found["servers"]] == [SERVER]
        assert [sorted(one) for one in found["engines"]] == [ENGINE]
        assert [sorted(one) for one in found["trainers"]] == [TRAINER]
        assert [sorted(one) for one in found["helping"]] == [
            ["helps", "name", "sentence"]
        ]


def test_a_server_that_is_gone_has_empty_figures():
    found = server_figures([sample(0.0, "does not answer")], URL)
    assert (found["models"], found["lengths"], found["faults"]) == ([], {}, {})
    assert (found["slo_met"], found["slo_rounds_missed"]) == (0.0, 0.0)
    assert found["acceptance_length_total"] is None
    assert found["tide"] is False
