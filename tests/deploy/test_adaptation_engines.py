"""A fast draft and its engines: who has a part in it, under which versions."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from tests.deploy.test_adaptation import ADAPT
from tests.deploy.test_fast_draft import Stream
from tests.train.toys import toy_trainer
from tests.transport.feed_toys import FakeFeed, feeds_of, publish
from tests.transport.spool_toys import head_tensors
from vllm_tide.config import ConfigError, parse_tide
from vllm_tide.deploy.fast_draft import FastDraft


def meta(fast: bool) -> dict:
    return {"adaptation": {"fast": fast}}


def test_only_engines_that_hold_the_base_have_a_part_in_it():
    a, b, c = FakeFeed("a"), FakeFeed("b"), FakeFeed("c")
    feeds, _ = feeds_of(a, b, c)
    assert publish(feeds) == 1
    a.installed = 1  # b has not come to it, and c refuses it
    c.refused = 1
    trainer, said = toy_trainer(0), []

    def report(event: str, **facts: object) -> None:
        said.append(event)

    deployment = SimpleNamespace(published=1)
    tide = parse_tide({"test_time": ADAPT})
    fast = FastDraft(tide, trainer, feeds, deployment, report)
    streams = [Stream(key, key) for key in range(3)]
    trainer.add_records([stream.prefill() for stream in streams], 0.0)
    for _ in range(200):
        trainer.add_records([stream.verify() for stream in streams], 0.0)
        fast.tick(math.inf, paused=False)
        if said:
            break
    assert said == ["adapted"]
    assert [len(feed.sent) for feed in (a, b, c)] == [2, 1, 1]
    a.installed = a.latest_version
    b.installed = 1  # now it has come to it
    for _ in range(20):
        trainer.add_records([stream.verify() for stream in streams], 0.0)
        fast.tick(math.inf, paused=False)
    assert [len(feed.sent) for feed in (a, b, c)] == [3, 2, 1]
    b.installed, b.refused = 1, b.latest_version
    fast.tick(math.inf, paused=False)
    assert said == ["adapted", "given_back"] and fast.draft is None
    assert [len(feed.sent) for feed in (a, b, c)] == [4, 3, 1]


def test_an_engine_of_another_base_keeps_its_own_draft_and_stops_nobody():
    """Its weights differ, though no draft was ever published."""
    a, b = FakeFeed("a"), FakeFeed("b")
    feeds, _ = feeds_of(a, b)
    trainer, said = toy_trainer(0), []

    def report(event: str, **facts: object) -> None:
        said.append(event)

    tide = parse_tide({"test_time": ADAPT})
    fast = FastDraft(tide, trainer, feeds, SimpleNamespace(published=0), report)
    streams = [Stream(key, key) for key in range(3)]
    trainer.add_records([stream.prefill() for stream in streams], 0.0)

    def go_on(least: int) -> None:
        for _ in range(300):
            trainer.add_records([stream.verify() for stream in streams], 0.0)
            fast.tick(math.inf, paused=False)
            if len(a.sent) >= least:
                return
        raise AssertionError("nothing was sent")

    go_on(1)
    a.installed = a.latest_version
    b.refused, b.reason = b.latest_version, "base"
    go_on(2)
    a.installed = a.latest_version
    fast.drop("purged")
    for _ in range(5):
        fast.tick(math.inf, paused=True)
    assert said == ["adapted", "given_back"]
    assert len(a.sent) == 3 and len(b.sent) == 1


def test_an_engine_that_refuses_the_next_base_is_given_back_the_one_it_holds():
    a, b = FakeFeed("a"), FakeFeed("b")
    feeds, _ = feeds_of(a, b)
    trainer, deployment = toy_trainer(0), SimpleNamespace(published=0)
    tide = parse_tide({"test_time": ADAPT})
    fast = FastDraft(tide, trainer, feeds, deployment, lambda *_, **__: None)
    streams = [Stream(key, key) for key in range(3)]
    trainer.add_records([stream.prefill() for stream in streams], 0.0)
    for _ in range(300):
        trainer.add_records([stream.verify() for stream in streams], 0.0)
        fast.tick(math.inf, paused=False)
        if b.sent:
            break
    a.installed, b.installed = a.latest_version, b.latest_version
    deployment.published = publish(feeds)
    fast.tick(math.inf, paused=True)  # it is on its way to both
    assert len(a.sent) == len(b.sent) == 2
    a.installed = a.latest_version
    b.refused, b.reason = b.latest_version, "norm"
    fast.tick(math.inf, paused=True)
    # No change of what it holds: its own base, by the name that it knows.
    assert len(a.sent) == 2 and b.sent[b.latest_version] == {}
    b.installed = b.latest_version
    fast.tick(math.inf, paused=True)
    assert len(b.sent) == 3 and feeds.versions()["b"].installed == 0


def test_versions_of_a_fast_draft_are_its_bases():
    a, b, c = FakeFeed("a"), FakeFeed("b", latest=30), FakeFeed("c")
    feeds, source = feeds_of(a, b, c)
    assert publish(feeds) == 31
    feeds._numbers.clear()
    a.installed = b.installed = 31  # and c has not come to it
    for name in "ab":
        feeds.send_fast(name, head_tensors(2), meta(True), base=31)
    assert set(a.sent) == {31, 32} and set(b.sent) == {31, 33} and set(c.sent) == {31}
    states = feeds.versions()
    assert [states[n].adaptation for n in "abc"] == ["sent", "sent", ""]
    assert [states[n].published for n in "abc"] == [31, 31, 31]
    a.installed, b.refused = 32, 33
    states = feeds.versions()
    assert [states[n].adaptation for n in "abc"] == ["served", "refused", ""]
    assert [states[n].installed for n in "ab"] == [31, 31]
    assert states["b"].refused == 0  # it is no refusal of the base
    assert feeds.number_of("a", 32) == feeds.number_of("b", 33) == 31
    feeds.send_fast("a", head_tensors(1), meta(False), base=31)
    assert feeds.versions()["a"].adaptation == ""
    a.refused = 34
    assert feeds.versions()["a"].adaptation == "served"
    a.installed, a.refused = 34, 0
    assert feeds.versions()["a"].adaptation == ""
    # An engine that joins gets the base, and a later head is newer than all of them.
    source.feeds["d"] = FakeFeed("d")
    feeds._next_look = 0.0
    feeds.poll()
    assert set(source.feeds["d"].sent) == {31}
    assert publish(feeds) == 35


def test_memory_of_versions_is_bounded(monkeypatch):
    monkeypatch.setattr("vllm_tide.transport.feeds.FAST_KEPT", 8)
    a = FakeFeed("a")
    feeds, _ = feeds_of(a)
    for _ in range(50):
        feeds.send_fast("a", head_tensors(2), meta(True), base=0)
        a.installed = a.latest_version
    assert len(feeds._fast["a"]) == len(feeds._numbers["a"]) == 8
    assert feeds.number_of("a", a.installed) == 0


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (
            {"capture": {"enabled": False}},
            "tide.test_time.adapt: 'shared' trains on rows of running requests, of "
            "which none is captured; set tide.capture.enabled to true, or set "
            "tide.test_time.adapt to 'off'.",
        ),
        (
            {"capture": {"consent": "off"}},
            "tide.test_time.adapt: 'shared' trains on rows of running requests, of "
            "which none is captured; set tide.capture.consent to 'opt_out' or "
            "'opt_in', or set tide.test_time.adapt to 'off'.",
        ),
        (
            {"swap": {"enabled": False}},
            "tide.test_time.adapt: 'shared' swaps drafts; set tide.swap.enabled to "
            "true, or set tide.test_time.adapt to 'off'.",
        ),
        (
            {"spool": {"url": "s"}},
            "tide.test_time.adapt: 'shared' needs rows within a second, and a spool "
            "takes longer; run the trainer on the engine's host and set "
            "tide.spool.url to null, or set tide.test_time.adapt to 'off'.",
        ),
        (
            {"schedule": {"mode": "tide"}},
            "tide.test_time.adapt: 'shared' needs rows at any time, which "
            "tide.schedule.mode 'tide' pauses; set that to 'always', or set "
            "tide.test_time.adapt to 'off'.",
        ),
    ],
)
def test_what_makes_no_sense_together_is_said(more, sentence):
    with pytest.raises(ConfigError) as refused:
        parse_tide({"test_time": {"adapt": "shared"}, **more})
    assert str(refused.value) == sentence
    assert parse_tide(more).test_time.adapt == "off"
