"""Ranks of one server never serve different drafts, whichever of them fails."""

import subprocess
import sys

import pytest

RANK = """
import sys
from types import SimpleNamespace

import torch.distributed as dist

from vllm_tide.engine import swapper
from vllm_tide.engine.staged_draft import StagedDraft

rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=2)

def swap(failing):
    made = object.__new__(swapper.Swapper)
    refused, served = [], ["checkpoint"]
    staged = StagedDraft(1, "new")
    made.stager = SimpleNamespace(
        take=lambda version: staged,
        refuse=lambda version, reason, detail: refused.append(reason),
        done=lambda staged, seconds: None,
        last_refused_version=0,
        last_refusal="",
    )
    made._group = SimpleNamespace(cpu_group=dist.group.WORLD, rank_in_group=rank)
    made._segment = SimpleNamespace(report=lambda *args: None)
    made._draft = made._config = made._buffer = made._tracing = None
    made.shared, made._last_good = frozenset(), StagedDraft(0, "old")
    made.version, made.num_swaps, made.seconds, made._last_seconds = 0, 0, [], 0.0

    def install(draft, config, tensors, shared):
        served.append(tensors)
        if tensors == "new" and rank == failing:
            raise RuntimeError("half loaded")

    swapper.install = install
    made.install_ordered(1)
    print(made.version, served[-1], ",".join(refused))

swap(failing=1)
swap(failing=2)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_draft_that_fails_on_one_rank_is_served_by_none(tmp_path):
    argv = [sys.executable, "-c", RANK]
    started = [
        subprocess.Popen(
            [*argv, str(rank), str(tmp_path / "store")], stdout=-1, text=True
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=280)[0].split("\n") for process in started]
    assert [process.returncode for process in started] == [0, 0]
    # One fails; then all succeed.
    assert outputs == [["0 old install", "1 new ", ""]] * 2
