"""Readings of real servers, rings, segments and files change none of them."""

import pytest

from tests.top.page_server import serve_page
from tests.top.samples import page_text, write_status
from tests.transport.samples import (
    make_record,
    make_spec,
    write_dead_manifest,
    write_record,
)
from tests.transport.test_rendezvous import make_manifest
from vllm_tide.top import collect
from vllm_tide.top.collect import (
    Sampler,
    fetch,
    parse_address,
    parse_page,
    read_engines,
    read_trainers,
)
from vllm_tide.transport import RingReader, RingWriter, WeightsSegment, WeightsWriter
from vllm_tide.transport.draft_weights import DraftWeights
from vllm_tide.transport.rendezvous import write_manifest
from vllm_tide.transport.ring import peek_ring
from vllm_tide.transport.versions import first_version
from vllm_tide.transport.weights import peek_weights


def test_addresses():
    for text, url in (
        ("localhost:8000", "http://localhost:8000"),
        ("http://localhost:8000/metrics", "http://localhost:8000"),
        ("https://host/prefix/", "https://host/prefix"),
        ("http://user:secret@host", "http://host"),
        ("[::1]:8000", "http://[::1]:8000"),
    ):
        assert parse_address(text) == url
    for text in ("ftp://host", "http://", "host:port", ""):
        with pytest.raises(ValueError):
            parse_address(text)


def test_a_page_is_read_over_http():
    with serve_page(page_text()) as server:
        page = fetch(parse_address(server.url))
        server.text = None
        assert fetch(server.url) == "answers 503 Service Unavailable"
        url = server.url
    assert fetch(url) == "does not answer (Connection refused)"
    assert page.value("vllm:num_requests_running") == 4
    reasons = page.by_label("vllm_tide:steps_without_drafts_total", "reason")
    assert reasons == {"no_gain": 90, "slo": 10}
    assert page.models() == ["demo"]
    for text in ("", "<html></html>", "vllm_tide:x{ 1\n"):
        assert "without metrics" in parse_page(text, 0.0)


def test_values_are_summed_over_engines():
    text = (
        "# TYPE vllm:num_requests_running gauge\n"
        'vllm:num_requests_running{model_name="a \\"b\\", c{d}"} 1\n'
        'vllm:num_requests_running{engine="1"} 2\n'
        "# TYPE vllm_tide:time_model_error_ratio gauge\n"
        "vllm_tide:time_model_error_ratio NaN\n"
        "# TYPE other gauge\nother 3\n"
    )
    page = parse_page(text, 0.0)
    assert page.value("vllm:num_requests_running") == 3
    assert page.value("vllm:num_requests_running", max) == 2
    assert page.value("vllm_tide:time_model_error_ratio") is None
    assert page.value("other") is None
    assert page.models() == ['a "b", c{d}']


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


def test_a_ring_is_read_without_claiming_it(ring):
    for seed in range(400):
        write_record(ring, make_record(make_spec(), seed))
    stats = peek_ring(ring.name)
    assert stats == ring.stats()
    assert stats.dropped_rows > 0
    assert not stats.consumer_alive
    reader = RingReader.attach(ring.name)  # still free
    try:
        assert peek_ring(ring.name).consumer_alive
    finally:
        reader.close()
    assert not peek_ring(ring.name).consumer_alive


def test_live_and_dead_engines_are_read_and_nothing_is_changed(tmp_path, ring, segment):
    for seed in range(5):
        write_record(ring, make_record(make_spec(), seed))
    writer = WeightsWriter.attach(segment.name)
    tensors = {"a": ("float32", (2,), bytes(8))}
    writer.publish(DraftWeights.encode(tensors, first_version(3)))
    segment.report(first_version(2), first_version(3), "norm", 10.9)
    assert peek_weights(segment.name).feedback == writer.feedback()
    writer.close()
    names = {"ring": ring.name, "weights": segment.name}
    names["draft_path"] = "/home/u/.cache/vllm_tide/fresh/2f07064cd9fb2c5c"
    names["tide"] = {"spool": {"url": "file:///s"}}
    write_manifest(tmp_path, make_manifest("b", created_unix=2.0, **names))
    write_dead_manifest(tmp_path, "a", created_unix=1.0)
    (tmp_path / "engine-bad.json").write_text("[]")
    tmp_path.chmod(0o755)
    dead, live = read_engines(tmp_path)
    assert dead["alive"] is False
    assert dead["ring_capacity_bytes"] is dead["published_version"] is None
    assert live["alive"] and live["draft"] == "fresh"
    assert live["ring_capacity_bytes"] == 1 << 16
    assert live["spool"] and not dead["spool"]
    assert (live["written_rows"], live["dropped_rows"]) == (20, 0)
    assert (live["published_version"], live["target"]) == (3, "t")
    assert (live["installed_version"], live["refused_reason"]) == (2, "norm")
    assert tmp_path.stat().st_mode & 0o777 == 0o755
    assert read_engines(tmp_path / "none") == []


def test_trainers_are_newest_first_without_old_and_damaged_files(tmp_path):
    write_status(tmp_path, "before", updated_unix=collect.time.time() - 60)
    write_status(tmp_path, "new")
    write_status(tmp_path, "old", updated_unix=1.0)
    just_now = collect.time.time() - 1
    write_status(tmp_path, "over", state="stopped", updated_unix=just_now, engines={})
    write_status(tmp_path, "damaged", canary=[1], last_publish_unix=10**400)
    for name, text in (("x", "{"), ("y", "[1]"), ("z", '{"updated_unix": "soon"}')):
        (tmp_path / f"trainer-{name}.json").write_text(text)
    assert [each["name"] for each in read_trainers(tmp_path, [])] == ["new", "over"]
    trainers = read_trainers(tmp_path, ["e1"])
    assert [trainer["name"] for trainer in trainers] == ["new", "before"]
    assert [trainer["silent"] for trainer in trainers] == [False, True]
    assert trainers[0]["seconds_since_publish"] == pytest.approx(32, abs=10)
    assert trainers[0]["speed_change"] == 0.08


def test_old_samples_are_dropped(tmp_path, monkeypatch):
    now = 0.0
    monkeypatch.setattr(collect.time, "monotonic", lambda: now)
    sampler = Sampler(tmp_path, [])
    for _ in range(50):
        now += 2.0
        sampler.take()
    times = [sample.t_s for sample in sampler.history]
    assert times[-1] - times[0] == collect.WINDOW_S
