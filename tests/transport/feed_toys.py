"""Feeds and feed sources made of lists."""

from __future__ import annotations

from collections import Counter, deque
from types import SimpleNamespace

from tests.transport.samples import make_metadata_only, make_spec
from tests.transport.spool_toys import (
    head_tensors,
)
from vllm_tide.transport import TransportError
from vllm_tide.transport.draft_weights import DraftWeights
from vllm_tide.transport.feeds import (
    Feeds,
)
from vllm_tide.transport.versions import first_version, version_name
from vllm_tide.transport.weights import WeightsFeedback

SPEC = make_spec()


class FakeFeed:
    """A feed of rows only; `fail` makes the next call of that name raise.

    Attributes:
        sent: Drafts by name of the version.
    """

    def __init__(self, name, sizes=(), latest=0):
        self.id, self.latest_version = name, first_version(latest)
        tide = {"test_time": {"adapt": "shared"}}
        self.manifest = SimpleNamespace(tenant_key_id="", tide=tide)
        self.queue = deque(make_metadata_only(SPEC, num_rows=size) for size in sizes)
        self.spec = SPEC
        self.sent, self.fail, self.dead = {}, "", False
        self.collect, self.closed, self.beats = None, False, 0
        self.installed = self.refused = 0
        self.reason = ""

    def _check(self, name):
        if self.fail == name:
            raise TransportError(f"{self.id} cannot {name}")

    def models(self):
        self._check("models")

    def read(self, limit, max_rows=None):
        self._check("read")
        out, rows = [], 0
        while self.queue and len(out) < limit and (max_rows is None or rows < max_rows):
            out.append(self.queue.popleft())
            rows += out[-1].num_rows
        return out

    def heartbeat(self):
        self._check("heartbeat")
        self.beats += 1

    def alive(self):
        self._check("alive")
        return not self.dead

    def feedback(self):
        return WeightsFeedback(
            self.installed, self.refused, self.reason, not self.dead, 0.5
        )

    def publish(self, weights):
        self._check("publish")
        assert weights.version > self.latest_version
        self.latest_version = weights.version
        self.sent[version_name(weights.version)] = weights

    def latest(self):
        if not self.latest_version:
            return None
        return DraftWeights.encode(head_tensors(1), self.latest_version)

    def set_collect(self, mode):
        self.collect = mode

    def stats(self):
        return {}

    def close(self):
        self.closed = True


class FakeSource:
    """A source of engines that a test adds; `others` have another target."""

    def __init__(self, *feeds):
        self.feeds = {feed.id: feed for feed in feeds}
        self.others, self.buried, self.opened = set(), [], Counter()

    def find(self):
        return [name for name, feed in self.feeds.items() if not feed.dead]

    def identity(self, engine_id):
        return {"target": "other" if engine_id in self.others else "same"}

    def open(self, engine_id):
        self.opened[engine_id] += 1
        self.feeds[engine_id]._check("open")
        return self.feeds[engine_id]

    def gone(self, engine_id):
        self.buried.append(engine_id)

    def close(self):
        pass


def feeds_of(*fakes):
    source = FakeSource(*fakes)
    feeds = Feeds([source])
    feeds.poll()
    return feeds, source


def scan(feeds):
    """Scan for engines now instead of after a second."""
    feeds._next_scan = 0.0
    return feeds.poll()


def rows(batches):
    return {name: sum(r.num_rows for r in records) for name, records in batches}


def publish(feeds, value=1):
    return feeds.publish(head_tensors(value), {})
