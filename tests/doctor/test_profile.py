"""Profiles: found, of this machine, of what age."""

import os
import time
from dataclasses import replace

import numpy as np
import pytest

from tests.control.test_time_fit import TRUTH, rounds
from tests.doctor.samples import make_subject
from vllm_tide.control.fit import fit
from vllm_tide.control.profile_store import default_path, profile_key, save
from vllm_tide.doctor import profile
from vllm_tide.doctor.finding import Status

ADASPEC = {"control": {"policy": "adaspec"}}


@pytest.fixture(scope="module")
def report():
    return fit(rounds(np.random.default_rng(0), repeats=1))[1]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def examined(tmp_path, section=ADASPEC):
    (found,) = profile.check(make_subject(tmp_path, section))
    return found


def keep(report, **changes):
    facts = profile.known_facts() | {"target": "t", "threads": 2} | changes
    path = default_path(profile_key(facts))
    save(path, TRUTH, facts, report)
    return path


def test_a_static_length_needs_none(tmp_path):
    assert examined(tmp_path, {"preset": "learn"}).status is Status.SKIPPED


def test_neither_does_a_threshold(tmp_path):
    found = examined(tmp_path, {"control": {"policy": "threshold"}})
    assert found.status is Status.SKIPPED and "threshold" in found.sentence


@pytest.mark.parametrize("device", ["cuda", "rocm"])
def test_on_a_gpu_times_are_kept_ones_or_adaptive_verification_s(
    device, tmp_path, monkeypatch, report
):
    monkeypatch.setattr(profile, "vllm_device", lambda build: device)
    found = examined(tmp_path)
    assert found.status is Status.OK and "vLLM measures" in found.sentence
    given = make_subject(tmp_path, ADASPEC)
    without = {**given.speculative, "enable_adaptive_verification": False}
    (found,) = profile.check(replace(given, speculative=without))
    assert found.status is Status.WARNING and "static" in found.sentence
    assert "enable_adaptive_verification" in found.advice
    assert "vllm-tide profile" in found.advice
    path = keep(report)
    assert str(path) in examined(tmp_path).sentence
    assert examined(tmp_path).status is Status.OK


def test_none_kept_is_a_warning_that_says_what_happens(tmp_path):
    found = examined(tmp_path)
    assert found.status is Status.WARNING
    assert "the first start measures" in found.sentence
    assert not (tmp_path / "cache").exists()


def test_a_kept_one_of_this_machine_is_ok(tmp_path, report):
    path = keep(report)
    found = examined(tmp_path)
    assert found.status is Status.OK, found
    assert str(path) in found.sentence
    assert "0 minutes ago" in found.sentence


def test_one_of_another_machine_does_not_count(tmp_path, report):
    keep(report, device="another CPU")
    found = examined(tmp_path)
    assert found.status is Status.WARNING
    assert "(1 of others)" in found.sentence


def test_an_old_one_is_a_warning(tmp_path, report):
    old = time.time() - 86400 * (profile.OLD_DAYS + 10)
    os.utime(keep(report), (old, old))
    found = examined(tmp_path)
    assert found.status is Status.WARNING
    assert "measured 100 days ago" in found.sentence


def test_a_file_under_another_key_and_a_damaged_one_are_named(tmp_path, report):
    path = keep(report)
    path.rename(path.with_name("0000.json"))
    path.with_name("1111.json").write_text("{}")
    found = examined(tmp_path)
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
    facts = profile.known_facts() | change
    save(path, TRUTH, facts, report)
    if not set(change) <= set(profile.known_facts()):
        pytest.skip("not known on this machine")
    section = {"control": {"policy": "adaspec", "profile": str(path)}}
    found = examined(tmp_path, section)
    assert found.status is status
    assert part in found.sentence


@pytest.mark.parametrize("content", [None, "{", '{"format": 99}'])
def test_a_configured_one_that_cannot_be_read_fails(tmp_path, content):
    path = tmp_path / "profile.json"
    if content is not None:
        path.write_text(content)
    section = {"control": {"policy": "adaspec", "profile": str(path)}}
    assert examined(tmp_path, section).status is Status.FAILED


def test_the_facts_are_those_that_the_server_takes():
    facts = profile.known_facts()
    assert {"patches", "preloaded"} <= set(facts)
