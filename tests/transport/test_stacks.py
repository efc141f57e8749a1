"""A process that seems to hang says where it is, and goes on."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import os, signal
from vllm_tide.transport.process import show_stacks_on_signal

def where_it_hangs():
    os.kill(os.getpid(), signal.SIGUSR1)

show_stacks_on_signal()
where_it_hangs()
print("goes on")
"""


@pytest.mark.slow
def test_a_signal_shows_the_stacks_and_ends_nothing():
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "goes on\n")
    assert "where_it_hangs" in done.stderr
