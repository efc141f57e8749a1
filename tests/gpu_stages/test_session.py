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


def test_each_step_has_a_function(scripts):
    for _, function in scripts("session").ALL.values():
        module, _, name = function.partition(".")
        assert f"\ndef {name}(place: Place)" in (GPU / f"{module}.py").read_text()


START_S = 25  # of an engine of the demo's models at real widths


def test_each_step_fits_into_its_limit(scripts):
    session, arms, learn = (scripts(name) for name in ("session", "arms", "learn"))
    serving = {"arms.arm": arms.SERVING_S}
    trainers = len(learn.SHARES) * 10  # each loads the models and attaches
    serving["learn.shares"] = learn.SERVING_S + trainers
    for name, (most, function) in session.STEPS.items():
        assert serving.get(function, 0) + START_S <= most, name


def test_the_limits_fit_into_the_session(scripts):
    session = scripts("session")
    total = sum(most for most, _ in session.STEPS.values())
    assert total <= 60 * session.MINUTES <= 800
