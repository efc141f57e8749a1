"""Segments cut short, without header or name, and what each end makes of it."""

import os
from dataclasses import replace

import pytest

from tests.transport.samples import make_record, make_spec
from tests.transport.test_weights import publish
from vllm_tide.transport import RingWriter, TransportError, WeightsSegment
from vllm_tide.transport import feed as feed_ring
from vllm_tide.transport.feed import RingFeed
from vllm_tide.transport.rendezvous import EngineManifest
from vllm_tide.transport.ring import Collect
from vllm_tide.transport.shm import PAGE_BYTES, SHM_DIR

SPEC = make_spec()


def test_both_ends_notice_that_a_name_is_gone(ring_pair, weights_pair):
    writer, reader = ring_pair(SPEC)
    for end, other in ((writer, reader), weights_pair()):
        assert not end.lost and not other.lost
        os.unlink(f"{SHM_DIR}/{end.name}")
        assert end.lost and other.lost
    # Whoever has it mapped goes on until it is replaced.
    assert writer.try_write(make_record(SPEC, 1))
    assert reader.read().draft_version == 1


def test_rows_that_a_lost_ring_drops_say_so(ring_pair):
    writer, reader = ring_pair(SPEC)
    assert not writer.lost and not reader.lost
    os.truncate(f"{SHM_DIR}/{writer.name}", 100)
    assert not writer.try_write(make_record(SPEC, 1))
    assert writer.lost and reader.lost
    assert writer.dropped_rows == {"truncated": 4}
    writer.close()
    assert writer.lost  # it stays what it was


class Engine:
    """An engine that replaces what it lost, as the worker does."""

    def __init__(self):
        self.made = []
        self.ring, self.weights = self.new_ring(), self.new_weights()
        self.manifest = EngineManifest(
            engine_id="e",
            pid=os.getpid(),
            pid_start=0,
            ring=self.ring.name,
            weights=self.weights.name,
            target_path="",
            draft_path="",
            target_dtype="float32",
            hidden_size=SPEC.hidden_size,
            vocab_size=SPEC.vocab_size,
            draft_vocab_size=SPEC.vocab_size,
            aux_layer_ids=SPEC.aux_layer_ids,
            teacher=SPEC.teacher,
            teacher_topk=SPEC.teacher_topk,
            feature_dtype=SPEC.feature_dtype,
            num_speculative_tokens=3,
            tide={},
            created_unix=0.0,
        )

    def new_ring(self):
        self.made.append(RingWriter.create(SPEC, 1 << 16))
        return self.made[-1]

    def new_weights(self):
        self.made.append(WeightsSegment.create(1 << 16))
        return self.made[-1]

    def replace(self, **names):
        self.manifest = replace(self.manifest, **names)


@pytest.fixture
def engine():
    made = Engine()
    yield made
    for end in made.made:
        end.close()


@pytest.fixture
def feed(engine, monkeypatch):
    monkeypatch.setattr(feed_ring, "LOOK_S", 0.0)
    made = RingFeed(engine.manifest, lambda: engine.manifest)
    yield made
    made.close()


def test_a_feed_follows_its_engine_to_another_ring(engine, feed):
    feed.set_collect(Collect.METADATA)
    os.truncate(f"{SHM_DIR}/{engine.ring.name}", 0)
    feed.heartbeat()
    assert feed.read(8) == [] and feed.alive()
    ring = engine.new_ring()
    engine.replace(ring=ring.name)
    feed.heartbeat()
    assert ring.stats().consumer_alive and ring.wish is Collect.METADATA
    assert ring.try_write(make_record(SPEC, 5))
    assert [record.draft_version for record in feed.read(8)] == [5]


def test_a_feed_follows_its_engine_to_other_weights(engine, feed):
    publish(feed._writer, 1)
    engine.weights.report(1, swap_pause_ms=3.0)
    assert feed.feedback().installed_version == 1
    os.truncate(f"{SHM_DIR}/{engine.weights.name}", PAGE_BYTES)
    assert feed.feedback().installed_version == 1
    with pytest.raises(TransportError, match="truncated"):
        publish(feed._writer, 2)
    weights = engine.new_weights()
    engine.replace(weights=weights.name)
    feed.heartbeat()
    publish(feed._writer, 2)
    assert weights.read().version == 2


def test_an_engine_that_idles_is_waited_for(engine, feed, monkeypatch, caplog):
    os.truncate(f"{SHM_DIR}/{engine.weights.name}", 0)
    monkeypatch.setattr(feed_ring, "LOOK_S", 0.0)
    monkeypatch.setattr(feed_ring, "LOST_S", -1.0)
    for _ in range(3):
        assert not feed.heartbeat()
    assert "makes another with its next step" in caplog.text


def test_a_refused_number_is_not_given_again(engine, feed):
    publish(feed._writer, 1)
    engine.weights.report(1, 2, "sha256")  # 2 was damage: nobody published it
    feed.feedback()
    assert feed.latest_version == 2


def test_a_feed_follows_an_engine_whose_segments_were_unlinked(engine, feed):
    publish(feed._writer, 1)
    engine.weights.report(1)
    for name in (engine.ring.name, engine.weights.name):
        os.unlink(f"{SHM_DIR}/{name}")
    assert not feed.heartbeat()
    assert feed.feedback().installed_version == 1 and feed.alive()
    ring, weights = engine.new_ring(), engine.new_weights()
    engine.replace(ring=ring.name, weights=weights.name)
    assert feed.heartbeat()
    publish(feed._writer, 2)
    assert weights.read().version == 2
    assert ring.try_write(make_record(SPEC, 5))
    assert [record.draft_version for record in feed.read(8)] == [5]


def test_a_restarted_trainer_goes_on_from_the_served_head_where_the_newest_was_refused(
    engine, feed
):
    publish(feed._writer, 1)
    publish(feed._writer, 2)
    engine.weights.report(1, 2, "norm")
    found = feed.latest()
    assert found is not None and found.version == 1


def test_a_feed_says_once_that_a_head_has_to_be_sent_again(engine, feed):
    assert not feed.heartbeat()
    os.truncate(f"{SHM_DIR}/{engine.weights.name}", PAGE_BYTES)
    assert not feed.heartbeat()
    engine.replace(weights=engine.new_weights().name)
    assert feed.heartbeat()
    assert not feed.heartbeat()


def test_a_replacement_that_is_damaged_too_is_not_the_end(engine, feed):
    os.truncate(f"{SHM_DIR}/{engine.ring.name}", 0)
    second = engine.new_ring()
    engine.replace(ring=second.name)
    os.truncate(f"{SHM_DIR}/{second.name}", 0)
    feed.heartbeat()
    third = engine.new_ring()
    engine.replace(ring=third.name)
    feed.heartbeat()
    assert third.stats().consumer_alive
