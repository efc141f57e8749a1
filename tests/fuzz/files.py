"""Files of a run directory and of a trainer's state directory."""

from __future__ import annotations

import functools
import hashlib
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st

from tests.fuzz.attempt import Parser
from tests.fuzz.damage import damaged, damaged_json, json_or_bytes
from tests.fuzz.spool import MANIFEST
from tests.train.toys import ToyTarget
from vllm_tide.deploy.store import DraftRefused, DraftStore, read_draft
from vllm_tide.draft import DraftError
from vllm_tide.train import checkpoint
from vllm_tide.transport import purge
from vllm_tide.transport.process import Holder
from vllm_tide.transport.purge import PurgeInbox
from vllm_tide.transport.rendezvous import inspect_manifests, read_manifests
from vllm_tide.transport.shm import TransportError

ME = Holder.me()


class Folder:
    """A private directory that lives as long as the process."""

    def __init__(self) -> None:
        self._kept = tempfile.TemporaryDirectory(prefix="vllm_tide_fuzz_")
        self.path = Path(self._kept.name)


@functools.cache
def run_dir() -> Path:
    kept.append(folder := Folder())
    return folder.path


kept: list[Folder] = []


def read_run_dir(text: bytes) -> None:
    path = run_dir() / "engine-e1.json"
    path.write_bytes(text)
    ((_, found),) = inspect_manifests(run_dir())
    read_manifests(run_dir())
    if found is not None:
        json.dumps(found.tide)
        Path(found.draft_path).exists()
        assert all(type(layer) is int for layer in found.aux_layer_ids)
    path.unlink()


def read_purges(given: tuple[bytes, bytes, bytes, bytes, str]) -> None:
    request, answer, trainer, relay, name = given
    folder = run_dir()
    files = {
        f"purge-{name}.json": request,
        "purged-ab-cd.json": answer,
        "trainer-e1.json": trainer,
        "relay-e1-7.json": relay,
        "purge-keep.json": b'{"tenant": null, "asked_unix_s": 1e12}',
    }
    for file, data in files.items():
        (folder / file).write_bytes(data)
    inbox = PurgeInbox(folder)
    found = inbox.pending()
    for one in found:
        assert one.tenant is None or 0 <= one.tenant < 2**64
    assert "keep" in [one.id for one in found], "a request was removed with another"
    purge.answers(folder, purge.PurgeRequest("ab", None, 0.0))
    purge.live_keepers(folder)
    for path in folder.iterdir():
        path.unlink()


@functools.cache
def checkpoint_scene() -> tuple[Any, Path, dict[str, Any]]:
    """A draft, and a checkpoint of it whose tensors are two small files."""
    draft = ToyTarget().draft(0)
    kept.append(folder := Folder())
    path = folder.path / "checkpoint-00000001"
    path.mkdir()
    (path / "a.safetensors").write_bytes(b"a")
    state = checkpoint.TrainState(steps=3, extra={"live": "x"})
    document = {
        "format": checkpoint.FORMAT,
        "draft": checkpoint.draft_fingerprint(draft),
        "optimizer_steps": 2,
        "files": {"a.safetensors": checkpoint._measure(path / "a.safetensors")},
        "state": checkpoint.asdict(state),
    }
    return draft, path, document


@st.composite
def states(draw: st.DrawFn) -> bytes:
    """A state file; sealed anew where it still is a JSON object."""
    _, _, document = checkpoint_scene()
    text = draw(json_or_bytes(document))
    return seal(text, checkpoint.digest_of) if draw(st.integers(0, 3)) else text


def seal(text: bytes, digest: Any) -> bytes:
    try:
        value = json.loads(text)
        if isinstance(value, dict):
            return json.dumps({**value, "self_sha256": digest(value)}).encode()
    except (ValueError, RecursionError):
        pass
    return text


def read_checkpoint(text: bytes) -> None:
    draft, path, _ = checkpoint_scene()
    (path / "state.json").write_bytes(text)
    state, count = checkpoint.verify(path, draft)
    assert state.steps >= 0 and count >= 0


@functools.cache
def head_scene() -> tuple[DraftStore, Path, dict[str, Any], bytes]:
    kept.append(folder := Folder())
    store = DraftStore(folder.path / "heads", "f" * 64)
    path = store.put({"fc": torch.zeros(2, 3), "n": torch.zeros(4).bfloat16()}, 3)
    manifest = json.loads(path.with_suffix(".json").read_bytes())
    del manifest["self_sha256"]
    return store, path, manifest, path.read_bytes()


@st.composite
def stored(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """Manifest and tensors; the manifest mostly sealed over the tensors."""
    _, _, manifest, whole = head_scene()
    length = int.from_bytes(whole[:8], "little")
    data = draw(damaged([whole]))
    if draw(st.booleans()):
        text = draw(damaged_json([json.loads(whole[8 : 8 + length])]))
        data = len(text).to_bytes(8, "little") + text + whole[8 + length :]
    digest = hashlib.sha256(data).hexdigest()
    text = json.dumps({**manifest, "size": len(data), "sha256": digest}).encode()
    if draw(st.integers(0, 2)) == 0:
        text = draw(json_or_bytes(json.loads(text)))
    return seal(text, checkpoint.digest_of) if draw(st.integers(0, 4)) else text, data


def read_stored(given: tuple[bytes, bytes]) -> None:
    store, path, _, _ = head_scene()
    path.with_suffix(".json").write_bytes(given[0])
    path.write_bytes(given[1])
    for head in store.drafts():
        assert isinstance(head.version, int)
    read_draft(path)


def parsers() -> list[Parser]:
    """Those of files."""
    now = time.time()
    mine = {**MANIFEST, "pid": ME.pid, "pid_start": ME.start}
    mine["pid_namespace"] = ME.namespace
    requests = json_or_bytes({"tenant": "0f", "asked_unix_s": 12.5})
    answers = json_or_bytes({"kind": "trainer", "pid": 1, "counts": {"rows": 2}})
    trainers = json_or_bytes({"pid": 1, "state": "waiting", "updated_unix": now})
    holder = {"pid": ME.pid, "start": ME.start, "namespace": ME.namespace}
    relays = json_or_bytes({**holder, "updated_unix": now})
    names = st.sampled_from(("0f", "x y", "²"))
    manifests = json_or_bytes(MANIFEST, mine)
    purges = st.tuples(requests, answers, trainers, relays, names)
    return [
        Parser("rendezvous", manifests, read_run_dir, (TransportError,)),
        Parser("purge", purges, read_purges),
        Parser("checkpoint", states(), read_checkpoint, (DraftError,)),
        Parser("head_store", stored(), read_stored, (DraftRefused,)),
    ]
