"""Pytest plugin for vLLM's tests: records outcomes, registers CPU kernels.

Outcomes are written to the file $TIDE_OUTCOMES as {test id: "passed" | "failed" |
"skipped"}. A worker registers the CPU kernels at its start; tests without a worker need
$TIDE_CPU_KERNELS=1.
"""

from __future__ import annotations

import gc
import json
import os
from pathlib import Path

import pytest

_outcomes: dict[str, str] = {}

if os.environ.get("TIDE_CPU_KERNELS") == "1":
    from vllm.platforms import current_platform

    current_platform.register_triton_kernel_overrides()


def pytest_collection_finish() -> None:
    """Freeze imported objects, because many tests call the garbage collector."""
    gc.collect()
    gc.freeze()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Store the worst outcome of a test's three phases."""
    final = report.when == "call" or report.outcome != "passed"
    if final and _outcomes.get(report.nodeid) != "failed":
        _outcomes[report.nodeid] = report.outcome


def pytest_sessionfinish() -> None:
    """Write the outcomes."""
    Path(os.environ["TIDE_OUTCOMES"]).write_text(json.dumps(_outcomes))
