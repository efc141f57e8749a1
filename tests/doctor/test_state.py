"""Profiles of this machine and their age; spool and state directory, never made."""

import os
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.control.test_time_fit import TRUTH, rounds
from tests.doctor.samples import examined, make_subject
from vllm_tide.control.fit import fit
from vllm_tide.control.profile_store import default_path, profile_key, save
from vllm_tide.doctor import state
from vllm_tide.doctor.run import Status
from vllm_tide.transport import spool_store
from vllm_tide.transport.shm import TransportError

ADASPEC = {"control": {"policy": "adaspec"}}


@pytest.fixture(scope="module")
def report():
    return fit(rounds(np.random.default_rng(0), repeats=1))[1]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def profile(tmp_path, section=ADASPEC):
    return examined(make_subject(tmp_path, section), "profile")


def keep(report, **changes):
    facts = state.known_facts() | {"target": "t", "threads": 2} | changes
    path = default_path(profile_key(facts))
    save(path, TRUTH, facts, report)
    return path


def test_a_static_length_needs_none(tmp_path):
    assert profile(tmp_path, {"preset": "learn"}).status is Status.SKIPPED


def test_neither_does_a_threshold(tmp_path):
    found = profile(tmp_path, {"control": {"policy": "threshold"}})
    assert found.status is Status.SKIPPED and "threshold" in found.sentence


@pytest.mark.parametrize("device", ["cuda", "rocm"])
def test_on_a_gpu_times_are_kept_ones_or_adaptive_verification_s(
    device, tmp_path, monkeypatch, report
):
    monkeypatch.setattr(state, "vllm_device", lambda: device)
    found = profile(tmp_path)
    assert found.status is Status.OK and "vLLM measures" in found.sentence
    given = make_subject(tmp_path, ADASPEC)
    without = {**given.speculative, "enable_adaptive_verification": False}
    found = examined(replace(given, speculative=without), "profile")
    assert found.status is Status.WARNING and "static" in found.sentence
    assert "enable_adaptive_verification" in found.advice
    assert "vllm-tide profile" in found.advice
    path = keep(report)
    assert str(path) in profile(tmp_path).sentence
    assert profile(tmp_path).status is Status.OK


def test_none_kept_is_a_warning_that_says_what_happens(tmp_path):
    found = profile(tmp_path)
    assert found.status is Status.WARNING
    assert "the first start measures" in found.sentence
    assert not (tmp_path / "cache").exists()


def test_a_kept_one_of_this_machine_is_ok(tmp_path, report):
    path = keep(report)
    found = profile(tmp_path)
    assert found.status is Status.OK, found
    assert str(path) in found.sentence
    assert "0 minutes ago" in found.sentence


def test_one_of_another_machine_does_not_count(tmp_path, report):
    keep(report, device="another CPU")
    found = profile(tmp_path)
    assert found.status is Status.WARNING
    assert "(1 of others)" in found.sentence


def test_an_old_one_is_a_warning(tmp_path, report):
    old = time.time() - 86400 * (state.OLD_DAYS + 10)
    os.utime(keep(report), (old, old))
    found = profile(tmp_path)
    assert found.status is Status.WARNING
    assert "measured 100 days ago" in found.sentence


def test_a_file_under_another_key_and_a_damaged_one_are_named(tmp_path, report):
    path = keep(report)
    path.rename(path.with_name("0000.json"))
    path.with_name("1111.json").write_text("{}")
    found = profile(tmp_path)
    assert found.status is Status.WARNING
    assert "0000.json, 1111.json" in found.sentence


@pytest.mark.parametrize(
    ("change", "status", "part"),
    [
        ({}, Status.OK, "fits this machine"),
        ({"vllm": "0.31.0"}, Status.FAILED, "vllm is '0.31.0' there"),
        ({"device": "another"}, Status.FAILED, "is of another machine"),
    ],
)
def test_a_configured_one_must_fit(tmp_path, report, change, status, part):
    path = tmp_path / "profile.json"
    facts = state.known_facts() | change
    save(path, TRUTH, facts, report)
    if not set(change) <= set(state.known_facts()):
        pytest.skip("not known on this machine")
    section = {"control": {"policy": "adaspec", "profile": str(path)}}
    found = profile(tmp_path, section)
    assert found.status is status
    assert part in found.sentence


@pytest.mark.parametrize("content", [None, "{", '{"format": 99}'])
def test_a_configured_one_that_cannot_be_read_fails(tmp_path, content):
    path = tmp_path / "profile.json"
    if content is not None:
        path.write_text(content)
    section = {"control": {"policy": "adaspec", "profile": str(path)}}
    assert profile(tmp_path, section).status is Status.FAILED


def test_the_facts_are_those_that_the_server_takes():
    facts = state.known_facts()
    assert {"patches", "preloaded"} <= set(facts)


def spool(url, run_dir=Path("run")):
    return examined(make_subject(run_dir, {"spool": {"url": url}}), "spool")


def test_not_configured_is_skipped(tmp_path):
    assert examined(make_subject(tmp_path), "spool").status is Status.SKIPPED


@pytest.mark.parametrize("prefix", ["", "file://"])
def test_a_directory_is_listed_and_a_missing_one_not_made(tmp_path, prefix):
    folder = tmp_path / "spool"
    url = f"{prefix}{folder}"
    assert "is made by the relay" in spool(url).sentence
    assert not folder.exists()
    folder.mkdir(mode=0o700)
    (folder / "engine").mkdir()
    found = spool(url)
    assert found.status is Status.OK
    assert "1 folders" in found.sentence


def test_a_directory_open_to_all_fails(tmp_path):
    folder = tmp_path / "spool"
    folder.mkdir()
    folder.chmod(0o777)
    found = spool(str(folder))
    assert found.status is Status.FAILED
    assert "open to every user" in found.sentence


def test_a_file_fails(tmp_path):
    file = tmp_path / "spool"
    file.write_text("")
    assert spool(str(file)).status is Status.FAILED
    assert spool(str(file / "below")).status is Status.FAILED


def test_a_url_of_fsspec_is_listed(tmp_path):
    pytest.importorskip("fsspec")
    assert spool("memory://spool-of-a-test").status is Status.OK


def test_an_unknown_protocol_fails_without_the_password():
    found = spool("nonsense://user:secret@host/x")
    assert found.status is Status.FAILED
    assert "secret" not in found.sentence


def test_a_back_end_that_hangs_does_not_hang_us(monkeypatch, tmp_path):
    def hang(url):
        time.sleep(1)
        raise TransportError("too late")

    monkeypatch.setattr(spool_store, "open_store", hang)
    monkeypatch.setattr(state, "SPOOL_SECONDS", 0.1)
    began = time.monotonic()
    found = spool(f"{tmp_path}")
    assert found.status is Status.FAILED
    assert time.monotonic() - began < 0.9


def state_directory(folder):
    section = {"train": {"state_dir": str(folder)}}
    return examined(make_subject(folder.parent, section), "state_directory")


def test_a_state_directory_in_memory_is_a_warning(tmp_path, monkeypatch):
    folder = tmp_path / "heads"
    monkeypatch.setattr(state, "is_memory", lambda path: False)
    assert state_directory(folder).status is Status.OK
    monkeypatch.setattr(state, "is_memory", lambda path: path == folder)
    found = state_directory(folder)
    assert found.status is Status.WARNING
    assert "tide.train.state_dir" in found.advice
    assert not folder.exists()


def test_a_state_directory_that_is_a_file_fails(tmp_path):
    file = tmp_path / "heads"
    file.write_text("")
    assert state_directory(file).status is Status.FAILED


def test_the_default_state_directory_is_in_the_run_directory(tmp_path):
    found = examined(make_subject(tmp_path), "state_directory")
    assert str(tmp_path / "run" / "heads") in found.sentence
