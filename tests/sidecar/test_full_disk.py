"""Files of the trainer on a disk that takes no more."""

import json
import resource

import pytest

from tests.transport.test_kill import Child
from vllm_tide.sidecar.report import Report, TrainerStatus

UNLIMITED = resource.RLIM_INFINITY


def write_where_the_disk_is_full_meanwhile(folder):
    log = Report(folder, "e")
    log.add("first", reason="whole")
    size = log.path.stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 9, UNLIMITED))
    log.add("second", reason="is cut off after nine bytes")
    assert log.failed_writes == 1, log.failed_writes
    resource.setrlimit(resource.RLIMIT_FSIZE, (UNLIMITED, UNLIMITED))
    log.add("third")


@pytest.mark.slow
def test_half_an_event_is_taken_back(tmp_path):
    # A process of its own: the limit would hold for everything pytest writes.
    assert Child(write_where_the_disk_is_full_meanwhile, tmp_path).ended() == 0
    lines = (tmp_path / "events-e.jsonl").read_text().splitlines()
    assert [json.loads(line)["event"] for line in lines] == ["first", "third"]


def test_writes_that_failed_are_counted_for_the_operator(tmp_path):
    report = Report(tmp_path / "absent", "e")
    report.add("cycle")
    assert report.failed_writes == 1
    report.write(TrainerStatus())
    assert report.failed_writes == 2
