"""Content of a spool: shards, states, drafts and their manifests."""

from __future__ import annotations

import functools
import hashlib
import json
import struct
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from tests.fuzz.attempt import Parser
from tests.fuzz.damage import damaged, damaged_json, edges, json_or_bytes
from tests.fuzz.memory import BODIES, FIELDS, SPEC, TENSORS
from tests.transport.samples import body_of, make_record
from vllm_tide import _shm
from vllm_tide.transport import publication
from vllm_tide.transport.shm import TransportError
from vllm_tide.transport.spool import (
    EngineFolder,
    EngineState,
    ReaderState,
    instance_gone,
)
from vllm_tide.transport.spool_shard import (
    ShardBuilder,
    SpoolReader,
)
from vllm_tide.transport.spool_store import LocalStore
from vllm_tide.transport.spool_writer import manifest_name

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
    "format": 2, "manifest": MANIFEST, "spec": FIELDS,
    "identity": {"target": "abc", "draft": "def"},
}  # fmt: skip


@functools.cache
def folder() -> tuple[EngineFolder, Path]:
    """Return an engine's folder of a spool; its directory is deleted with it."""
    made = tempfile.TemporaryDirectory(prefix="vllm_tide_fuzz_")
    root = Path(made.name)
    engine_folder = EngineFolder(LocalStore(root), "e1")
    engine_folder.keep_alive = made  # type: ignore[attr-defined]
    for name in ("records", "readers", "heads", "draft"):
        (root / "engines/e1" / name).mkdir(parents=True)
    return engine_folder, root / "engines/e1"


def built() -> tuple[dict[str, Any], bytes]:
    builder = ShardBuilder()
    for seed in range(4):
        builder.add(body_of(make_record(SPEC, seed, num_rows=seed)))
    return builder.build(1, 12.0)


SHARD = built()


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
def shards(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """Return a manifest (JSON) and a body, often with matching sizes and checksum."""
    manifest, body = SHARD
    body = draw(st.one_of(damaged([body]), shard_bodies()))
    if draw(st.integers(0, 3)):
        count = manifest["records"]
        if len(body) >= 8:
            count = draw(st.sampled_from((count, draw(st.integers(0, 5)))))
        crc = _shm.crc32c(body)
        manifest = {**manifest, "bytes": len(body), "crc32c": crc, "records": count}
    if draw(st.integers(0, 2)):
        return json.dumps(manifest).encode(), body
    return draw(damaged_json([manifest])), body


def read_shards(given: tuple[bytes, bytes, bytes]) -> None:
    where, path = folder()
    state_text, text, body = given
    (path / "state.json").write_bytes(state_text)
    (path / manifest_name(1)).write_bytes(text)
    (path / "records/000000000001-12.safetensors").write_bytes(body)
    state = where.read_state()
    if state is None:
        return
    reader = SpoolReader(where, SPEC)
    for _ in range(5):
        reader.fetch(state)


def read_states(given: tuple[bytes, bytes, bytes]) -> None:
    where, path = folder()
    for name, text in zip(
        ("engine.json", "state.json", "readers/r.json"), given, strict=True
    ):
        (path / name).write_bytes(text)
    where.read_state()
    for reader in where.read_readers().values():
        instance_gone(reader.instance)
    entry = where.read_engine()
    if entry is not None:
        json.dumps(asdict(entry.manifest))


@st.composite
def drafts(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """Return entry and body of draft 7."""
    blob = publication.encode(TENSORS, 7, 6, {"loss": 1.0})
    body = draw(damaged([blob.data]))
    digest = draw(st.sampled_from((blob.sha256, hashlib.sha256(body).digest())))
    entry = {"version": 7, "bytes": len(body), "sha256": digest.hex()}
    whole = st.just(json.dumps(entry).encode())
    return draw(st.one_of(whole, whole, json_or_bytes(entry))), body


def read_drafts(given: tuple[bytes, bytes]) -> None:
    where, path = folder()
    for name, data in zip(("latest.json", f"{7:012d}.safetensors"), given, strict=True):
        (path / "heads" / name).write_bytes(data)
    struct.pack("<Q", where.latest_draft())
    engine_folder = publication.decode(where.read_draft())
    publication.encode(engine_folder.tensors, 7, 6, {})


def parsers() -> list[Parser]:
    """Return the parsers of the spool."""
    state = json_or_bytes(asdict(EngineState(last_shard=1, first_shard=1)))
    still = st.just(json.dumps(asdict(EngineState(last_shard=1))).encode())
    renamed = st.sampled_from(
        ("²²²²²²²²²²²²-1.safetensors", "000000000001-\0.safetensors", "\ud800")
    ).map(lambda name: json.dumps({**SHARD[0], "file": name}).encode())
    reader = json_or_bytes(asdict(ReaderState(instance="a:1:2:3")))
    shard = shards().flatmap(
        lambda pair: st.tuples(st.one_of(still, state), *map(st.just, pair))
    )
    shard |= st.tuples(still, renamed, st.just(SHARD[1]))
    states = st.tuples(json_or_bytes(ENGINE), state, reader)
    refused = (TransportError,)
    return [
        Parser("spool_reader", shard, read_shards, refused),
        Parser("spool_words", states, read_states, refused),
        Parser("spool_drafts", drafts(), read_drafts, refused),
    ]
