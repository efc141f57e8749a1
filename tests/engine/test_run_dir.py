"""A run directory that loses files or has no space left: serving continues."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import toys
from tests.engine.offline_engine import OfflineEngine, only_manifest
from vllm_tide.transport.rendezvous import read_manifests
from vllm_tide.transport.shm import SHM_DIR

WITHOUT_SPACE = """
import logging, resource, sys
from collections import Counter
from pathlib import Path
from vllm_tide.engine.worker import WorkerTide
logging.basicConfig(stream=sys.stdout, format="%(levelname)s %(message)s")
tide = object.__new__(WorkerTide)
tide._run_dir, tide._losses = Path(sys.argv[1]), Counter()
print(tide._prepare_run_dir(), dict(tide._losses))
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
made = tide._prepare_run_dir()
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
print(made, dict(tide._losses))
"""


@pytest.mark.slow
def test_a_full_run_directory_gives_one_line_and_a_count(tmp_path):
    run = tmp_path / "run"
    argv = [sys.executable, "-c", WITHOUT_SPACE, str(run)]
    lines = subprocess.run(argv, stdout=-1, text=True, check=True).stdout.splitlines()
    assert lines[0] == "True {}" and lines[-1] == "False {'run_dir_full': 1}"
    (sentence,) = (line for line in lines if line.startswith("ERROR"))
    assert f"no space in run directory {run}: File too large" in sentence
    assert "capture and training are off: free space there" in sentence
    assert os.listdir(run) == []


@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_an_engine_serves_without_its_segments_and_manifest(tmp_path: Path) -> None:
    target = toys.make_target(tmp_path / "target")
    draft = toys.make_draft(tmp_path / "draft", target)
    run = tmp_path / "run"
    section = {
        "preset": "learn",
        "run_dir": str(run),
        "capture": {"ring_mib": 1},
        "train": {"autostart": False},
    }
    case = {
        "target": str(target),
        "speculative_config": {
            "method": "eagle3",
            "model": str(draft),
            "num_speculative_tokens": 3,
            "tide": section,
        },
    }
    work = {"prompts": [list(b"hello world")], "params": {"max_tokens": 8}}
    with OfflineEngine(case) as engine:
        before = only_manifest(run)
        tokens = engine.work(**work)["tokens"]
        os.truncate(f"{SHM_DIR}/{before.ring}", 0)
        os.unlink(f"{SHM_DIR}/{before.weights}")
        (run / f"engine-{before.engine_id}.json").unlink()
        until = time.monotonic() + 120
        while not (manifests := read_manifests(run)):
            assert time.monotonic() < until, "it was not announced again"
            assert engine.work(**work)["tokens"] == tokens
        (after,) = manifests
        assert after.engine_id == before.engine_id
        report = engine.work(**work)
        while not report["faults"]:  # segments are checked twice a second
            assert time.monotonic() < until, "nothing was counted"
            report = engine.work(**work)
        assert report["tokens"] == tokens
        assert report["faults"] == {"ring_lost": 1, "weights_lost": 1}
