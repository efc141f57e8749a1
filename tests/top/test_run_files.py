"""Run directory and shared memory, looked at without joining."""

import json
import os
import time

import pytest

from tests.top.samples import write_status
from tests.transport.samples import make_record, make_spec
from tests.transport.test_rendezvous import make_manifest
from vllm_tide.top.collect import Sampler, look_at_engines, look_at_trainers
from vllm_tide.top.figures import make_picture
from vllm_tide.top.view import plain
from vllm_tide.transport import RingReader, RingWriter, WeightsSegment, WeightsWriter
from vllm_tide.transport.rendezvous import write_manifest
from vllm_tide.transport.ring import peek_ring
from vllm_tide.transport.shm import SHM_DIR
from vllm_tide.transport.weights import peek_weights


@pytest.fixture
def ring():
    made = RingWriter.create(make_spec(), 1 << 16)
    yield made
    made.close()


@pytest.fixture
def segment():
    made = WeightsSegment.create(1 << 16)
    yield made
    made.close()


def test_a_ring_s_counters_are_those_of_its_writer(ring):
    for seed in range(400):
        ring.try_write(make_record(make_spec(), seed))
    found = peek_ring(ring.name)
    assert found == ring.stats()
    assert found.dropped_rows > 0
    assert not found.consumer_alive


def test_looking_claims_nothing_and_sees_the_trainer(ring):
    peek_ring(ring.name)
    reader = RingReader.attach(ring.name)  # still free
    try:
        assert peek_ring(ring.name).consumer_alive
    finally:
        reader.close()
    assert not peek_ring(ring.name).consumer_alive


def test_a_weights_segment_s_versions_and_the_engine_s_answer(segment):
    assert peek_weights(segment.name).latest_version == 0
    writer = WeightsWriter.attach(segment.name)
    try:
        tensors = {"a": ("float32", (2,), bytes(8))}
        writer.publish(tensors, version=3, parent_version=0, meta={})
        segment.report(2, 3, "norm", 10.9)
        found = peek_weights(segment.name)
        assert found.latest_version == 3
        assert found.feedback == writer.feedback()
        assert found.feedback.refused_reason == "norm"
    finally:
        writer.close()


@pytest.mark.parametrize("name", ["", "x", "vllm_tide_ring_gone", "vllm_tide_../x"])
def test_what_is_not_there_is_none(name):
    assert peek_ring(name) is None
    assert peek_weights(name) is None


def test_a_segment_of_the_other_kind_or_damaged_is_none(ring, segment):
    assert peek_ring(segment.name) is None
    assert peek_weights(ring.name) is None
    with open(f"{SHM_DIR}/{ring.name}", "r+b") as file:
        file.write(b"\xff" * 64)
    assert peek_ring(ring.name) is None
    os.truncate(f"{SHM_DIR}/{segment.name}", 100)
    assert peek_weights(segment.name) is None


def test_engines_live_and_dead_are_seen_and_nothing_is_changed(tmp_path, ring, segment):
    names = {"ring": ring.name, "weights": segment.name}
    write_manifest(tmp_path, make_manifest("b", created_unix=2.0, **names))
    write_manifest(tmp_path, make_manifest("a", pid_start=1, created_unix=1.0))
    (tmp_path / "engine-bad.json").write_text("[]")
    tmp_path.chmod(0o755)
    dead, live = look_at_engines(tmp_path)
    assert dead[1] is None
    assert dead[2]["alive"] is False
    assert dead[2]["ring_capacity_bytes"] is None
    assert dead[2]["published_version"] is None
    assert live[0] == ring.name
    assert live[1] == ring.stats()
    assert live[2]["alive"]
    assert live[2]["ring_capacity_bytes"] == 1 << 16
    assert live[2]["published_version"] == 0
    assert tmp_path.stat().st_mode & 0o777 == 0o755
    assert look_at_engines(tmp_path / "none") == []


def test_rows_per_second_come_from_the_ring(tmp_path, ring):
    write_manifest(tmp_path, make_manifest(ring=ring.name))
    sampler = Sampler(tmp_path, [])
    sampler.take()
    for seed in range(5):
        ring.try_write(make_record(make_spec(), seed))
    sampler.take()
    first, last = sampler.history
    (found,) = make_picture(sampler.history, "")["engines"]
    assert found["rows_per_s"] == pytest.approx(20 / (last.t_s - first.t_s))
    assert found["dropped_rows_per_s"] == 0
    assert found["target"] == "t"


def test_trainers_newest_first_and_damaged_files_passed_over(tmp_path):
    write_status(tmp_path, "old", updated_unix=1.0)
    write_status(tmp_path, "new")
    (tmp_path / "trainer-x.json").write_text("{")
    (tmp_path / "trainer-y.json").write_text("[1]")
    (tmp_path / "trainer-z.json").write_text(json.dumps({"updated_unix": "soon"}))
    assert [look["name"] for look in look_at_trainers(tmp_path)] == ["new", "old"]


def test_old_samples_are_dropped(tmp_path, monkeypatch):
    from vllm_tide.top import collect

    now = 0.0
    monkeypatch.setattr(collect.time, "monotonic", lambda: now)
    sampler = Sampler(tmp_path, [])
    for _ in range(50):
        now += 2.0
        sampler.take()
    times = [sample.t_s for sample in sampler.history]
    assert times[-1] - times[0] == collect.WINDOW_S


@pytest.mark.parametrize("when", [1e300, -1e300, 10**400])
def test_a_time_that_is_none_is_no_end(tmp_path, when):
    def shown(**changed):
        write_status(tmp_path, **{"updated_unix": time.time(), **changed})
        sampler = Sampler(tmp_path, [])
        sampler.take()
        return plain(make_picture(sampler.history, str(tmp_path)), 80)

    assert ", last 0:00:0" in shown(last_publish_unix=time.time() - 1)
    told = shown(last_publish_unix=when)
    assert "training, 1 engine" in told and ", last " not in told
    ended = "1 status files of ended trainers not shown"
    told = shown(updated_unix=when)  # of the future is as of now
    assert (ended if when < 0 else "seen 0:00:00 ago") in told
