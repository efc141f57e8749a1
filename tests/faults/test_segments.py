"""Shared memory of a run: all that its processes made, and nothing else."""

import os
import subprocess
import sys

import pytest

from tests.faults.segments import RunSegments
from vllm_tide.transport.process import Holder
from vllm_tide.transport.shm import DATA_AT, PAGE_BYTES, Segment, orphaned

CHILD = """
import sys
from vllm_tide.transport.shm import Segment
segment = Segment.create("other", b"VTIDETST", 1, {}, 4096)
print(segment.name, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def made():
    segments = []

    def make(num_bytes):
        segments.append(Segment.create("toy", b"VTIDETST", 1, {}, num_bytes))
        return segments[-1]

    yield make
    for segment in segments:
        segment.close()


def test_segments_that_nobody_announced_are_counted(made):
    first, run = made(4096), RunSegments()
    run.note([os.getpid()])
    before = run.num_bytes()
    assert first.name in run.made and before >= DATA_AT + 4096
    leaked = made(8192)
    run.note([os.getpid()])
    assert leaked.name in run.made
    assert run.num_bytes() == before + DATA_AT + 8192
    leaked.close()
    assert run.num_bytes() == before and leaked.name in run.made


def test_segments_of_others_are_not(made):
    run = RunSegments()
    with subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=-1, stdout=-1, text=True
    ) as child:
        theirs = child.stdout.readline().strip()
        run.note([os.getpid()])
        assert theirs not in run.made
        run.note([child.pid])
        assert theirs in run.made
        child.stdin.close()
    # What a process of the run left behind stays the run's.
    run.note([])
    assert theirs in run.made and run.num_bytes() == sum(
        os.stat(f"/dev/shm/{name}").st_size
        for name in run.made
        if os.path.exists(f"/dev/shm/{name}")
    )


def test_a_known_segment_is_counted_with_a_damaged_header(made):
    segment, run = made(4096), RunSegments()
    run.note([os.getpid()])
    before = run.num_bytes()
    segment.buf[:PAGE_BYTES] = bytes(PAGE_BYTES)
    run.note([os.getpid()])
    assert run.num_bytes() == before


def test_the_pid_alone_proves_nothing(made, monkeypatch):
    segment, run = made(4096), RunSegments()
    monkeypatch.setattr("tests.faults.segments.start_time", lambda _: 1)
    run.note([os.getpid()])
    assert segment.name not in run.made
    assert Holder.me().start != 1 and not orphaned(segment.name)
