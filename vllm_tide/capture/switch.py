"""Whether a run directory's engines capture: files there outlive every process.

``capture_off.json`` is an operator's word, ``paused.json`` what a trainer was told
(``vllm_tide.train.pause``). An engine looks for both beside its steps.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_tide.transport.rendezvous import prepare_run_dir, write_private
from vllm_tide.transport.ring_format import Collect

if TYPE_CHECKING:
    from vllm_tide.capture.recorder import Recorder

logger = logging.getLogger("vllm.tide")  # vLLM's own shows it

OFF, PAUSED = "capture_off.json", "paused.json"
LOOK_S = 0.5


def why_off(run_dir: Path, before: str = "") -> str:
    """The file that switches capture off; empty if none, `before` if nobody can say."""
    try:
        names = os.listdir(run_dir)
    except OSError:
        return before
    return next((name for name in (OFF, PAUSED) if name in names), "")


def switch(run_dir: Path, on: bool) -> None:
    """Switch capture on or off for all engines of a run directory.

    Raises:
        TransportError: It is another user's.
        OSError: It cannot be written.
    """
    path = prepare_run_dir(run_dir) / OFF
    if on:
        path.unlink(missing_ok=True)
    else:
        write_private(path, json.dumps({"since_unix_s": time.time()}))


class CaptureSwitch:
    """Looks twice a second, on a thread of its own, and says what changed.

    Args:
        recorder: Captures nothing while its `off` is true.
        run_dir: Run directory.
    """

    def __init__(self, recorder: Recorder, run_dir: Path) -> None:
        self._recorder, self._run_dir = recorder, run_dir
        self._why, self._on = "", True
        self._closing = threading.Event()
        self._look()
        threading.Thread(target=self._watch, name="tide-switch", daemon=True).start()

    def close(self) -> None:
        """Look no more."""
        self._closing.set()

    def _watch(self) -> None:
        while not self._closing.wait(LOOK_S):
            self._look()

    def _look(self) -> None:
        recorder = self._recorder
        self._why = why_off(self._run_dir, self._why)
        recorder.off = bool(self._why)
        on = recorder.wish is not Collect.NOTHING
        if on != self._on:
            self._on, why = on, self._why or "a trainer is paused"
            said = "on" if on else f"off ({why} in {self._run_dir})"
            logger.info("vllm_tide: capture is %s.", said)
