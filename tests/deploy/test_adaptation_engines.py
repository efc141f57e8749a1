"""A fast draft and its engines: which take part, under which versions."""

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


class Trainer:
    """A fast draft of three open requests, and its events."""

    def __init__(self, feeds, published: int = 0) -> None:
        self.trainer, self.messages = toy_trainer(0), []
        self.deployment = SimpleNamespace(published=published)
        self.fast = FastDraft(
            parse_tide({"test_time": ADAPT}),
            self.trainer,
            feeds,
            self.deployment,
            lambda event, **_: self.messages.append(event),
        )
        self.streams = [Stream(key, key) for key in range(3)]
        self.trainer.add_records([s.prefill() for s in self.streams], 0.0)

    def until(self, done) -> None:
        """Serve and learn."""
        for _ in range(300):
            self.trainer.add_records([s.verify() for s in self.streams], 0.0)
            self.fast.tick(math.inf, paused=False)
            if done():
                return
        raise AssertionError("nothing was sent")


def install(feed: FakeFeed) -> None:
    feed.installed = feed.latest_version


def meta(fast: bool) -> dict:
    return {"adaptation": {"fast": fast}}


def test_only_engines_with_the_base_take_part():
    a, b, c = FakeFeed("a"), FakeFeed("b"), FakeFeed("c")
    feeds, _ = feeds_of(a, b, c)
    assert publish(feeds) == 1
    a.installed = 1  # b has not installed it yet, and c refuses it
    c.refused = 1
    trainer = Trainer(feeds, published=1)
    trainer.until(lambda: trainer.messages)
    assert trainer.messages == ["adapted"]
    assert [len(feed.sent) for feed in (a, b, c)] == [2, 1, 1]
    install(a)
    b.installed = 1  # now it is installed
    trainer.until(lambda: len(b.sent) == 2)
    assert [len(feed.sent) for feed in (a, b, c)] == [3, 2, 1]
    b.installed, b.refused = 1, b.latest_version
    trainer.fast.tick(math.inf, paused=False)
    assert trainer.messages == ["adapted", "given_back"] and trainer.fast.draft is None
    assert [len(feed.sent) for feed in (a, b, c)] == [4, 3, 1]


def test_an_engine_of_another_base_keeps_its_draft_and_blocks_nothing():
    """Its weights differ, though no draft was ever published."""
    a, b = FakeFeed("a"), FakeFeed("b")
    feeds, _ = feeds_of(a, b)
    trainer = Trainer(feeds)
    trainer.until(lambda: a.sent)
    install(a)
    b.refused, b.reason = b.latest_version, "base"
    trainer.until(lambda: len(a.sent) == 2)
    install(a)
    trainer.fast.drop("purged")
    for _ in range(5):
        trainer.fast.tick(math.inf, paused=True)
    assert trainer.messages == ["adapted", "given_back"]
    assert len(a.sent) == 3 and len(b.sent) == 1


def test_an_engine_that_refuses_the_next_base_gets_its_old_one_back():
    a, b = FakeFeed("a"), FakeFeed("b")
    feeds, _ = feeds_of(a, b)
    trainer = Trainer(feeds)
    trainer.until(lambda: b.sent)
    install(a), install(b)
    trainer.deployment.published = publish(feeds)
    trainer.fast.tick(math.inf, paused=True)  # it is in flight to both
    assert len(a.sent) == len(b.sent) == 2
    install(a)
    b.refused, b.reason = b.latest_version, "norm"
    trainer.fast.tick(math.inf, paused=True)
    # No change of its draft: its own base, under the version that it has.
    assert len(a.sent) == 2 and b.sent[b.latest_version] == {}
    install(b)
    trainer.fast.tick(math.inf, paused=True)
    assert len(b.sent) == 3 and feeds.versions()["b"].installed == 0


def test_versions_of_a_fast_draft_are_its_bases():
    a, b, c = FakeFeed("a"), FakeFeed("b", latest=30), FakeFeed("c")
    feeds, source = feeds_of(a, b, c)
    assert publish(feeds) == 31
    feeds._numbers.clear()
    a.installed = b.installed = 31  # and c has not installed it
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
    # An engine that joins gets the base, and a later draft is newer than all of them.
    source.feeds["d"] = FakeFeed("d")
    feeds._next_scan = 0.0
    feeds.poll()
    assert set(source.feeds["d"].sent) == {31}
    assert publish(feeds) == 35


@pytest.mark.parametrize(
    ("section", "knob", "value"),
    [
        ("capture", "enabled", False),
        ("capture", "consent", "off"),
        ("swap", "enabled", False),
        ("spool", "url", "s"),
        ("schedule", "mode", "tide"),
    ],
)
def test_sections_that_exclude_a_fast_draft_are_refused(section, knob, value):
    more = {section: {knob: value}}
    sentence = rf"tide\.test_time\.adapt: 'shared' .*tide\.{section}\..*{knob}.*'off'\."
    with pytest.raises(ConfigError, match=sentence):
        parse_tide({"test_time": {"adapt": "shared"}, **more})
    assert parse_tide(more).test_time.adapt == "off"
