"""What a person sees while an arm runs.

On a terminal one table is redrawn in place; otherwise one plain line is printed
every few seconds, so that a log stays readable.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from .scrape import ACCEPTED, DRAFT_VERSION, DRAFTS, GENERATED, SWAPS, Scrape

PLAIN_PERIOD_S = 5.0
# Rates are taken over this many of the latest samples.
WINDOW_SAMPLES = 6


def trainer_statuses(run_dir: Path | None) -> list[dict[str, Any]]:
    """Read the trainers' status files; one being replaced is skipped this time."""
    found = []
    for path in sorted(run_dir.glob("trainer-*.json")) if run_dir else ():
        try:
            status = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(status, dict):
            found.append(status)
    return found


@dataclass(slots=True)
class LiveView:
    """Draws the progress of one arm."""

    arm: str
    num_requests: int
    run_dir: Path | None = None
    out: TextIO = field(default_factory=lambda: sys.stdout)
    num_done: int = 0
    num_failed: int = 0
    phase: str = "start"
    _recent: list[Scrape] = field(default_factory=list)
    _drawn_lines: int = 0
    _last_plain: float = -PLAIN_PERIOD_S

    def message(self, text: str) -> None:
        """Print a line that stays."""
        self._drawn_lines = 0
        self.out.write(f"[{self.arm:>6}] {text}\n")
        self.out.flush()

    def starting(self, elapsed_s: float) -> None:
        """Report that the server is being waited for."""
        now = time.monotonic()
        if now - self._last_plain >= 2 * PLAIN_PERIOD_S:
            self._last_plain = now
            self.message(f"server starting, {elapsed_s:.0f} s")

    def sample(self, scrape: Scrape) -> None:
        """Take a new sample and redraw."""
        self._recent = [*self._recent, scrape][-WINDOW_SAMPLES:]
        row = self.row()
        if self.out.isatty():
            self._draw(row)
        elif time.monotonic() - self._last_plain >= PLAIN_PERIOD_S:
            self._last_plain = time.monotonic()
            self.message("  ".join(f"{k} {v}" for k, v in row.items()))

    def row(self) -> Mapping[str, str]:
        """Return the cells of the table."""
        last, first = self._recent[-1], self._recent[0]
        seconds = last.t_s - first.t_s
        tokens = last.value(GENERATED) - first.value(GENERATED)
        drafts = last.value(DRAFTS) - first.value(DRAFTS)
        accepted = last.value(ACCEPTED) - first.value(ACCEPTED)
        capacity = last.value("vllm_tide:ring_capacity_bytes")
        used = last.value("vllm_tide:ring_used_bytes")
        cells = {
            "t": f"{last.t_s:.0f}s",
            "phase": self.phase,
            "requests": f"{self.num_done}/{self.num_requests}",
            "tokens/s": f"{tokens / seconds:.1f}" if seconds > 0 else "-",
            "accept": f"{1 + accepted / drafts:.2f}" if drafts > 0 else "-",
        }
        if last.has(DRAFT_VERSION):
            cells["draft"] = f"v{last.value(DRAFT_VERSION):.0f}"
            cells["swaps"] = f"{last.value(SWAPS):.0f}"
            cells["ring"] = f"{100 * used / capacity:.1f}%" if capacity else "-"
        for status in trainer_statuses(self.run_dir):
            loss = status.get("loss")
            cells["trainer"] = str(status.get("state", "-"))
            cells["loss"] = f"{loss:.3f}" if isinstance(loss, int | float) else "-"
        if self.num_failed:
            cells["FAILED"] = str(self.num_failed)
        return cells

    def _draw(self, row: Mapping[str, str]) -> None:
        widths = [max(len(k), len(v), 8) for k, v in row.items()]
        head = "  ".join(k.rjust(w) for k, w in zip(row, widths, strict=True))
        body = "  ".join(v.rjust(w) for v, w in zip(row.values(), widths, strict=True))
        if self._drawn_lines:
            self.out.write(f"\x1b[{self._drawn_lines}A")
        lines = [f"arm {self.arm}", head, body]
        self.out.write("".join(f"\x1b[2K{line}\n" for line in lines))
        self.out.flush()
        self._drawn_lines = len(lines)
