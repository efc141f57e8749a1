"""The one boundary that keeps a fault of ours out of serving.

Style law: no blind except anywhere else. A fault is counted by where it happened,
logged once with its type (never with content), and after `LIMIT` faults the guarded
part is switched off for this worker; serving goes on.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

logger = logging.getLogger("vllm_tide")

LIMIT = 8


class Guard:
    """Runs callables and contains whatever they raise.

    Attributes:
        faults: Number of faults by place.
        tripped: True once `LIMIT` faults happened: guarded calls are then skipped.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self.faults: Counter[str] = Counter()
        self.tripped = False

    def run(self, where: str, call: Callable[..., Any], *args: Any) -> Any:
        """Call `call(*args)`; on a fault count it and return None."""
        if self.tripped:
            return None
        try:
            return call(*args)
        except Exception as error:  # noqa: BLE001 - the serving boundary
            self._count(where, error)
            return None

    def _count(self, where: str, error: Exception) -> None:
        self.faults[where] += 1
        if self.faults[where] == 1:
            tb = error.__traceback__
            while tb is not None and tb.tb_next is not None:
                tb = tb.tb_next
            line = "?"
            if tb is not None:
                line = f"{tb.tb_frame.f_code.co_filename}:{tb.tb_lineno}"
            # The type and the place, not the message: a message may quote content.
            logger.warning(
                "vllm_tide: %s failed in %s (%s at %s); serving is not affected.",
                self.what,
                where,
                type(error).__name__,
                line,
            )
        if sum(self.faults.values()) >= LIMIT:
            self.tripped = True
            logger.error(
                "vllm_tide: %s is switched off after %d faults; serving goes on "
                "without it. Restart the server to switch it on again.",
                self.what,
                LIMIT,
            )
