"""Many engines feed one trainer: shares, joining, failures, drafts."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.transport.feed_toys import (
    FakeFeed,
    FakeSource,
    feeds_of,
    publish,
    rows,
    scan,
)
from tests.transport.samples import make_spec
from tests.transport.spool_toys import head_tensors
from vllm_tide.transport import TransportError
from vllm_tide.transport.feeds import SHARE_ROWS, Feeds, NoStepLeft
from vllm_tide.transport.ring import Collect
from vllm_tide.transport.versions import first_version

# Fair shares


def test_busy_engines_share_rows_equally_to_within_a_record_per_read():
    small, large = FakeFeed("small", [5] * 5000), FakeFeed("large", [60] * 500)
    feeds, _ = feeds_of(small, large)
    total = Counter()
    for _ in range(20):
        total.update(rows(feeds.read(limit=10_000, max_rows=2000)))
    num_reads = 20 * 2000 / (2 * SHARE_ROWS)
    assert 0 <= sum(total.values()) - 20 * 2000 <= 20 * 60
    assert abs(total["small"] - total["large"]) <= num_reads * 60
    # The rows that an engine does not use go to the others.
    feeds, _ = feeds_of(FakeFeed("idle", [10] * 3), FakeFeed("busy", [10] * 1000))
    counts = rows(feeds.read(limit=10_000, max_rows=5000))
    assert counts["idle"] == 30
    assert 4970 <= counts["busy"] <= 5000 + 10


def test_a_record_larger_than_a_share_takes_one_read_and_no_engine_starves():
    small, large = FakeFeed("small", [1] * 5000), FakeFeed("large", [9000] * 9)
    feeds, _ = feeds_of(small, large)
    total = Counter()
    for _ in range(8):
        total.update(rows(feeds.read(limit=10_000, max_rows=2 * SHARE_ROWS)))
    assert total["small"] >= 4 * SHARE_ROWS
    assert total["large"] >= 4 * 9000


def test_the_next_call_continues_with_the_next_engine():
    sizes = [SHARE_ROWS + number for number in range(100)]
    feeds, _ = feeds_of(*(FakeFeed(name, sizes) for name in "abc"))
    seen = {name: [] for name in "abc"}
    for _ in range(30):  # one record a call: no engine may starve
        for name, records in feeds.read(limit=1):
            seen[name] += [record.num_rows for record in records]
    assert seen == dict.fromkeys("abc", sizes[:10])


# Joining and failing


@pytest.mark.parametrize("call", ["read", "heartbeat", "alive"])
def test_a_failing_feed_is_dropped_and_the_others_continue(call):
    good, bad = FakeFeed("good", [1] * 10), FakeFeed("bad", [1] * 10)
    feeds, source = feeds_of(good, bad)
    bad.fail = call
    counts = rows(feeds.read())
    feeds.heartbeat()
    changes = feeds.poll()
    assert counts["good"] == 10
    assert good.beats == 1
    assert changes.left == {"bad": f"bad cannot {call}"}
    assert feeds.ids == ["good"]
    assert bad.closed
    assert feeds.poll().left == {}
    bad.fail = ""
    scan(feeds)
    assert feeds.ids == ["good"]  # not at once
    feeds._retry_at.clear()
    assert scan(feeds).joined == ("bad",)
    assert source.opened == {"good": 1, "bad": 2}


def test_a_dead_engine_is_dropped_and_its_files_are_removed():
    a, b = FakeFeed("a"), FakeFeed("b")
    feeds, source = feeds_of(a, b)
    a.dead = True
    changes = feeds.poll()
    assert changes.left == {"a": "its process has exited"}
    assert source.buried == ["a"]
    assert feeds.reference is b
    b.dead = True
    feeds.poll()
    assert len(feeds) == 0
    assert feeds.reference is None


def test_an_engine_with_another_target_or_shape_is_refused_with_a_log_line(caplog):
    a, b, c = FakeFeed("a"), FakeFeed("b"), FakeFeed("c")
    c.spec = make_spec(hidden_size=16)
    source = FakeSource(c, b, a)
    source.others = {"b"}
    feeds = Feeds([source])
    for _ in range(3):
        scan(feeds)
        feeds._retry_at.clear()
    assert feeds.ids == ["a"]  # the newest decides
    assert "serves another target than engine a" in feeds.refused["b"]
    assert "different shape" in feeds.refused["c"]
    assert source.opened["b"] == 0 and c.closed
    assert sum("cannot join" in r.message for r in caplog.records) == 2


def test_an_engine_that_cannot_be_opened_is_retried(caplog):
    a, b = FakeFeed("a"), FakeFeed("b")
    b.fail = "open"
    feeds, source = feeds_of(a, b)
    scan(feeds)
    assert source.opened["b"] == 1
    assert feeds.refused == {"b": "b cannot open"}
    feeds._retry_at.clear()
    b.fail = ""
    assert scan(feeds).joined == ("b",)
    assert feeds.refused == {}


def test_a_joining_engine_receives_the_collect_mode():
    a, b = FakeFeed("a"), FakeFeed("b")
    feeds, source = feeds_of(a)
    feeds.set_collect(Collect.METADATA)
    source.feeds["b"] = b
    scan(feeds)
    assert (a.collect, b.collect) == (Collect.METADATA, Collect.METADATA)
    feeds.set_collect(Collect.FULL)
    assert (a.collect, b.collect) == (Collect.FULL, Collect.FULL)


# Drafts


def test_a_draft_goes_to_all_engines_and_to_later_ones():
    a, b, c = FakeFeed("a"), FakeFeed("b", latest=4), FakeFeed("c")
    feeds, source = feeds_of(a, b)
    assert publish(feeds) == 5
    assert list(a.sent) == list(b.sent) == ["5"]
    assert a.sent["5"] is b.sent["5"]  # encoded once
    source.feeds["c"] = c
    scan(feeds)
    assert list(c.sent) == ["5"]
    assert publish(feeds) == 6
    assert list(c.sent) == ["5", "6"]
    b.fail = "alive"  # it returns, and still has what it was sent
    feeds.poll()
    b.fail = ""
    feeds._retry_at.clear()
    scan(feeds)
    assert list(b.sent) == ["5", "6"] and not feeds.needs_new_number


def test_an_engine_with_higher_versions_requires_a_new_number_for_all():
    a, b = FakeFeed("a"), FakeFeed("b", latest=9)
    feeds, source = feeds_of(a)
    assert publish(feeds) == 1
    source.feeds["b"] = b
    scan(feeds)
    assert b.sent == {} and feeds.needs_new_number
    assert publish(feeds) == 10
    assert list(a.sent) == ["1", "10"] and list(b.sent) == ["10"]
    assert not feeds.needs_new_number


def test_a_draft_that_one_engine_cannot_take_goes_to_the_others():
    a, b, c = FakeFeed("a", [1]), FakeFeed("b"), FakeFeed("c")
    feeds, source = feeds_of(a, b)
    a.fail = "publish"
    assert publish(feeds) == 1
    assert list(b.sent) == ["1"]
    assert feeds.failed_publications == 1
    assert feeds.ids == ["b", "a"]  # it still feeds
    b.fail = "publish"
    with pytest.raises(TransportError, match="cannot publish"):
        publish(feeds)
    source.feeds["c"] = c  # it is not sent what no engine received
    scan(feeds)
    assert list(c.sent) == ["1"]


def test_after_a_restart_the_newest_accepted_draft_goes_to_all():
    a, b, c = FakeFeed("a", latest=3), FakeFeed("b", latest=7), FakeFeed("c", latest=5)
    b.refused = b.latest_version
    feeds, _ = feeds_of(a, b, c)
    latest = feeds.latest()
    assert latest.version == first_version(5)
    assert list(a.sent) == ["5"]
    assert (b.sent, c.sent) == ({}, {})
    assert not feeds.needs_new_number
    assert publish(feeds) == 8


# Steps over a draft


def test_a_fast_draft_is_a_step_over_its_base():
    a, b, c = FakeFeed("a"), FakeFeed("b"), FakeFeed("c")
    feeds, source = feeds_of(a, b, c)
    base = publish(feeds)
    a.installed = b.installed = first_version(base)  # and c has not installed it
    assert feeds.send_step(["a"], head_tensors(2), number=base, fast=True) == ["a"]
    both = {"number": base, "fast": True}
    assert feeds.send_step(["a", "b"], head_tensors(2), **both) == ["a", "b"]
    assert list(a.sent) == ["1", "1.1", "1.3"] and list(b.sent) == ["1", "1.3"]
    states = feeds.versions()
    assert [states[n].adaptation for n in "abc"] == ["sent", "sent", ""]
    assert [states[n].published for n in "abc"] == [1, 1, 1]
    a.installed, b.refused = a.latest_version, b.latest_version
    states = feeds.versions()
    assert [states[n].adaptation for n in "abc"] == ["served", "refused", ""]
    assert [states[n].installed for n in "ab"] == [1, 1]
    assert states["b"].refused == 0  # it is no refusal of the base
    feeds.send_step(["a"], head_tensors(1), number=base, fast=False)
    assert list(a.sent)[-1] == "1.4"
    assert feeds.versions()["a"].adaptation == ""
    a.refused = a.latest_version
    assert feeds.versions()["a"].adaptation == "served"
    a.installed, a.refused = a.latest_version, 0
    assert feeds.versions()["a"].adaptation == ""
    # An engine that joins gets the base.
    source.feeds["d"] = FakeFeed("d")
    scan(feeds)
    assert list(source.feeds["d"].sent) == ["1"]
    assert publish(feeds) == 2


def test_a_step_that_an_engine_would_refuse_needs_a_new_number():
    a, b = FakeFeed("a"), FakeFeed("b")
    feeds, _ = feeds_of(a, b)
    assert (publish(feeds), publish(feeds)) == (1, 2)
    with pytest.raises(NoStepLeft):  # the newer one was refused, for example
        feeds.send_step(["a"], head_tensors(1), number=1, fast=True)
    # One even step is left to replace the last fast draft.
    b.latest_version = first_version(3) - 3
    with pytest.raises(NoStepLeft):
        feeds.send_step(["b"], head_tensors(1), number=2, fast=True)
    feeds.send_step(["b"], head_tensors(1), number=2, fast=False)
    with pytest.raises(NoStepLeft):
        feeds.send_step(["b"], head_tensors(1), number=2, fast=False)
    a.fail = "publish"
    with pytest.raises(TransportError, match="engine a: a cannot publish"):
        feeds.send_step(["a"], head_tensors(1), number=2, fast=True)
