"""Files of the trainer on a disk that takes no more."""

import json
import resource
import subprocess
import sys

import pytest

from vllm_tide.sidecar.report import Report, TrainerStatus

CHILD = """
import resource, sys
from pathlib import Path
from vllm_tide.sidecar.report import Report
log = Report(Path(sys.argv[1]), "e")
log.add("first", reason="whole")
size = log.path.stat().st_size
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 9, resource.RLIM_INFINITY))
log.add("second", reason="is cut off after nine bytes")
assert log.failed_writes == 1, log.failed_writes
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
log.add("third")
"""


@pytest.mark.slow
def test_half_an_event_is_taken_back(tmp_path):
    # A process of its own: the limit would hold for everything pytest writes.
    subprocess.run([sys.executable, "-c", CHILD, str(tmp_path)], check=True)
    lines = (tmp_path / "events-e.jsonl").read_text().splitlines()
    assert [json.loads(line)["event"] for line in lines] == ["first", "third"]


def test_writes_that_failed_are_counted_for_the_operator(tmp_path):
    nowhere = tmp_path / "absent"
    report = Report(nowhere, "e")
    report.add("cycle")
    assert report.failed_writes == 1
    report.write(TrainerStatus())
    assert report.failed_writes == 2
    assert TrainerStatus().failed_writes == 0
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
