"""Fixtures and settings of all tests."""

from __future__ import annotations

import atexit
import functools
import gc
import logging
import os
import re
import shutil
import tempfile
from pathlib import Path

import pytest
from xdist.scheduler import LoadScopeScheduling

from scripts.demo.unpack import unpack_all

# A second checkout that shares an environment was not installed.
unpack_all()

# vLLM stores its inspection of a model's class here, or starts a process to repeat it.
# Tests with an empty cache for TIDE (XDG_CACHE_HOME) need not repeat that.
os.environ.setdefault(
    "VLLM_CACHE_ROOT",
    str(Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "vllm"),
)

# The tenants' key would else be made in the user's home.
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="tide_state_")
atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)

ROOT = Path(__file__).parents[1]
CPUS = os.sched_getaffinity(0)

# Workers take whole files (`--no-loadscope-reorder`), the longest first.
LONGEST = (
    *("export", "shared_v2_everything", "shared_v2", "shared_v2_async"),
    *("shared_v1_control", "shared_v1", "shared_v1_memory", "cpu_sampling"),
    *("architectures", "compile_all", "fresh", "compiled"),
)


def pytest_collection_modifyitems(items):
    rank = {f"test_{name}": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.stem, len(rank)))


class SharedEngineScheduling(LoadScopeScheduling):
    """Sends whole files to a worker, and files that share an engine to the same one.

    A file that uses a shared engine names it: `ENGINE = "v1"`. The controller of
    pytest-xdist imports no test, so the line is read from the text.
    """

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        return shared_engine(path) or path


@functools.cache
def shared_engine(path: str) -> str | None:
    """Return the `ENGINE` of a test file."""
    text = (ROOT / path).read_text(encoding="utf-8")
    line = re.search(r'^ENGINE = "([\w-]+)"$', text, re.MULTILINE)
    return line[1] if line else None


def pytest_xdist_make_scheduler(config, log):
    if config.getvalue("dist") == "loadscope":
        return SharedEngineScheduling(config, log)
    return None


def pytest_collection_finish():
    # Each collection would scan all of Torch, for half a second.
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def same_cores_afterwards():
    """Suites pin their own process; restore all cores for the worker's next test."""
    yield
    os.sched_setaffinity(0, CPUS)


@pytest.fixture
def caplog(caplog):
    """Pytest's, which also captures records that vLLM's logger does not propagate."""
    tide = logging.getLogger("vllm.tide")
    tide.addHandler(caplog.handler)
    tide.propagate = False
    yield caplog
    tide.propagate = True
    tide.removeHandler(caplog.handler)
