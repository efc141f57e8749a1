"""A fast draft and its engines: which take part, under which versions."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from tests.deploy.test_adaptation import ADAPT
from tests.deploy.test_fast_draft import Stream
from tests.train.toys import toy_trainer
from tests.transport.feed_toys import FakeFeed, feeds_of, publish
from vllm_tide.config import ConfigError, parse_tide
from vllm_tide.deploy.fast_draft import FastDraft
from vllm_tide.transport.versions import first_version


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


def test_only_engines_with_the_base_take_part():
    a, b, c = FakeFeed("a"), FakeFeed("b"), FakeFeed("c")
    feeds, _ = feeds_of(a, b, c)
    assert publish(feeds) == 1
    a.installed = c.refused = first_version(1)  # and b has not installed it yet
    trainer = Trainer(feeds, published=1)
    trainer.until(lambda: trainer.messages)
    assert trainer.messages == ["adapted"]
    assert [len(feed.sent) for feed in (a, b, c)] == [2, 1, 1]
    install(a)
    b.installed = first_version(1)
    trainer.until(lambda: len(b.sent) == 2)
    assert [len(feed.sent) for feed in (a, b, c)] == [3, 2, 1]
    b.installed, b.refused = first_version(1), b.latest_version
    trainer.fast.tick(math.inf, paused=False)
    assert trainer.messages == ["adapted", "given_back"] and trainer.fast.draft is None
    assert [len(feed.sent) for feed in (a, b, c)] == [4, 3, 1]


def test_an_engine_that_refuses_the_next_base_gets_no_older_one():
    a, b = FakeFeed("a"), FakeFeed("b")
    feeds, _ = feeds_of(a, b)
    trainer = Trainer(feeds)
    trainer.until(lambda: b.sent)
    install(a), install(b)
    trainer.deployment.published = publish(feeds)
    install(a)
    b.refused = b.latest_version
    for _ in range(3):
        trainer.fast.tick(math.inf, paused=True)
    assert list(a.sent) == list(b.sent) == ["0.1", "1"]


@pytest.mark.parametrize(
    ("section", "knob", "value"),
    [
        ("capture", "enabled", False),
        ("capture", "consent", "off"),
        ("swap", "enabled", False),
        ("spool", "url", "/s"),
        ("schedule", "mode", "tide"),
    ],
)
def test_sections_that_exclude_a_fast_draft_are_refused(section, knob, value):
    more = {section: {knob: value}}
    sentence = rf"tide\.test_time\.adapt: 'shared' .*tide\.{section}\..*{knob}.*'off'\."
    with pytest.raises(ConfigError, match=sentence):
        parse_tide({"test_time": {"adapt": "shared"}, **more})
    assert parse_tide(more).test_time.adapt == "off"
