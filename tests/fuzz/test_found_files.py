"""Defects that fuzzing found in the readers of files, one test each."""

import json
import os
from dataclasses import asdict

import pytest
import torch

from tests.fuzz import spool
from tests.train.toys import ToyTarget
from vllm_tide.deploy.store import DraftStore
from vllm_tide.draft import DraftError
from vllm_tide.train import checkpoint
from vllm_tide.transport import TransportError
from vllm_tide.transport.identity import (
    draft_fingerprint,
    read_header,
    target_fingerprint,
)
from vllm_tide.transport.rendezvous import (
    inspect_manifests,
)

DEEP = "[" * 100_000
HUGE = "9" * 400  # a whole number that no float represents


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
def test_a_pipe_is_no_stored_draft(tmp_path):
    store = DraftStore(tmp_path / "heads", "f" * 64)
    path = store.put({"fc": torch.zeros(2, 3)}, 3)
    path.unlink()
    os.mkfifo(path, 0o600)
    assert store.newest() is None
    assert "not a regular file" in store.refused[0]
