"""Files of a run directory."""

from __future__ import annotations

import functools
import json
import os
import tempfile
from pathlib import Path

from tests.fuzz.attempt import Parser
from tests.fuzz.damage import json_or_bytes
from tests.fuzz.spool import MANIFEST
from vllm_tide.transport.rendezvous import inspect_manifests, read_manifests
from vllm_tide.transport.shm import TransportError


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


def parsers() -> list[Parser]:
    """Return the parsers of files."""
    # With the fields of an earlier version.
    mine = {**MANIFEST, "pid": os.getpid(), "pid_start": 1, "pid_namespace": 4}
    manifests = json_or_bytes(MANIFEST, mine)
    return [Parser("rendezvous", manifests, read_run_dir, (TransportError,))]
