"""Start and drive `offline.py` from a test."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.engine.forked import Forked
from vllm_tide.transport.rendezvous import EngineManifest, read_manifests

SCRIPT = Path(__file__).with_name("offline.py")


class OfflineEngine:
    """A real engine in a separate process."""

    def __init__(self, case: dict[str, Any]) -> None:
        """Start it and wait until its models are loaded."""
        case = {"runner": "v1", **case}
        # Closed with this object. With `log` the server's log is written there.
        log = case.get("log")
        self._errors = open(log, "w+b") if log else tempfile.TemporaryFile()  # noqa: SIM115
        argv = [str(SCRIPT), json.dumps(case)]
        self._process: Any
        if log or "tensor_parallel_size" in case.get("engine", {}):
            # vLLM's own logging and its workers start with a new process.
            self._process = subprocess.Popen(
                [sys.executable, *argv],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
            )
        else:
            self._process = Forked(argv, case["runner"] != "v1", self._errors)
        self._expect("READY")

    def __enter__(self) -> OfflineEngine:
        """Use as a context."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the engine."""
        self.close()

    def work(self, prompts: list[list[int]], **work: Any) -> dict[str, Any]:
        """Generate for prompts of token ids and return the report."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, **work}) + "\n")
        self._process.stdin.flush()
        return json.loads(self._expect("REPORT "))

    def close(self) -> int:
        """Stop it gracefully and return the exit status."""
        if self._process.poll() is None and self._process.stdin is not None:
            self._process.stdin.write("null\n")
            self._process.stdin.close()
        try:
            return self._process.wait(timeout=60)
        finally:
            self._process.kill()

    def kill(self) -> None:
        """Send SIGKILL."""
        self._process.kill()
        self._process.wait()

    def _expect(self, prefix: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(prefix):
                return line.removeprefix(prefix).strip()
        self._errors.seek(0)
        raise AssertionError(self._errors.read()[-4000:].decode(errors="replace"))


def only_manifest(run_dir: Path) -> EngineManifest:
    """Return the manifest of the only live engine."""
    (manifest,) = read_manifests(run_dir)
    return manifest
