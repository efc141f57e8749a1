"""The steps of scripts/gpu/session.sh."""

import importlib
import sys
from pathlib import Path

import pytest

GPU = Path(__file__).resolve().parents[2] / "scripts" / "gpu"


@pytest.fixture
def scripts(monkeypatch):
    """Import a module of scripts/gpu, and hide it from other tests."""
    monkeypatch.syspath_prepend(GPU)
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").parent == GPU:
            del sys.modules[name]


def test_each_step_has_a_function_and_all_fit_into_ten_minutes(scripts):
    for steps in scripts("session").CALLS.values():
        for most, function in steps.values():
            module, _, name = function.partition(".")
            assert f"\ndef {name}(place: Place)" in (GPU / f"{module}.py").read_text()
            assert most <= 540
        assert sum(most for most, _ in steps.values()) <= 690  # of which few need all
