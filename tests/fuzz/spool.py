"""Content of a spool: shards, states and drafts."""

from __future__ import annotations

import functools
import hashlib
import json
import struct
import tempfile
from dataclasses import asdict
from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from tests.fuzz.attempt import Parser
from tests.fuzz.damage import damaged, damaged_json, edges, json_or_bytes
from tests.fuzz.memory import BODIES, FIELDS, SPEC, TENSORS
from tests.transport.samples import body_of, make_record
from vllm_tide import _shm
from vllm_tide.transport.draft_weights import DraftWeights
from vllm_tide.transport.shm import TransportError
from vllm_tide.transport.spool import (
    EngineFolder,
    EngineState,
    Store,
    TrainerState,
    draft_version,
)
from vllm_tide.transport.spool_models import find_models
from vllm_tide.transport.spool_shard import ShardReader, build_shard, purge_shards

MANIFEST = {
    "engine_id": "e1", "pid": 1, "ring": "vllm_tide2_ring_0",
    "weights": "vllm_tide2_weights_0", "target_path": "/nowhere/t",
    "draft_path": "/nowhere/d", "target_dtype": "float32", "hidden_size": 3,
    "vocab_size": 100, "draft_vocab_size": 50, "aux_layer_ids": [1, 2],
    "teacher": "topk", "teacher_topk": 2, "feature_dtype": "bfloat16",
    "num_speculative_tokens": 3, "tide": {"run_dir": None}, "created_unix": 1.5,
    "shared": ["lm_head.weight"],
}  # fmt: skip
ENGINE = {
    "format": 3, "manifest": MANIFEST, "spec": FIELDS,
    "identity": {"target": "abc", "draft": "def"},
    "draft_files": {"x": "0" * 64},
}  # fmt: skip


@functools.cache
def folder() -> tuple[EngineFolder, Path]:
    """Return an engine's folder of a spool; its directory is deleted with it."""
    made = tempfile.TemporaryDirectory(prefix="vllm_tide_fuzz_")
    root = Path(made.name)
    engine_folder = EngineFolder(Store(str(root)), "e1")
    engine_folder.keep_alive = made  # type: ignore[attr-defined]
    for name in ("records", "drafts", "initial"):
        (root / "engines/e1" / name).mkdir(parents=True)
    return engine_folder, root / "engines/e1"


BODIES_OF_SHARD = [body_of(make_record(SPEC, n, num_rows=n)) for n in range(4)]
SHARD, FILE = build_shard(BODIES_OF_SHARD, 1, 12.0)


@st.composite
def shard_bodies(draw: st.DrawFn) -> bytes:
    """Return a shard with unusual offsets, an unusual header or unusual records."""
    records = [draw(damaged(BODIES)) for _ in range(draw(st.integers(0, 4)))]
    sums = np.cumsum([0, *map(len, records)]).tolist()
    for _ in range(draw(st.integers(0, 2))):
        sums[draw(st.integers(0, len(sums) - 1))] = draw(edges) - 2**63
    offsets = struct.pack(f"<{len(sums)}q", *(min(n, 2**63 - 1) for n in sums))
    data = b"".join(records)
    at = len(offsets)
    header = {
        "offsets": {"dtype": "I64", "shape": [len(sums)], "data_offsets": [0, at]},
        "records": {
            "dtype": "U8", "shape": [len(data)], "data_offsets": [at, at + len(data)]
        },
    }  # fmt: skip
    text = draw(damaged_json([header]))
    return len(text).to_bytes(8, "little") + text + offsets + data


@st.composite
def shards(draw: st.DrawFn) -> tuple[str, bytes]:
    """Return a file name, often with a matching checksum, and the file."""
    file = draw(st.one_of(damaged([FILE]), shard_bodies()))
    crc = _shm.crc32c(file) if draw(st.integers(0, 3)) else 0
    return f"000000000001-12-{crc:08x}.safetensors", file


def read_shards(given: tuple[str, bytes]) -> None:
    where, path = folder()
    (path / "records" / given[0]).write_bytes(given[1])
    reader = ShardReader(where, SPEC)
    for _ in range(3):
        reader.fetch(1)
    assert reader.next_shard == 2
    removed = purge_shards([where], 7)
    assert removed + purge_shards([where], None) == 1


def read_states(given: tuple[bytes, bytes, bytes]) -> None:
    where, path = folder()
    names = ("engine.json", "state.json", "trainer.json")
    for name, text in zip(names, given, strict=True):
        (path / name).write_bytes(text)
    where.read_state()
    trainer = where.read_trainer()
    if trainer is not None:
        struct.pack("<Q", draft_version(trainer.draft, 7))
    entry = where.read_engine()
    if entry is not None:
        json.dumps(asdict(entry))
        find_models(where, entry, str(path), path / "cache")


def read_drafts(body: bytes) -> None:
    where, path = folder()
    name = f"{7:019d}-{hashlib.sha256(body).hexdigest()}.safetensors"
    (path / "drafts" / name).write_bytes(body)
    draft = where.read_draft(name).verify()
    DraftWeights.encode(draft.tensors, 7)


def parsers() -> list[Parser]:
    """Return the parsers of the spool."""
    state = json_or_bytes(asdict(EngineState(last_shard=1)))
    trainer = json_or_bytes(asdict(TrainerState("a:1:2", draft="x")))
    states = st.tuples(json_or_bytes(ENGINE), state, trainer)
    blob = DraftWeights.encode(TENSORS, 7, {"loss": 1.0})
    refused = (TransportError,)
    return [
        Parser("spool_reader", shards(), read_shards, refused),
        Parser("spool_states", states, read_states, refused),
        Parser("spool_drafts", damaged([blob.data]), read_drafts, refused),
    ]
