"""Whether an operator has paused training: a file, so that it outlives a trainer."""

from __future__ import annotations

import json
import time
from pathlib import Path

from vllm_tide.capture.switch import PAUSED
from vllm_tide.transport.rendezvous import write_private


class Pause:
    """The pause of a run directory.

    Args:
        run_dir: Run directory; a pause in it holds for every trainer started there.

    Attributes:
        on: Whether training is paused.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / PAUSED
        self.on = self._path.exists()

    def set(self, on: bool) -> str:
        """Pause or go on.

        Returns:
            Why a restarted trainer would not know of it; empty if it would.
        """
        self.on = on
        try:
            if on:
                write_private(self._path, json.dumps({"since_unix_s": time.time()}))
            else:
                self._path.unlink(missing_ok=True)
        except OSError as error:
            return f"{self._path} cannot be changed: {error.strerror}"
        return ""
