"""Rates and ratios, from samples and from declared metrics."""

from dataclasses import replace

import pytest
from prometheus_client import generate_latest

from tests.top.samples import URL, history, page, page_text, sample, status
from vllm_tide import metrics
from vllm_tide.top.collect import parse_page, trainer_figures
from vllm_tide.top.figures import make_picture, server_figures


def test_rates_are_over_the_window():
    figures = server_figures(history(), URL)
    assert figures["seconds"] == 10
    assert figures["tokens_per_s"] == 100
    assert figures["prompt_tokens_per_s"] == 200
    assert figures["captured_rows_per_s"] == 400
    assert figures["dropped_rows_per_s"] == {"ring_full": 3}
    assert (figures["running"], figures["waiting"]) == (4, 0)
    assert figures["acceptance_length"] == 1 + (880 - 480) / (800 - 400)
    assert figures["draft_depth"] == (1900 - 900) / (1000 - 500)
    assert figures["off_share"] == pytest.approx(0.1)


def test_acceptance_leaves_out_proposals_of_the_memory():
    memory = {"memory_proposals": 100, "memory_accepted_tokens": 200}
    figures = server_figures(history({}, memory), URL)
    assert figures["acceptance_length"] == 1 + (400 - 200) / (400 - 100)
    memory = {"memory_proposals": 400, "memory_accepted_tokens": 400}
    assert server_figures(history({}, memory), URL)["acceptance_length"] is None


def test_a_gap_and_a_restart_begin_a_new_window():
    gone = "does not answer (Connection refused)"
    samples = [sample(0.0, page(0.0)), sample(2.0, gone)]
    figures = server_figures(samples, URL)
    assert figures["error"] == gone
    assert (figures["tokens_per_s"], figures["models"]) == (None, [])
    samples.append(sample(4.0, page(4.0, generation_tokens=90000)))
    assert server_figures(samples, URL)["tokens_per_s"] is None
    samples.append(sample(6.0, page(6.0, generation_tokens=100)))
    samples.append(sample(8.0, page(8.0, generation_tokens=300)))
    figures = server_figures(samples, URL)
    assert (figures["seconds"], figures["tokens_per_s"]) == (2, 100)


def test_names_are_those_that_the_server_exports():
    """Every figure is read from the real collectors."""
    server = metrics.TideProm({0: ["demo", "0"]})
    try:
        first = parse_page(generate_latest().decode() + page_text(tide=False), 0.0)
        server.observe(
            {
                "rows": 50,
                "swaps": 2,
                "steps": 10,
                "draft_passes": 20,
                "dropped": {"ring_full": 5},
                "steps_without_drafts": {"slo": 1},
                "refused": {"norm": 1},
                "faults": {"capture": 2},
                "draft_version": 9,
                "ring_used_bytes": 1024,
                "ring_capacity_bytes": 4096,
                "consumer_alive": True,
                "plain_step_seconds": 3.0,
                "step_seconds": 2.0,
                "swap_seconds": [0.02, 0.01],
            }
        )
        second = parse_page(generate_latest().decode() + page_text(tide=False), 10.0)
    finally:
        metrics._unregister()
    figures = server_figures([sample(0.0, first), sample(10.0, second)], URL)
    assert figures["tide"]
    assert (figures["draft_version"], figures["swaps"]) == (9, 2)
    assert figures["captured_rows_per_s"] == 5
    assert figures["dropped_rows_per_s"] == {"ring_full": 0.5}
    assert (figures["draft_depth"], figures["off_share"]) == (2, 0.1)
    assert (figures["last_swap_seconds"], figures["speed"]) == (0.01, 1.5)
    assert figures["refused_drafts"] == {"norm": 1}
    assert figures["faults"] == {"capture": 2}
    assert (figures["ring_used_bytes"], figures["ring_capacity_bytes"]) == (1024, 4096)
    assert figures["ring_consumer_alive"] is True


def test_rates_are_newer_than_the_verdict():
    totals = (0, 1000, 1000, 1000)
    samples = [
        sample(t, page(t, generation_tokens=n))
        for t, n in zip((0.0, 10.0, 20.0, 30.0), totals, strict=True)
    ]
    assert server_figures(samples, URL)["tokens_per_s"] == 0
    assert server_figures(samples[:2], URL)["tokens_per_s"] == 100
    far = [samples[0], sample(25.0, page(25.0, generation_tokens=1000))]
    assert server_figures(far, URL)["tokens_per_s"] == 40


def test_without_a_draft_pass_no_length_is_given():
    """Drafts of passes before the window are few and accepted by chance."""
    samples = history({}, {"draft_passes": 900})
    assert server_figures(samples, URL)["acceptance_length"] is None
    assert server_figures(history(), URL)["acceptance_length"] == 2


DECIDED = {"canary": status()["canary"] | {"undecided": False}}
SPEED = {"plain_step_seconds": 5.0, "step_seconds": 4.0}


def verdict(before=None, after=None, *trainers, pages=True):
    """Return the verdict after ten seconds with trainers of these changed fields."""
    snapshots = [trainer_figures("e1", status(**fields), 1.0) for fields in trainers]
    samples = [replace(s, trainers=snapshots) for s in history(before, after)]
    if not pages:
        samples = [replace(s, pages={}) for s in samples]
    (one,) = make_picture(samples, "")["helping"]
    return one["helps"], one["sentence"]


@pytest.mark.parametrize(
    ("changed", "helps"),
    [
        ({}, True),
        ({"canary": DECIDED["canary"] | {"change": -0.08}}, False),
        ({"canary": DECIDED["canary"] | {"error": 0.09}}, None),
        ({"canary": status()["canary"]}, None),  # undecided
        ({"canary": {}}, None),
        ({"canary": DECIDED["canary"] | {"change": "much"}}, None),  # an invalid file
        ({"model_name": "other"}, None),
        ({"state": "stopped"}, None),
    ],
)
def test_the_canary_of_the_models_trainer_decides(changed, helps):
    assert verdict({}, SPEED, DECIDED | changed)[0] is helps


def test_the_verdict_has_the_measurements():
    assert verdict({}, SPEED, DECIDED) == (
        True,
        "Helps: 1.25x of plain decoding over 10 s, 2.00 tokens per verify step; the "
        "last swap, without the memory's steps: 1.91x -> 2.07x of plain decoding (+8% "
        "+- 4%, 12 requests).",
    )
    assert "; no trainer of this model reports" in verdict()[1]
    compared = "the served draft has not been compared with its predecessor"
    assert compared in verdict({}, {}, {"canary": {}})[1]
    helps, sentence = verdict({}, {}, {}, pages=False)
    assert helps is None
    assert "undecided, the last swap, without the memory's steps: 1.91x" in sentence


def test_a_speed_below_plain_decoding_does_not_help():
    slow = {"plain_step_seconds": 4.0, "step_seconds": 5.0}
    assert verdict({}, slow, DECIDED)[0] is False
    initial = {"draft_version": 0}
    assert verdict(initial, slow | initial)[0] is False
    assert verdict(initial, initial)[0] is None  # no speed is measured, as in `observe`


def test_a_server_that_stands_still_is_named():
    still = {"generation_tokens": 1000}
    assert verdict({}, still)[1] == (
        "Unknown: no token in 10 s, while 4 requests run: the server is very busy or "
        "hangs."
    )
    idle = {"generation_tokens": 1000, "num_requests_running": 0, "drafts": 400}
    assert verdict(idle, idle)[1] == "Unknown: nothing drafted recently."
    assert (
        verdict(idle | {"drafts": 0}, idle | {"drafts": 0})[1]
        == "Unknown: nothing drafted yet."
    )


def test_a_short_window_decides_nothing():
    snapshots = [trainer_figures("e1", status(**DECIDED), 1.0)]
    samples = [replace(s, trainers=snapshots) for s in history({}, SPEED)]
    page_now = samples[1].pages[URL]
    samples[0] = replace(samples[0], pages={URL: replace(samples[0].pages[URL], t_s=8)})
    (one,) = make_picture(samples, "")["helping"]
    assert page_now.t_s == 10
    assert one["helps"] is None
    assert one["sentence"].startswith("Unknown: measured for 2 s only; 1.25x of plain")


def test_the_memory_is_not_counted_as_drafting_that_is_off():
    memory = {"memory_proposals": 400, "memory_accepted_tokens": 200}
    off = {"steps_without_drafts": {"no_gain": 90, "slo": 10, "memory": 500}}
    zero = {"memory_proposals": 0, "memory_accepted_tokens": 0, "draft_version": 0}
    helps, sentence = verdict(zero, memory | off | SPEED | {"draft_version": 0})
    assert helps is True
    assert sentence == (
        "Helps: 1.25x of plain decoding over 10 s, 1.50 in steps that the memory "
        "drafts; no draft trained here is served."
    )
    server = make_picture(history(zero, memory | off), "")["servers"][0]
    assert server["off_share"] == 0.0
    assert server["memory_proposals_per_s"] == pytest.approx(40.0)
    assert server["memory_length"] == pytest.approx(1.5)


def test_beside_the_memory_few_drafts_are_no_acceptance_length():
    zero = {"memory_proposals": 0, "memory_accepted_tokens": 0, "draft_version": 0}
    zero |= {"drafts": 0, "accepted_tokens": 0, "control_steps": 0}
    some = {"memory_proposals": 400, "memory_accepted_tokens": 560, "draft_version": 0}
    some |= {"drafts": 404, "accepted_tokens": 578, "control_steps": 400}
    zero["steps_without_drafts"] = {"no_gain": 0}
    off = {"steps_without_drafts": {"no_gain": 400}}
    server = make_picture(history(zero, some), "")["servers"][0]
    assert server["acceptance_length"] is None
    assert verdict(zero, some | off)[1] == (
        "Unknown: now the draft is off in 100% of steps (no_gain 400); the memory "
        "drafts, 2.40 tokens in its steps."
    )
    many = {"drafts": 600, "accepted_tokens": 760}
    server = make_picture(history(zero, some | many), "")["servers"][0]
    assert server["acceptance_length"] == pytest.approx(2.0)


def test_drafting_without_tokens_differs_from_drafting_that_is_off():
    none = {"drafts": 400, "draft_tokens": 1200, "accepted_tokens": 480}
    off = {"steps_without_drafts": {"no_gain": 90, "slo": 10}}
    some = none | off | {"control_steps": 500}
    assert verdict(none, some)[1] == "Unknown: nothing drafted recently."
    never = {"drafts": 0, "accepted_tokens": 0}
    assert verdict(never, some | never)[1] == "Unknown: nothing drafted yet."
    idle_report = {
        "control_steps": 600,
        "steps_without_drafts": {"no_gain": 190, "slo": 10},
    }
    helps, sentence = verdict(none, none | idle_report)
    assert helps is False
    assert "drafting is off in 100% of steps (no_gain 100)" in sentence
    idle_report["steps_without_drafts"] = {"no_gain": 185, "slo": 10}  # a few explore
    helps, sentence = verdict({}, idle_report)
    assert helps is False
    assert sentence.startswith("Does not help yet: drafting is off in 95% of steps")
