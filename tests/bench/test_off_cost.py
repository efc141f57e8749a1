"""Rows that a run of `off_cost.py` makes of its visits."""

import argparse
import math
import os
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from bench import off_cost
from bench.off_cost import NONE, OFF, Visit
from tests.bench.turn_toys import (
    as_a_terminal_starts,
    fake_quickstart_venv,
    running,
    until,
    what_ran,
)

DRAFT = Path(off_cost.__file__).parents[1] / "demo" / "draft"


def block(*rates, tokens=((1, 2),)):
    return [Visit(rate, 2 * rate, {}, [list(t) for t in tokens]) for rate in rates]


def test_ratios_are_taken_within_a_block_against_both_visits_of_none():
    blocks = [block(100.0, 99.0, 100.0), block(50.0, 50.0 * math.sqrt(2.0), 100.0)]
    row = off_cost.summary(4, blocks)
    assert row["ratio"] == pytest.approx(math.sqrt(0.99))
    assert row["cpu_ratio"] == pytest.approx(row["ratio"])
    assert row["none_ratio"] == pytest.approx(math.sqrt(2.0))
    assert row["low"] < row["ratio"] < row["high"]
    assert (row["batch"], row["blocks"], row["outputs_equal"]) == (4, 2, True)
    assert "batch   4" in off_cost.told(row)
    other = block(1.0, 1.0, 1.0)
    other[1] = Visit(1.0, 1.0, {}, [[1, 3]])
    assert not off_cost.summary(4, [other])["outputs_equal"]


def test_every_visit_of_a_block_serves_the_same_requests(monkeypatch):
    served, awake = [], []
    servers = {
        name: SimpleNamespace(
            name=name,
            resume=partial(awake.append, name),
            pause=partial(awake.remove, name),
        )
        for name in (NONE, OFF)
    }

    async def visit(server, requests, batch):
        assert awake == [server.name], "the other one stands"
        served.append((server.name, requests, batch))
        return block(1000.0)[0]

    monkeypatch.setattr(off_cost, "visit", visit)
    options = argparse.Namespace(batches="2,4", output_tokens=8, seconds=1.0)
    run = off_cost.Run(options)
    run._servers, run._prompts = servers, [(i,) * 200 for i in range(9)]
    for _ in range(2):
        for batch in run.batches:
            run.block(batch)
    assert [s for s, *_ in served] == [NONE, OFF, NONE] * 4
    for place in range(0, len(served), 3):
        assert served[place][1] == served[place + 1][1] == served[place + 2][1]
    first = served[0][1]
    assert [r.max_tokens for r in first] == [4, 8, 8, 8]
    assert {len(r.prompt) for r in first} == {128}
    assert len(served[6][1]) == 125, "of about a second"
    assert served[6][1][0].prompt != first[0].prompt
    assert [row["batch"] for row in run.rows()] == [2, 4]
    assert [row["blocks"] for row in run.rows()] == [1, 1]


def test_the_useless_draft_has_the_same_numbers_elsewhere(tmp_path):
    made = off_cost.useless_draft(DRAFT, tmp_path)
    own, other = (load_file(folder / "model.safetensors") for folder in (DRAFT, made))
    changed = [name for name in own if not torch.equal(own[name], other[name])]
    assert changed == ["fc.weight"]
    weights = [t["fc.weight"].float().flatten().sort().values for t in (own, other)]
    assert torch.equal(*weights)
    assert (made / "config.json").read_bytes() == (DRAFT / "config.json").read_bytes()


# With servers of another environment, on a core that this machine has.
STARTED = """
import runpy, sys
from functools import partial
from bench.harness import server

script, sys.prefix, cpu = sys.argv.pop(1), sys.argv.pop(1), int(sys.argv.pop(1))
cpus = {"engine_cpus": (cpu,), "other_cpus": (cpu,)}
server.ServerOptions = partial(server.ServerOptions, **cpus)
runpy.run_path(script, run_name="__main__")
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_both_servers(tmp_path, number):
    target = tmp_path / "target"
    shutil.copytree(DRAFT.parent / "target", target)
    (target / "fails").write_text("{}")
    (target / "hangs").touch()
    cpu = str(min(os.sched_getaffinity(0)))
    command = [sys.executable, "-c", STARTED, off_cost.__file__]
    command += [str(fake_quickstart_venv(tmp_path / "venv")), cpu]
    command += ["--target", str(target), "--model-size", "", "--batches", "1"]
    paths = os.pathsep.join(path for path in sys.path if path)
    with (tmp_path / "said").open("wb") as out:
        script = subprocess.Popen(
            as_a_terminal_starts(command),
            env={**os.environ, "PYTHONPATH": paths},
            stdout=out,
            stderr=out,
        )
    try:
        until(lambda: what_ran(target) or script.poll() is not None)
        said = (tmp_path / "said").read_text()
        # Control learns nothing: its section has a preset.
        assert running(target).keys() == {"none", "no_learning"}, said
        script.send_signal(number)
        assert script.wait(60) == 128 + number
    finally:
        script.kill()
        left = running(target)
        for pid in left.values():
            os.kill(pid, signal.SIGKILL)
    assert not left
