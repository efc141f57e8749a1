"""A real Prometheus that scrapes the real collectors finds all it is asked for."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("prometheus") is None,
        reason="prometheus is not installed (Debian: prometheus)",
    ),
]


@pytest.fixture(scope="module")
def servers() -> Iterator[list[tuple[str, str]]]:
    """Addresses of two replicas and of their trainers."""
    command = [sys.executable, "-m", "tests.dashboards.exporter"]
    processes = [
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        yield [
            tuple(f"http://127.0.0.1:{port}" for port in one.stdout.readline().split())
            for one in processes
        ]
    finally:
        for one in processes:
            one.kill()
            one.wait()


def run(*words: str) -> subprocess.CompletedProcess[str]:
    script = ROOT / "scripts/bench/prometheus_check.py"
    command = [sys.executable, str(script), "--minutes", "0.4", "--scrape-seconds", "1"]
    return subprocess.run(
        [*command, *words],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=150,
    )


def test_every_query_and_alert_finds_data_of_every_replica(servers, tmp_path):
    """Two servers, of which the first has a trainer."""
    table = tmp_path / "table.json"
    (one, trainer), (other, _) = servers
    scraped = ["--server", one, "--server", other, "--trainer", trainer]
    done = run(*scraped, "--json", str(table))
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 without data, 0 targets not scraped" in done.stdout
    lines = json.loads(table.read_text())["lines"]
    firing = [one["name"] for one in lines if one["note"] == "firing"]
    assert firing == []
    panels = [one for one in lines if one["kind"] == "panel"]
    empty = {one["name"] for one in panels if not one["num_series"]}
    assert empty == {"Refused drafts A", "Contained faults A"}
    for one in panels:
        # A query that merged replicas would have fewer instances than were scraped.
        replicas = 1 if "vllm_tide:trainer_" in one["expr"] else 2
        assert one["num_instances"] == replicas or one["name"] in empty, one


def test_a_selection_is_obeyed(servers, tmp_path):
    """Only what is chosen is shown: of two replicas one."""
    table = tmp_path / "table.json"
    (one, trainer), (other, _) = servers
    scraped = ["--server", one, "--server", other, "--trainer", trainer]
    chosen = ["--select", f"instance={one.removeprefix('http://')}"]
    done = run(*scraped, *chosen, "--json", str(table))
    assert done.returncode == 0, done.stdout + done.stderr
    for line in json.loads(table.read_text())["lines"]:
        if line["kind"] == "panel" and "vllm_tide:trainer_" not in line["expr"]:
            assert line["num_instances"] <= 1, line


def test_what_is_not_scraped_is_said(servers):
    # The metrics path may be given; without a trainer its panels are empty.
    done = run("--server", f"{servers[0][0]}/metrics")
    assert done.returncode == 1
    wrong = [line for line in done.stdout.splitlines() if "NO DATA" in line]
    assert any("Loss A" in line for line in wrong)
    assert not any("Acceptance length A" in line for line in wrong)
