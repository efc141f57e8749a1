"""Lines of the server's log: what a start says."""

from __future__ import annotations

import logging
from pathlib import Path

from vllm_tide.config import parse_tide
from vllm_tide.engine.server_log import say_start


def logged(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_a_start_notes_knobs_without_effect(caplog):
    caplog.set_level(logging.INFO, logger="vllm.tide")
    section = {"preset": "control", "train": {"device": "cuda"}}
    say_start(parse_tide(section), Path("/run/x"), 3)
    captures, note, where = logged(caplog)
    assert captures == "vllm_tide: captures nothing (tide.capture)."
    assert note.startswith("vllm_tide: tide.train.device: has no effect: no request")
    assert "run directory /run/x; policy 'adaspec', up to 3 draft tokens" in where
