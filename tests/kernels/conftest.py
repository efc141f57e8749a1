"""Tests marked `interpreted` run in one separate process.

Triton decides when it is first imported whether kernels are interpreted, and other
tests of this run may have imported it already. So the first such test starts a pytest
with `TRITON_INTERPRET=1` on all selected ones, and each reports its outcome there.
Inside that process (or with the variable set by hand) they simply run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_OUTCOMES = "TIDE_TEST_OUTCOMES"
_TIMEOUT_S = 1200  # together with other tests


def pytest_configure(config):
    config.addinivalue_line(
        "markers", "interpreted: runs kernels in Triton's interpreter, without a GPU"
    )


@pytest.hookimpl(tryfirst=True)  # before tests are selected
def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("interpreted"):
            # Each worker of xdist would start that process, and it is half a minute.
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.alone)
            item.add_marker(pytest.mark.timeout(_TIMEOUT_S))
            if find_spec("triton") is None:
                item.add_marker(pytest.mark.skip(reason="needs triton"))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    if INTERPRETED or not pyfuncitem.get_closest_marker("interpreted"):
        return None
    outcomes = pyfuncitem.session.stash.get(_STASH, None)
    if outcomes is None:
        outcomes = _run_all(pyfuncitem.session)
        pyfuncitem.session.stash[_STASH] = outcomes
    outcome, text = outcomes.get(pyfuncitem.nodeid, ("absent", outcomes[""][1]))
    if outcome == "skipped":
        pytest.skip(text)
    if outcome != "passed":
        pytest.fail(f"{outcome} under the interpreter\n{text}", pytrace=False)
    return True


def pytest_runtest_logreport(report):
    """Report a test's outcome in the separate process."""
    path = os.environ.get(_OUTCOMES)
    if path and (report.when == "call" or not report.passed):
        line = json.dumps([report.nodeid, report.outcome, report.longreprtext])
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(line + "\n")


_STASH = pytest.StashKey[dict[str, tuple[str, str]]]()


def _run_all(session):
    """Return outcome and text of each test; "" is the process itself."""
    ids = [i.nodeid for i in session.items if i.get_closest_marker("interpreted")]
    folder = session.config.rootpath
    hidden = ("PYTEST_", _OUTCOMES)  # options and workers of this run are not theirs
    env = {k: v for k, v in os.environ.items() if not k.startswith(hidden)}
    path = Path(session.config._tmp_path_factory.mktemp("kernels")) / "outcomes.jsonl"
    env |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", _OUTCOMES: str(path)}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *ids],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    outcomes = {"": ("process", done.stdout[-3000:] + done.stderr[-3000:])}
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            nodeid, outcome, text = json.loads(line)
            outcomes[nodeid] = (outcome, text)
    return outcomes
