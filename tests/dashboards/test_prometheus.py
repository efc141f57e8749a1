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
def ports() -> Iterator[list[str]]:
    """Of a server and of its trainer."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.dashboards.exporter"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process.stdout.readline().split()
    finally:
        process.kill()
        process.wait()


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


def test_every_query_and_alert_finds_data(ports, tmp_path):
    table = tmp_path / "table.json"
    server, trainer = (f"http://127.0.0.1:{port}" for port in ports)
    done = run("--server", server, "--trainer", trainer, "--json", str(table))
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 without data, 0 targets not scraped" in done.stdout
    lines = json.loads(table.read_text())["lines"]
    firing = [one["name"] for one in lines if one["note"] == "firing"]
    assert firing == []
    empty = {
        one["name"] for one in lines if one["kind"] == "panel" and not one["num_series"]
    }
    assert empty == {"Refused drafts A", "Contained faults A"}


def test_what_is_not_scraped_is_said(ports):
    # The metrics path may be given; without a trainer its panels are empty.
    done = run("--server", f"127.0.0.1:{ports[0]}/metrics")
    assert done.returncode == 1
    wrong = [line for line in done.stdout.splitlines() if "NO DATA" in line]
    assert any("Loss A" in line for line in wrong)
    assert not any("Tokens per draft A" in line for line in wrong)
