"""Lines of the server's log at a start."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path
from unittest import mock

from vllm_tide.capture.switch import PAUSED
from vllm_tide.config import parse_tide
from vllm_tide.engine.server_log import ServerLog, TrainerLog, log_start


def logged(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_a_start_notes_knobs_without_effect(caplog):
    caplog.set_level(logging.INFO, logger="vllm.tide")
    section = {"preset": "control", "train": {"device": "cuda"}}
    log_start(parse_tide(section), Path("/run/x"), 3)
    captures, note, where = logged(caplog)
    assert captures == "vllm_tide: captures nothing, as tide.preset is 'control'."
    assert note.startswith("vllm_tide: tide.train.device: has no effect: no request")
    assert "run directory /run/x; policy 'adaspec', up to 3 draft tokens" in where


def test_a_start_names_memory_and_adaptation(caplog):
    caplog.set_level(logging.INFO, logger="vllm.tide")
    both = {"adapt": "shared", "memory": "ngram"}
    log_start(parse_tide({"test_time": both}), Path("/run/x"), 3)
    assert logged(caplog)[-1].endswith("; n-gram memory; adaptation 'shared'.")


def test_a_start_under_a_pause_says_that_capture_is_off(caplog, tmp_path, monkeypatch):
    caplog.set_level(logging.INFO, logger="vllm.tide")
    log_start(parse_tide({}), tmp_path, 3)
    assert "off now" not in logged(caplog)[0]
    caplog.clear()
    (tmp_path / PAUSED).touch()
    log_start(parse_tide({}), tmp_path, 3)
    assert logged(caplog)[0].endswith(" It is off now (`vllm-tide status`).")
    (tmp_path / PAUSED).unlink()
    monkeypatch.setattr(os, "listdir", mock.Mock(side_effect=OSError(errno.EIO, "io")))
    log_start(parse_tide({}), tmp_path, 3)  # does not raise


def drafting(steps, **off):
    return {"steps": steps, "steps_without_drafts": off}


def test_disabled_drafting_is_logged_once_with_its_reason(caplog):
    caplog.set_level(logging.INFO, logger="vllm.tide")
    log = ServerLog()
    log.report(drafting(100), 0.0)  # drafts: no line
    log.report(drafting(150, no_gain=49, check=1), 10.0)
    log.report(drafting(250, no_gain=149, check=1), 20.0)
    log.report(drafting(350, no_gain=150, check=1), 21.0)  # too soon
    log.report(drafting(450, no_gain=155, check=1), 30.0)
    log.report(drafting(460, no_gain=165, check=1), 50.0)  # too few steps
    log.report(drafting(5, slo=5), 60.0)  # control restarted
    log.report(drafting(105, slo=100), 70.0)
    messages = logged(caplog)
    assert len(messages) == 3
    assert messages[0] == (
        "vllm_tide: drafting is off (no_gain in 98% of 50 steps): no draft length is "
        "predicted to be faster (tide.control.min_gain)."
    )
    assert messages[1] == "vllm_tide: drafting is on again (200 steps)."
    assert "off (slo in 95% of 105 steps): drafting is predicted to exc" in messages[2]


def test_an_invalid_request_argument_is_logged_once_without_its_text(caplog):
    log = ServerLog()
    for count in (0, 1, 5):
        dropped = {"unknown_key": count, "malformed_opt_out": count, "salted": count}
        log.report({"dropped": dropped, "malformed_limits": count}, 0.0)
    messages = logged(caplog)
    assert len(messages) == 3
    assert (
        "vllm_xargs of a request, a tide_ key is not one of tide_capture, "
        in messages[0]
    )
    assert "tide_capture is neither true nor false" in messages[1]
    assert "tide_slo_tpot_ms is not a positive number" in messages[2]


CYCLE = "2026-11-29 14:00:00,1 vllm_tide.train INFO event=cycle cycle={} gain=0.1 "
CYCLE += "reason=gain +0.00 +- 0.01; gain below min_gain 0.01\n"


def test_the_trainers_decisions_are_logged(caplog, tmp_path):
    caplog.set_level(logging.INFO, logger="vllm.tide")
    path = tmp_path / "trainer.log"
    log = TrainerLog(path)
    log.repeat_new(0.0)
    path.write_text(CYCLE.format(1) + "a secret\n" + CYCLE.format(2) + "half")
    log.repeat_new(1.0)
    with path.open("a") as file:
        file.write(" a line\nx INFO event=publish version=1 gain=0.2\n")
        file.write("x INFO event=joined engine=e\n")
        file.write("x vllm_tide.relay ERROR engine e: the spool is full\n")
        file.write("x vllm_tide.relay INFO engine e: relay to /spool\n")
    log.repeat_new(2.0)
    path.write_text(CYCLE.format(3))  # it was truncated
    log.repeat_new(12.0)
    assert logged(caplog) == [
        "vllm_tide: trainer, cycle 1: gain +0.00 +- 0.01; gain below min_gain 0.01",
        "vllm_tide: trainer, publish: version=1 gain=0.2",
        "vllm_tide: relay, engine e: the spool is full",
        "vllm_tide: trainer, cycle 3: gain +0.00 +- 0.01; gain below min_gain 0.01",
    ]
