"""Files of a run directory."""

from __future__ import annotations

import functools
import json
import tempfile
import time
from pathlib import Path

from hypothesis import strategies as st

from tests.fuzz.attempt import Parser
from tests.fuzz.damage import json_or_bytes
from tests.fuzz.spool import MANIFEST
from vllm_tide.transport import purge
from vllm_tide.transport.process import Holder
from vllm_tide.transport.purge import PurgeInbox
from vllm_tide.transport.rendezvous import inspect_manifests, read_manifests
from vllm_tide.transport.shm import TransportError

ME = Holder.current()


class Folder:
    """A private directory for the life of the process."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="vllm_tide_fuzz_")
        self.path = Path(self._directory.name)


@functools.cache
def run_dir() -> Path:
    folders.append(folder := Folder())
    return folder.path


folders: list[Folder] = []


def read_run_dir(text: bytes) -> None:
    path = run_dir() / "engine-e1.json"
    path.write_bytes(text)
    ((_, result),) = inspect_manifests(run_dir())
    read_manifests(run_dir())
    if result is not None:
        json.dumps(result.tide)
        Path(result.draft_path).exists()
        assert all(type(layer) is int for layer in result.aux_layer_ids)
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
    result = inbox.pending()
    for one in result:
        assert one.tenant is None or 0 <= one.tenant < 2**64
    assert "keep" in [one.id for one in result], "a request was removed with another"
    purge.answers(folder, purge.PurgeRequest("ab", None, 0.0))
    purge.live_data_holders(folder)
    for path in folder.iterdir():
        path.unlink()


def parsers() -> list[Parser]:
    """Return the parsers of files."""
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
    ]
