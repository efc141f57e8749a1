"""Setup of the trainer's and the relay's process before all else."""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_tide.cli import relay, train
from vllm_tide.transport import process

CRASH = """
import os, resource, signal
from pathlib import Path
from vllm_tide.transport.process import prepare_sidecar_process

def where_it_hangs():
    os.kill(os.getpid(), signal.SIGUSR1)

_, hard = resource.getrlimit(resource.RLIMIT_CORE)
resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
prepare_sidecar_process()
where_it_hangs()
adjusted = Path("/proc/self/oom_score_adj").read_text()
print(resource.getrlimit(resource.RLIMIT_CORE)[0], hard, adjusted, flush=True)
os.abort()
"""
NICE = """
import os, sys
from pathlib import Path
from vllm_tide.transport.process import renice

renice(3, *map(Path, sys.argv[1:]))
print(os.nice(0))
"""


@pytest.mark.slow
def test_cores_are_disabled_stacks_dumped_and_the_oom_score_raised(tmp_path):
    ours = int(Path("/proc/self/oom_score_adj").read_text())
    child = subprocess.Popen(
        [sys.executable, "-c", CRASH],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with child.stdout, child.stderr:
        soft, hard, adjusted = map(int, child.stdout.read().split())
        assert "where_it_hangs" in child.stderr.read()  # and it continued
    _, status = os.waitpid(child.pid, 0)
    child.returncode = -1
    assert os.WIFSIGNALED(status) and not os.WCOREDUMP(status)
    assert soft == (1 if hard == resource.RLIM_INFINITY else min(hard, 1))
    assert list(tmp_path.iterdir()) == []
    assert adjusted == max(ours, 800)


def test_trainer_and_relay_disable_cores_before_all_else(monkeypatch):
    class Refused(Exception):
        pass

    def refuse():
        raise Refused

    monkeypatch.setattr(process, "disable_core_dumps", refuse)
    for command in (train, relay):
        with pytest.raises(Refused):
            command._run(argparse.Namespace())


@pytest.mark.slow
@pytest.mark.parametrize("leads", [True, False])
def test_the_session_becomes_nicer_only_with_its_leader(tmp_path, leads):
    """A file that is missing or refuses (a folder) is no error."""
    group = tmp_path / "autogroup"
    group.write_bytes(b"")
    nice = min(19, os.nice(0) + 3)
    for place in (group, tmp_path / "missing", tmp_path):
        niceness = subprocess.check_output(
            [sys.executable, "-c", NICE, place], start_new_session=leads
        )
        assert int(niceness) == nice
    assert group.read_text() == (str(nice) if leads else "")
    assert list(tmp_path.iterdir()) == [group]
