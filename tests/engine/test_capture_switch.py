"""During a pause or `vllm-tide capture off` nothing, no token id, is captured."""

from __future__ import annotations

import logging
import os
import time

import pytest
from prometheus_client import REGISTRY

from tests.engine.test_capture import HIDDEN, TOPK, VOCAB, Step
from tests.transport.samples import make_manifest, write_dead_manifest
from tests.transport.spool_toys import ToyEngine
from vllm_tide.capture import switch
from vllm_tide.capture.switch import watch_capture_switch
from vllm_tide.cli.main import main
from vllm_tide.metrics import TideProm
from vllm_tide.transport.rendezvous import write_manifest
from vllm_tide.transport.ring import Collect
from vllm_tide.transport.spool import Store, TrainerState


@pytest.fixture
def step():
    one = Step("hidden")
    yield one
    one.close()


def until(true, seconds=60):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_the_switch_applies_to_every_engine_of_the_run_directory(
    step, tmp_path, capsys, caplog, monkeypatch
):
    monkeypatch.setattr(switch, "POLL_S", 0.02)
    caplog.set_level(logging.INFO, "vllm.tide")
    where = ["--run-dir", str(tmp_path)]
    write_manifest(tmp_path, make_manifest())
    ended = watch_capture_switch(step.capture, tmp_path)
    try:
        assert step.capture.collect_mode is Collect.FULL
        assert main(["capture", "off", *where]) == 0
        until(lambda: step.capture.off)
        assert [r for r in step.run() if r.num_rows] == []
        assert step.capture.dropped["paused"] == 20
        other = Step("hidden")  # of an engine that starts now
        watch_capture_switch(other.capture, tmp_path).set()
        assert other.capture.off and other.run() == []
        other.close()
        assert main(["capture", "on", *where]) == 0
        until(lambda: not step.capture.off)
        assert len([r for r in step.run() if r.num_rows]) == 4
    finally:
        ended.set()
    out = capsys.readouterr().out
    assert f"capture is off in {tmp_path}; 1 engine follows\n" in out
    until(lambda: sum("capture is on" in r.message for r in caplog.records) == 1)
    assert any(
        "capture is off (vllm-tide capture off)" in r.message for r in caplog.records
    )


def test_a_request_that_began_while_capture_was_off_is_counted_to_its_end(step):
    step.capture.off = True
    step.end()
    step.capture.off = False
    assert step.capture.dropped["paused"] == 10
    step.end()
    assert step.capture.dropped == {"paused": 19}  # one row is a placeholder
    step.capture.forget(["a", "b"])
    assert len([r for r in step.run() if r.num_rows]) == 4


def test_a_pause_applies_while_no_trainer_runs(step, tmp_path, capsys):
    (tmp_path / "paused.json").write_text("{}")
    watch_capture_switch(step.capture, tmp_path).set()
    assert step.capture.collect_mode is Collect.NOTHING
    write_manifest(tmp_path, make_manifest())
    write_manifest(tmp_path, make_manifest("e2"))
    assert main(["capture", "on", "--run-dir", str(tmp_path)]) == 0
    assert (
        "but paused: run `vllm-tide resume`; 2 engines follow"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize("state", ["off", "on"])
def test_a_switch_that_no_engine_follows_is_reported(tmp_path, capsys, state):
    """With another run directory than the server's, capture there continues."""
    absent = tmp_path / "a" / "b"
    message = (
        f"capture is {state} in %s; 0 engines follow; servers that start there do\n"
    )
    assert main(["capture", state, "--run-dir", str(absent)]) == 1
    none = f"error: no run directory {absent}: nothing set; give --run-dir\n"
    expected = ("", none) if state == "off" else (message % absent, "")
    assert capsys.readouterr() == expected
    assert list(tmp_path.iterdir()) == []
    # An engine that starts there follows it.
    write_dead_manifest(tmp_path)
    assert main(["capture", state, "--run-dir", str(tmp_path)]) == 1
    assert capsys.readouterr() == (message % tmp_path, "")
    assert (tmp_path / "capture_off.json").exists() == (state == "off")


@pytest.mark.parametrize("name", ["paused.json", "capture_off.json"])
def test_a_switch_in_the_temporary_directory_does_not_age(step, tmp_path, name):
    """systemd-tmpfiles removes files of ten days from /tmp: capture would resume."""
    (tmp_path / name).write_text("{}")
    os.utime(tmp_path / name, (0, 0))
    watch_capture_switch(step.capture, tmp_path).set()
    assert time.time() - (tmp_path / name).stat().st_mtime < 60


def test_an_unusable_run_directory_gives_one_line(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(["capture", "off", "--run-dir", str(tmp_path / "file")]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_a_paused_trainer_gets_no_token_ids_through_a_spool(step, tmp_path):
    step.reader.close()
    engine = ToyEngine(
        tmp_path, ring=step.ring.name, hidden_size=HIDDEN, vocab_size=VOCAB,
        aux_layer_ids=(1, 2), teacher="hidden", teacher_topk=TOPK,
        feature_dtype="float32",
    )  # fmt: skip
    store = Store(str(tmp_path / "spool"))
    relay = engine.relay(store)

    def tick():
        relay._next_poll = 0.0
        relay.tick()
        relay._writer.flush()

    state = TrainerState("i", unix=1.0, collect=Collect.NOTHING)
    engine.folder(store).write_trainer(state)
    tick()
    step.capture.on_logits(step.logits)
    for _ in range(2):
        step.end()
    step.capture.forget(["a", "b"])
    tick()
    assert step.ring.stats().written_records == 0
    assert engine.folder(store).read_state().last_shard == 0
    assert not list((tmp_path / "spool").rglob("*.safetensors"))
    assert step.capture.dropped == {"paused": 20}
    relay.close()
    engine.close()


def test_the_gauge_exists_where_capture_does():
    prom = TideProm({0: ["m", "0"]})
    labels = {"model_name": "m", "engine": "0"}

    def value():
        return REGISTRY.get_sample_value("vllm_tide:capture_on", labels)

    prom.observe({"rows": 1})
    assert value() is None
    for on in (True, False):
        prom.observe({"capture_on": on})
        assert value() == on
