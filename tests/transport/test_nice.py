"""A trainer yields to the engine, also where Linux weighs sessions."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
PROGRAM = """
import os, sys
from pathlib import Path
from vllm_tide.transport.process import be_nice

be_nice(3, *map(Path, sys.argv[1:]))
print(os.nice(0))
try:
    print(Path("/proc/self/autogroup").read_text())
except OSError:
    pass
"""


def niced(*arguments: Path, leads: bool = True) -> tuple[int, str]:
    """Niceness of a process that has become nicer, and its session's as Linux says."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, arguments)],
        capture_output=True,
        check=True,
        start_new_session=leads,
        text=True,
        timeout=60,
    )
    nice, _, group = done.stdout.partition("\n")
    return int(nice), group


@pytest.fixture
def expected() -> int:
    return min(19, os.nice(0) + 3)


def test_the_session_is_told_by_the_process_that_leads_it(tmp_path, expected):
    group = tmp_path / "autogroup"
    group.write_bytes(b"")
    assert niced(group)[0] == expected
    assert group.read_text() == str(expected)


def test_a_process_of_another_ones_session_leaves_it_alone(tmp_path, expected):
    group = tmp_path / "autogroup"
    group.write_text("as before")
    assert niced(group, leads=False)[0] == expected
    assert group.read_text() == "as before"


def test_a_file_that_is_missing_or_refuses_is_no_error(tmp_path, expected):
    assert niced(tmp_path / "missing")[0] == expected
    assert not (tmp_path / "missing").exists()
    assert niced(tmp_path)[0] == expected  # a folder
