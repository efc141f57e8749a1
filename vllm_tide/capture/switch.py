"""Whether a run directory's engines capture: files there outlive every process."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_tide.transport.rendezvous import write_private
from vllm_tide.transport.ring import Collect

if TYPE_CHECKING:
    from vllm_tide.capture.recorder import Recorder

logger = logging.getLogger("vllm.tide")  # vLLM's own shows it

PAUSED, OFF = "paused.json", "capture_off.json"
LOOK_S = 0.5


class Switch:
    """A pause of training, or of capture alone: while its file is there.

    Args:
        run_dir: Run directory; it holds for every process started there.
    """

    def __init__(self, run_dir: Path, name: str) -> None:
        self._path = run_dir / name
        self.on = self._path.exists()

    def set(self, on: bool) -> str:
        """Put it there or take it away; why others would not know, empty if they do."""
        self.on = on
        try:
            if on:
                write_private(self._path, json.dumps({"since_unix_s": time.time()}))
            else:
                self._path.unlink(missing_ok=True)
        except OSError as error:
            return f"{self._path} cannot be changed: {error.strerror}"
        return ""


def why_off(run_dir: Path, before: str = "") -> str:
    """The file that forbids capture; empty if none, `before` if nobody can say."""
    try:
        names = os.listdir(run_dir)
    except OSError:
        return before
    return next((name for name in (OFF, PAUSED) if name in names), "")


def heed_switches(recorder: Recorder, run_dir: Path) -> threading.Event:
    """Keep `Recorder.off` as the files say, from a thread of its own; set to end it."""
    closing, said, why = threading.Event(), True, ""

    def look() -> None:
        nonlocal said, why
        why = why_off(run_dir, why)
        recorder.off = bool(why)
        if why:  # or a cleaner of old files (systemd-tmpfiles) would take it
            with suppress(OSError):
                os.utime(run_dir / why)
        if (on := recorder.wish is not Collect.NOTHING) != said:
            said = on
            word = "on" if on else f"off ({why or 'a trainer is paused'})"
            logger.info("vllm_tide: capture is %s, run directory %s", word, run_dir)

    def watch() -> None:
        while not closing.wait(LOOK_S):
            look()

    look()  # before anything is served
    threading.Thread(target=watch, name="tide-switch", daemon=True).start()
    return closing
