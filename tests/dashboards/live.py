"""A private Prometheus, and a server with its trainer as its targets."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from bench.harness.server import free_port
from tests.faults.reference import Known, known_outputs
from tests.faults.scene import Places
from vllm_tide.dashboards import ALERTS, contents

JOB = "vllm_tide"
ROOT = Path(__file__).parents[2]
DEMO = ROOT / "scripts" / "demo"
needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None,
    reason="prometheus is not installed (Debian: prometheus)",
)


@contextmanager
def demo_places(work: Path) -> Iterator[tuple[Places, Sequence[Known]]]:
    """Make folders of a server on the demo models, and prompts with known outputs."""
    known = known_outputs(DEMO / "target", DEMO / "prompts", ("python",), 32, 0)
    # Sockets in it need short names.
    run_dir = Path(tempfile.mkdtemp(prefix="vllm_tide_run_"))
    venv = Path(sys.executable).parents[1]
    try:
        yield Places(venv, DEMO / "target", DEMO / "draft", work, run_dir), known
    finally:
        shutil.rmtree(run_dir, ignore_errors=True)


class Prometheus:
    """The HTTP API of a running Prometheus.

    Args:
        url: Where it listens.
        step_s: Resolution of range queries.
    """

    def __init__(self, url: str, step_s: int) -> None:
        self._url = url
        self._began = time.time()
        self._step_s = step_s

    def get(self, path: str, **query: str) -> Any:
        """Return the `data` of an answer.

        Raises:
            ValueError: Prometheus refuses the request.
        """
        url = f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        try:
            with urllib.request.urlopen(url, timeout=60) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise ValueError(json.load(error)["error"]) from None

    def series(self, expr: str, newest: bool = False) -> list[dict[str, str]]:
        """Return labels of series with a finite number, now or since the beginning."""
        if newest:
            series = self.get("query", query=expr)["result"]
            samples = [(one["metric"], [one["value"]]) for one in series]
        else:
            series = self.get(
                "query_range",
                query=expr,
                start=f"{self._began:.3f}",
                end=f"{time.time():.3f}",
                step=str(self._step_s),
            )["result"]
            samples = [(one["metric"], one["values"]) for one in series]
        return [
            labels
            for labels, values in samples
            if any(math.isfinite(float(value)) for _, value in values)
        ]

    def down(self) -> list[str]:
        """Return the targets that the last scrape failed for, and the errors."""
        targets = self.get("targets", state="active")["activeTargets"]
        return [
            f"{one['scrapeUrl']}: {one['lastError']}"
            for one in targets
            if one["health"] != "up"
        ]

    def firing(self) -> set[str]:
        """Return the names of the alerts that fire now."""
        alerts = self.get("alerts")["alerts"]
        firing = [one for one in alerts if one["state"] == "firing"]
        return {one["labels"]["alertname"] for one in firing}


@contextmanager
def prometheus(
    urls: Sequence[str], folder: Path, scrape_s: int = 1, rules: str | None = None
) -> Iterator[Prometheus]:
    """Run a Prometheus that scrapes one job, as the rules require.

    Args:
        urls: What it scrapes.
        folder: For its files.
        scrape_s: Seconds between two scrapes, and between two evaluations.
        rules: In place of the package's.
    """
    (folder / ALERTS).write_text(rules or contents()[ALERTS], encoding="utf-8")
    labelled = {
        "targets": [urllib.parse.urlsplit(url).netloc for url in urls],
        "labels": {"job": JOB},
    }
    keys = "scrape_interval", "scrape_timeout", "evaluation_interval"
    config = {
        "global": dict.fromkeys(keys, f"{scrape_s}s"),
        "rule_files": [ALERTS],
        "scrape_configs": [{"job_name": JOB, "static_configs": [labelled]}],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
    process = subprocess.Popen(
        [
            "prometheus",
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address={address}",
            "--log.level=warn",
        ]
    )
    try:
        _wait_until_ready(process, f"http://{address}/-/ready")
        yield Prometheus(f"http://{address}", scrape_s)
    finally:
        process.terminate()
        process.wait(timeout=30)


def _wait_until_ready(process: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    raise RuntimeError("Prometheus did not start; its last lines are above.")
