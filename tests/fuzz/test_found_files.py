"""Defects that fuzzing found in the readers of files, one test each."""

import hashlib
import json
import os
from dataclasses import asdict

import pytest
import torch

from tests.fuzz import spool
from tests.fuzz.memory import SPEC
from tests.train.toys import ToyTarget
from vllm_tide.deploy.store import DraftRefused, DraftStore, read_draft
from vllm_tide.draft import DraftError
from vllm_tide.train import checkpoint
from vllm_tide.transport import TransportError
from vllm_tide.transport.identity import (
    draft_fingerprint,
    read_header,
    target_fingerprint,
)
from vllm_tide.transport.rendezvous import (
    EngineManifest,
    inspect_manifests,
)
from vllm_tide.transport.spool import (
    DRAFTS,
    EngineEntry,
    EngineFolder,
    EngineState,
    parse_json,
)
from vllm_tide.transport.spool_models import local_models
from vllm_tide.transport.spool_shard import (
    SpoolReader,
    manifest_name,
    shard_number,
)
from vllm_tide.transport.spool_store import FsspecStore, LocalStore

DEEP = "[" * 100_000
HUGE = "9" * 400  # a whole number that no float represents


@pytest.fixture
def engine(tmp_path):
    """Return an engine's folder of a spool, and its path."""
    engine_folder = EngineFolder(LocalStore(tmp_path / "spool"), "e1")
    where = tmp_path / "spool/engines/e1"
    for name in ("records", "heads", "draft"):
        (where / name).mkdir(parents=True)
    return engine_folder, where


@pytest.mark.parametrize(
    "name", ["²" * 12 + "-1.safetensors", f"{1:012d}-\0.safetensors", "\ud800" * 14]
)
def test_a_manifest_without_a_file_is_skipped(engine, name):
    folder, where = engine
    assert shard_number(name) == 0
    manifest = {**spool.SHARD[0], "file": name}
    (where / manifest_name(1)).write_text(json.dumps(manifest))
    reader = SpoolReader(folder, SPEC)
    state = EngineState(last_shard=1)
    assert [reader.fetch(state) for _ in range(4)] == [None] * 4
    assert reader.skipped["removed"] == 1


def test_reads_are_bounded_by_the_requested_size(engine):
    folder, where = engine
    (where / "x").write_bytes(b"12345")
    for store in (folder.store, FsspecStore(f"file://{where.parent.parent}")):
        assert store.read("engines/e1/x", 3) == b"123"
        assert store.read("engines/e1/x", 10**15) == b"12345"
        assert store.read("engines/e1/y", 3) is None


def test_a_shard_longer_than_its_manifest_is_damaged_and_not_read_whole(engine):
    folder, where = engine
    manifest, body = spool.SHARD
    (where / manifest_name(1)).write_text(json.dumps(manifest))
    with open(where / "records" / manifest["file"], "wb") as file:
        file.write(body)
        file.truncate(1 << 36)  # a hole, not 64 GiB
    reader = SpoolReader(folder, SPEC)
    assert [reader.fetch(EngineState(last_shard=1)) for _ in range(3)] == [None] * 3
    assert reader.skipped["damaged"] == 1


def test_a_state_of_other_types_or_of_absurd_size_is_invalid(engine):
    folder, where = engine
    for text in ('{"last_shard": 1.5}', '{"unix": "now"}', '{"running": 3}', "3"):
        (where / "state.json").write_text(text)
        assert folder.read_state() is None
    with open(where / "state.json", "wb") as file:
        file.truncate(1 << 36)
    assert folder.read_state() is None
    assert parse_json(DEEP.encode()) is None


@pytest.mark.parametrize(
    "header",
    ["3", '{"d2t": {}}',
     '{"d2t": {"dtype": "I64", "shape": [1], "data_offsets": [0, 1000000000000000]}}',
     '{"d2t": {"dtype": "I64", "shape": [1], "data_offsets": [8, 0]}}',
     '{"\\ud800": {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]}}'],
)  # fmt: skip
def test_tensors_with_an_invalid_description_are_refused(tmp_path, header):
    (tmp_path / "config.json").write_text("{}")
    text = header.encode()
    data = len(text).to_bytes(8, "little") + text + bytes(8)
    (tmp_path / "m.safetensors").write_bytes(data)
    with pytest.raises(TransportError, match="no safetensors file"):
        draft_fingerprint(tmp_path)
    with pytest.raises(TransportError, match="no safetensors file"):
        read_header(tmp_path / "m.safetensors")
    (tmp_path / "config.json").write_text(DEEP)
    with pytest.raises(TransportError, match="not valid JSON"):
        target_fingerprint(tmp_path)


@pytest.mark.parametrize("name", ["../state.json", "..", "a\0b", "/etc/x"])
def test_a_list_of_model_files_names_none_outside(engine, tmp_path, name):
    folder, where = engine
    (where / "state.json").write_bytes(b"kept")
    rows = hashlib.sha256(b"{}").hexdigest()  # a target of no files
    targets = tmp_path / "spool/targets" / rows
    targets.mkdir(parents=True)
    (targets / "files.json").write_text("{}")
    listed = {name: hashlib.sha256(b"kept").hexdigest()}
    (where / "draft/files.json").write_text(json.dumps(listed))
    manifest, identity = EngineManifest(**spool.MANIFEST), {"target": "a", "rows": rows}
    entry = EngineEntry(manifest, SPEC, identity)
    with pytest.raises(TransportError, match="is damaged"):
        local_models(folder, entry, tmp_path / "cache")


@pytest.mark.parametrize("version", [2**63, True, -1])
def test_a_draft_without_a_version_is_invalid(engine, version):
    folder, where = engine
    (where / DRAFTS / "latest.json").write_text(json.dumps({"version": version}))
    assert folder.latest_draft() == 0


@pytest.mark.parametrize(
    "change",
    [{"engine_id": "../x"}, {"ring": None}, {"hidden_size": "wide"}, {"tide": []},
     {"aux_layer_ids": [1.5]}],
)  # fmt: skip
def test_a_manifest_of_other_types_is_skipped(tmp_path, change):
    path = tmp_path / "engine-e1.json"
    path.write_text(json.dumps({**spool.MANIFEST, **change}))
    assert inspect_manifests(tmp_path) == [(path, None)]
    path.write_text(json.dumps(spool.MANIFEST))
    assert inspect_manifests(tmp_path)[0][1].engine_id == "e1"


@pytest.mark.timeout(10)
def test_a_pipe_or_an_endless_file_in_a_run_directory_is_skipped(tmp_path):
    os.mkfifo(tmp_path / "engine-a.json", 0o600)
    with open(tmp_path / "engine-b.json", "wb") as file:
        file.truncate(1 << 36)
    assert [result for _, result in inspect_manifests(tmp_path)] == [None, None]


@pytest.fixture
def checkpoint_of(tmp_path):
    """Verify a checkpoint with a changed and resealed state file."""
    draft, path = ToyTarget().draft(0), tmp_path / "checkpoint-00000001"
    path.mkdir()
    (path / "a.safetensors").write_bytes(b"a")
    document = {
        "format": checkpoint.FORMAT,
        "draft": checkpoint.draft_fingerprint(draft),
        "optimizer_steps": 2,
        "files": {"a.safetensors": checkpoint._measure(path / "a.safetensors")},
        "state": asdict(checkpoint.TrainState(steps=3, extra={"live": "x"})),
    }

    def verify(change=lambda document: document, harm=lambda text: text):
        text = harm(sealed(change(json.loads(json.dumps(document)))))
        (path / "state.json").write_text(text)
        return checkpoint.verify(path, draft)

    return verify


def sealed(document):
    """Return any JSON with a right checksum."""
    return json.dumps(document | {"self_sha256": checkpoint.digest_of(document)})


def test_a_checkpoint_that_lacks_a_part_or_has_another_type_is_refused(checkpoint_of):
    assert checkpoint_of()[0].steps == 3
    for change in ({"steps": "3"}, {"steps": -1}, {"extra": []}, {"cycle_step": 1}):
        with pytest.raises(DraftError):
            checkpoint_of(lambda d, c=change: d | {"state": d["state"] | c})
    for name in ("draft", "optimizer_steps", "files", "state"):
        with pytest.raises(DraftError):
            checkpoint_of(lambda d, n=name: {k: v for k, v in d.items() if k != n})


def test_a_flipped_digit_in_a_checkpoints_state_is_damage(checkpoint_of):
    with pytest.raises(DraftError, match="damaged"):
        checkpoint_of(harm=lambda text: text.replace('"steps": 3', '"steps": 7'))
    with pytest.raises(DraftError):
        checkpoint_of(harm=lambda _: DEEP)


@pytest.mark.timeout(10)
def test_a_stored_draft_of_endless_size_and_a_pipe_are_refused(tmp_path):
    path = DraftStore(tmp_path / "heads", "f" * 64).put({"fc": torch.zeros(2, 3)}, 3)
    manifest = json.loads(path.with_suffix(".json").read_bytes())
    del manifest["self_sha256"]
    text = sealed(manifest | {"size": float("inf")})
    path.with_suffix(".json").write_text(text)
    with pytest.raises(DraftRefused, match="OverflowError"):
        read_draft(path)
    os.mkfifo(tmp_path / "x.json", 0o600)
    with pytest.raises(DraftRefused, match="not a regular file"):
        read_draft(tmp_path / "x.json")
