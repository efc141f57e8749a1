"""What the trainer decided and when: one JSON object a line, for people and reports.

Numbers and fixed words only; nothing of any request. Bounded: at the limit the older
half is dropped.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import time
from pathlib import Path
from typing import Any

from vllm_tide.tracing import Tracing
from vllm_tide.train.status import finite
from vllm_tide.transport.header import said

logger = logging.getLogger("vllm_tide.train")

MAX_BYTES = 4 << 20


class EventLog:
    """Appends to `events-<name>.jsonl`, mode 0600; a full disk never stops training.

    Args:
        run_dir: Run directory.
        name: Engine the trainer reports under.
        tracing: Every event becomes a span as well; see `open_tracing`.
    """

    def __init__(
        self, run_dir: Path, name: str, tracing: Tracing | None = None
    ) -> None:
        self.path = run_dir / f"events-{name}.jsonl"
        self.failed_writes = 0
        self._tracing = tracing

    def add(self, event: str, **facts: Any) -> None:
        """Append one event.

        Args:
            event: cycle, publish, unpublished, rollback, keep, shift, pause, refused,
                joined, left, restored, purge, paused or resumed.
            facts: JSON-able; a number that is not finite becomes null.
        """
        line = {"unix": round(time.time(), 3), "event": event}
        line |= finite(facts)
        if self._tracing is not None:
            self._tracing.span(event, facts.get("seconds", 0.0), facts)
        shown = (f"{k}={said(v)}" for k, v in line.items() if k != "unix")
        logger.info("%s", " ".join(shown))
        try:
            if self._append((json.dumps(line) + "\n").encode()) > MAX_BYTES:
                self._halve()
        except OSError:
            self.failed_writes += 1

    def _append(self, line: bytes) -> int:
        """Append a whole line or nothing; the file's size then.

        Raises:
            OSError: The disk took nothing, or only a part, which is taken back: the
                next line would be glued to it.
        """
        fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            size = os.fstat(fd).st_size
            if os.write(fd, line) < len(line):
                os.ftruncate(fd, size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(fd)
        return size + len(line)

    def _halve(self) -> None:
        lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
        staged = self.path.with_suffix(".new")
        fd = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.writelines(lines[len(lines) // 2 :])
        os.replace(staged, self.path)
