"""Files and log of the trainer."""

import json
import logging

from vllm_tide.sidecar.report import Report, TrainerStatus


def test_failed_writes_are_counted_for_the_operator(tmp_path):
    report = Report(tmp_path / "absent", "e")
    report.add("cycle")
    assert report.failed_writes == 1
    report.write(TrainerStatus())
    assert report.failed_writes == 2


def test_numbers_of_an_event_are_short_in_the_log(tmp_path, caplog):
    report = Report(tmp_path, "e")
    terms = {"forward_kl": 1.23456789, "rows\n": 7}
    with caplog.at_level(logging.INFO, "vllm_tide.train"):
        report.add("publish", gain=0.123456789, steps=1234567, terms=terms, why="a b")
    text = (
        "event=publish gain=0.1235 steps=1234567 terms={forward_kl: 1.235, rows\\n: 7}"
    )
    assert caplog.messages == [f"{text} why=a b"]
    assert json.loads(report.path.read_text())["gain"] == 0.123456789
