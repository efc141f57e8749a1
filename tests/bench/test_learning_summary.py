import json

import pytest

from bench.harness.stream import Stretch
from bench.harness.summary import acceptance_by_requests, tokens_per_step, windows
from bench.harness.summary import learning_figures as arm_figures
from bench.harness.trainers import TrainerWatch
from bench.suites.learning import compare_arms, table, verdicts
from tests.bench.learning_toys import arm_run, request, result, scrape

STREAM = [request(0), request(1), *(request(i, "1 c", "c") for i in range(2, 6))]
STRETCHES = [Stretch("0 python", "python", False), Stretch("1 c", "c", True)]


def figures(name, seconds=2.0, accepted=1.0, training=None):
    trainers = [{"training_seconds": training}] if training is not None else []
    run = arm_run(name, STREAM, seconds, accepted, trainers)
    return arm_figures(run, STREAM, STRETCHES, TrainerWatch(None), 3.0)


def test_an_arms_figures_are_by_stretch_and_over_the_shifted_part():
    found = figures("gated", training=4.0)
    assert found["output_tokens_per_s"] == 4.0  # 8 tokens in 2 s
    assert found["shifted"] == {
        "output_tokens": 32,
        "duration_s": 8.0,
        "output_tokens_per_s": 4.0,
        "acceptance_length": 2.0,
    }
    first, second = found["segments"]
    assert (first["shifted"], second["shifted"]) == (False, True)
    assert second["domain"] == "c" and second["requests"] == 4
    # 7 tokens after the first, in chunks of two: four chunks.
    assert second["tokens_per_step"] == {"c": 1.75}
    assert found["training_s"] == 4.0 and found["failed_requests"] == 0
    assert found["requests"]["domain"] == ["python"] * 2 + ["c"] * 4
    json.dumps(found, allow_nan=False)


def test_windows_hold_rates_between_samples_at_least_a_width_apart():
    samples = [
        scrape(t, drafts=t if t > 4 else 0, accepted=2 * t, generated=10 * t, swaps=t)
        for t in range(9)
    ]
    columns = windows(samples, 4.0)
    assert columns["t_s"] == [4, 8]
    assert columns["output_tokens_per_s"] == [10, 10]
    # Nothing was drafted in the first window; 8 drafts and 8 accepted in the second.
    assert columns["acceptance_length"] == [None, 2.0]
    assert columns["swaps"] == [4, 8] and columns["draft_version"] == [None, None]
    assert windows([], 4.0)["t_s"] == []


def test_acceptance_by_requests_counts_those_that_had_ended():
    results = [result(request(i), i, i + 1.0) for i in range(8)]
    samples = [scrape(t, drafts=t, accepted=t * t / 10) for t in range(10)]
    curve = acceptance_by_requests(samples, results, 4)
    assert curve["requests"] == [0, 1, 2, 3, 4]
    assert curve["end_requests"] == [4, 5, 6, 7, 8]
    assert curve["acceptance_length"][0] == 1.4  # 1 + 1.6 / 4
    assert acceptance_by_requests(samples, results, 9)["requests"] == []


def test_tokens_per_step_needs_a_second_chunk():
    assert tokens_per_step([result(request(0), 0, 1, tokens=1)]) is None


def test_gated_is_held_against_always_in_time_and_in_gain():
    arms = {
        "none": figures("none", 4.0),
        "frozen": figures("frozen", 2.5),
        "always": figures("always", 1.6, training=10.0),
        "gated": figures("gated", 1.6, training=4.0),
    }
    found = compare_arms(arms)
    assert found["over_frozen"]["always"] == pytest.approx(1.5625, abs=1e-3)
    assert found["over_none"]["gated"] == pytest.approx(2.5, abs=1e-3)
    gated = found["against_always"]["gated"]
    assert gated == {
        "training_s_ratio": 0.4,
        "gain_share": 1.0,
        "tokens_per_s_ratio": 1.0,
    }
    assert found["segments"]["1 c"]["gated"] == pytest.approx(1.5625, abs=1e-3)
    assert all(verdicts(found).values())
    assert "gated" in table(arms) and "1 c" in table(arms)


def test_what_is_missing_makes_no_verdict():
    found = compare_arms({"none": figures("none"), "gated": figures("gated")})
    assert "over_frozen" not in found and found["against_always"] == {}
    assert set(verdicts(found).values()) == {None}
    # No gain to have a share of.
    arms = {name: figures(name, training=1.0) for name in ("frozen", "always", "gated")}
    assert compare_arms(arms)["against_always"]["gated"]["gain_share"] is None
