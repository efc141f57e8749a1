"""Engines without a server: models on disk, ring, weights segment and manifest."""

import json
import time
from functools import partial

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.transport.samples import (
    body_of,
    make_manifest,
    make_record,
    make_spec,
    write_record,
)
from vllm_tide.config import SpoolConfig
from vllm_tide.transport import RingWriter, WeightsSegment, spool_shard
from vllm_tide.transport.feed_spool import SpoolFeed
from vllm_tide.transport.identity import identity_of
from vllm_tide.transport.rendezvous import write_manifest
from vllm_tide.transport.spool import EngineFolder, StoreError
from vllm_tide.transport.spool_models import find_models
from vllm_tide.transport.spool_relay import Relay
from vllm_tide.transport.spool_shard import Bounds, ShardReader, ShardWriter

CONFIG = SpoolConfig()
ROWS = 20


@pytest.fixture(autouse=True, scope="module")
def small_shards():
    """Close shards at 1 MiB or after 10 ms; for a `conftest.py`."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(spool_shard, "SHARD_BYTES", 1 << 20)
        patched.setattr(spool_shard, "SHARD_SECONDS", 0.01)
        yield


SPEC = make_spec()


def make_models(folder, seed=0):
    """Make a target and a draft directory; the target's bytes follow from the seed."""
    rng = np.random.default_rng(seed)
    target, draft = folder / "target", folder / "draft"
    for path, config in ((target, {"vocab_size": ROWS}), (draft, {"layers": 1})):
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(json.dumps(config))
    save_file(
        {
            "model.embed_tokens.weight": rng.random((ROWS, 8), dtype=np.float32),
            "model.layers.0.mlp.weight": rng.random((8, 8), dtype=np.float32),
            "lm_head.weight": rng.random((ROWS, 8), dtype=np.float32),
        },
        target / "model.safetensors",
    )
    save_file(
        {"fc.weight": rng.random((4, 4), dtype=np.float32)},
        draft / "model.safetensors",
    )
    return target, draft


class ToyEngine:
    """The engine's side of everything; records are those of ``make_record``."""

    def __init__(self, folder, engine_id="e1", seed=0, models=None, **changes):
        self.run_dir, self.relays = folder / "run", []
        target, draft = models or make_models(folder / "models", seed)
        self.spec = make_spec()
        self.ring = RingWriter.create(self.spec, 1 << 20)
        self.weights = WeightsSegment.create(1 << 20)
        state = {
            "ring": self.ring.name,
            "weights": self.weights.name,
            "target_path": str(target),
            "draft_path": str(draft),
            "target_dtype": "float32",
            "draft_vocab_size": ROWS,
            "tide": {},
            "created_unix": time.time(),
        }
        self.manifest = make_manifest(engine_id, **{**state, **changes})
        write_manifest(self.run_dir, self.manifest)

    def serve(self, seeds, num_rows=4):
        for seed in seeds:
            assert write_record(self.ring, make_record(self.spec, seed, num_rows))

    def relay(self, store, config=CONFIG):
        self.relays.append(Relay(self.manifest, self.run_dir, store, config))
        return self.relays[-1]

    def folder(self, store):
        return EngineFolder(store, self.manifest.engine_id)

    @property
    def identity(self):
        return identity_of(self.manifest)

    def close(self):
        for relay in self.relays:
            relay.close()
        self.ring.close()
        self.weights.close()


def settle(relay, seconds=0.03):
    """Make the relay's storage work due (a shard after 10 ms), and run all of it."""
    end, idle = time.monotonic() + seconds, 0
    # Several scans in any case: on a busy machine the time may pass without one.
    while time.monotonic() < end or idle < 5:
        relay._next_poll = 0.0
        idle += 1
        if relay.tick():
            end, idle = time.monotonic() + seconds, 0


def head_tensors(value):
    return {"fc.weight": ("float32", (4, 4), np.full((4, 4), value, np.float32))}


def feed_of(store, engine="e1", model=None, threaded=False):
    """Return the feed of a trainer that reads and publishes now."""
    folder = EngineFolder(store, engine)
    entry = folder.read_engine()
    models = partial(find_models, folder, entry, model, None)
    feed = SpoolFeed(folder, entry, models, threaded=threaded)
    if not threaded:
        feed.poll()
    return feed


def writer_of(store, records=(), engine="e1"):
    """Return a writer that holds records, or those of seeds."""
    writer = ShardWriter(EngineFolder(store, engine))
    writer.resume()
    for record in records:
        record = make_record(SPEC, record) if isinstance(record, int) else record
        writer.add(body_of(record))
    return writer


def write_shards(store, shards, engine="e1"):
    """Write one shard per list of seeds."""
    writer = writer_of(store, (), engine)
    for seeds in shards:
        for seed in seeds:
            writer.add(body_of(make_record(SPEC, seed)))
        assert writer.flush()
    return writer


def enforce(store, engine="e1", times=1, **changes):
    """Enforce the bounds as the relay of an engine."""
    config = CONFIG.model_copy(update=changes)
    bounds = Bounds(EngineFolder(store, engine), config)
    for _ in range(times):
        bounds.enforce()


def read_all(store, engine="e1", last=99):
    """Return the seeds of the records of each readable shard, and the reader."""
    reader = ShardReader(EngineFolder(store, engine), SPEC)
    records = {}
    while (shard := reader.fetch(last)) is not None:
        records[shard[0]] = [record.draft_version for record in shard[1]]
    return records, reader


def seeds_in(store):
    """Return the seeds of the records of each shard of the engine e1."""
    return read_all(store)[0]


def failing(store, method, part, error=None, after=False):
    """Return a replacement of a store's method that fails for names with a part.

    Args:
        after: Raise although the call succeeded.
    """
    works = getattr(store, method)

    def fails(name, *args, **more):
        done = works(name, *args, **more) if part not in name or after else None
        if part in name:
            raise error or StoreError("no space left")
        return done

    return fails


def files_of(store, engine="e1"):
    return list(EngineFolder(store, engine).shards())
