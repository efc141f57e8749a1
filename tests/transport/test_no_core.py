"""No core file holds what users wrote."""

import argparse
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_tide.cli import relay, train
from vllm_tide.transport import process
from vllm_tide.transport.shm import Segment

CRASH = """
import os, resource
from vllm_tide.transport.process import refuse_core_dumps
_, hard = resource.getrlimit(resource.RLIMIT_CORE)
resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
refuse_core_dumps()
print(resource.getrlimit(resource.RLIMIT_CORE)[0], hard, flush=True)
os.abort()
"""


def flags(name: str) -> set[str]:
    """What the kernel knows of this process's mappings of a segment."""
    found = set()
    mapped = ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            mapped = line
        elif line.startswith("VmFlags:") and name in mapped:
            found |= set(line.split()[1:])
    return found


def test_shared_memory_is_left_out_of_cores_on_both_sides():
    made = Segment.create("test", b"VTIDETST", 1, {}, 1 << 16)
    assert "dd" in flags(made.name)
    made.buf.release()
    made._map.close()
    assert flags(made.name) == set()
    other = Segment.attach(made.name, b"VTIDETST", 1)
    assert "dd" in flags(made.name)
    other.close()
    made.close()


@pytest.mark.slow
def test_a_trainer_that_crashes_leaves_no_core(tmp_path):
    done = subprocess.Popen(
        [sys.executable, "-c", CRASH],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        stdout=subprocess.PIPE,
        text=True,
    )
    said = done.stdout.read()
    done.stdout.close()
    _, status = os.waitpid(done.pid, 0)
    done.returncode = -1
    assert os.WIFSIGNALED(status) and not os.WCOREDUMP(status)
    soft, hard = map(int, said.split())
    assert soft == (1 if hard == resource.RLIM_INFINITY else min(hard, 1))
    assert list(tmp_path.iterdir()) == []


def test_trainer_and_relay_refuse_cores_before_all_else(monkeypatch):
    class Refused(Exception):
        pass

    def refuse():
        raise Refused

    monkeypatch.setattr(process, "refuse_core_dumps", refuse)
    for command in (train, relay):
        with pytest.raises(Refused):
            command._run(argparse.Namespace())


@pytest.mark.slow
def test_trainer_and_relay_are_killed_before_the_engine():
    code = (
        "from vllm_tide.transport.process import become_sidecar\n"
        "become_sidecar()\n"
        "print(open('/proc/self/oom_score_adj').read())"
    )
    argv = [sys.executable, "-c", code]
    ours = int(Path("/proc/self/oom_score_adj").read_text())
    theirs = int(subprocess.run(argv, stdout=-1, check=True).stdout)
    assert theirs == max(ours, 800)
