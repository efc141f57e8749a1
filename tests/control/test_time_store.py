import stat

import numpy as np
import pytest

from tests.control.test_time_fit import TRUTH, rounds
from vllm_tide.control.fit import fit
from vllm_tide.control.profile_store import (
    ProfileError,
    ProfileMismatch,
    default_path,
    load,
    save,
)

FACTS = {"target": "ab", "device": "cpu", "threads": 2, "graph_sizes": [1, 2]}


@pytest.fixture
def report():
    return fit(rounds(np.random.default_rng(0), repeats=1))[1]


def test_round_trip(tmp_path, report):
    path = tmp_path / "new" / "profile.json"
    save(path, TRUTH, FACTS, report)
    stored = load(path, FACTS)
    assert stored.model == TRUTH
    assert stored.facts == FACTS
    assert stored.report == report.to_json()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == ["profile.json"]


def test_mismatch_names_what_differs(tmp_path, report):
    path = tmp_path / "profile.json"
    save(path, TRUTH, FACTS, report)
    with pytest.raises(ProfileMismatch) as caught:
        load(path, FACTS | {"threads": 8, "dtype": "bfloat16"})
    message = str(caught.value)
    assert "threads is 2 there and 8 here" in message
    assert "dtype is None there and 'bfloat16' here" in message
    assert "device" not in message
    assert "\n" not in message
    assert message.endswith(".")


@pytest.mark.parametrize("text", ["", "[]", '{"format": 1}', "null", '{"format": 99}'])
def test_other_files_are_refused_in_a_sentence(tmp_path, text):
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(ProfileError, match="holds no profile|format 99"):
        load(path)


def test_default_path_follows_the_cache_variable(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_path("k") == tmp_path / "vllm_tide" / "profiles" / "k.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_path("k").is_relative_to(tmp_path / ".cache")
