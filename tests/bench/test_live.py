import io
import json

from bench.harness import arm
from bench.harness.arm import LiveView, wait_for_trainer
from bench.harness.scrape import Scrape


def scrape(t_s, tokens, drafts, accepted, version=None):
    values = {
        ("vllm:generation_tokens_total", ()): tokens,
        ("vllm:spec_decode_num_drafts_total", ()): drafts,
        ("vllm:spec_decode_num_accepted_tokens_total", ()): accepted,
    }
    if version is not None:
        values[("vllm_tide:draft_version", ())] = version
        values[("vllm_tide:ring_used_bytes", ())] = 5.0
        values[("vllm_tide:ring_capacity_bytes", ())] = 100.0
    return Scrape(t_s, values)


def test_the_row_shows_rates_of_the_latest_samples(tmp_path):
    status = {"loss": 1.23456, "state": "training"}
    (tmp_path / "trainer-e0.json").write_text(json.dumps(status))
    view = LiveView("tide", 10, tmp_path, out=io.StringIO())
    view.sample(scrape(0.0, 0.0, 0.0, 0.0, 0.0))
    view.sample(scrape(2.0, 100.0, 40.0, 60.0, 3.0))
    row = view.row()
    assert (row["tokens/s"], row["accept"]) == ("50.0", "2.50")
    assert (row["draft"], row["ring"]) == ("v3", "5.0%")
    assert (row["loss"], row["trainer"]) == ("1.235", "training")


def test_a_log_gets_plain_lines_not_too_often():
    out = io.StringIO()
    view = LiveView("none", 10, out=out)
    for t in range(5):
        view.sample(scrape(float(t), 10.0 * t, 0.0, 0.0))
    assert out.getvalue().count("\n") == 1
    assert "\x1b" not in out.getvalue()


def test_a_trainer_is_waited_for_until_it_reads(tmp_path, monkeypatch):
    view = LiveView("tide", 10, tmp_path, out=io.StringIO())
    status = tmp_path / "trainer-e0.json"
    status.write_text('{"state": "starting"}')
    waits = []
    monkeypatch.setattr(arm.time, "sleep", waits.append)
    assert wait_for_trainer(tmp_path, view, timeout_s=0.01) >= 0.01 and waits
    status.write_text('{"state": "waiting"}')
    assert wait_for_trainer(tmp_path, view, timeout_s=60) < 1
