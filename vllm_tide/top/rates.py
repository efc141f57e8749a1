"""Growth of totals between two samples; a restart is told by a total that fell."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_tide.top.metrics_page import Page
from vllm_tide.top.samples import Sample

_TOTALS = ("vllm:generation_tokens_total", "vllm:prompt_tokens_total")


class Growth:
    """Two pages of one run of a server.

    Args:
        before: The older; None when there is only one.
        now: The newer.
    """

    def __init__(self, before: Page | None, now: Page) -> None:
        self._before, self.now = before, now
        self.seconds = 0.0 if before is None else now.t_s - before.t_s

    def of(self, name: str) -> float | None:
        """How much a counter grew; None where that is not known."""
        now = self.now.value(name)
        if self._before is None or now is None:
            return None
        return max(0.0, now - (self._before.value(name) or 0.0))

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """How much a counter grew, by label; empty where that is not known."""
        if self._before is None:
            return {}
        before = self._before.by_label(name, label)
        now = self.now.by_label(name, label)
        return {k: max(0.0, v - before.get(k, 0.0)) for k, v in now.items()}

    def per_second(self, name: str) -> float | None:
        """Rate of a counter."""
        grown = self.of(name)
        return None if grown is None or self.seconds <= 0 else grown / self.seconds


def growth(history: Sequence[Sample], url: str) -> Growth | None:
    """Growth of a server's totals over the window; None if it does not answer now.

    Args:
        history: Samples, oldest first.
        url: Of the server.
    """
    pages = [sample.pages.get(url) for sample in history]
    now = pages[-1] if pages else None
    if not isinstance(now, Page):
        return None
    before: Page | None = None
    newer = now
    for page in reversed(pages[:-1]):
        if not isinstance(page, Page) or _fell(page, newer):
            break
        before = newer = page
    return Growth(before, now)


def ring_rates(
    history: Sequence[Sample], ring: str
) -> tuple[float | None, float | None]:
    """Rows written and rows dropped per second of a ring; None where not known.

    Args:
        history: Samples, oldest first.
        ring: Its name, which no other ring ever has.
    """
    seen = [
        (sample.t_s, look.ring)
        for sample in history
        for look in sample.engines
        if look.ring is not None and look.manifest.ring == ring
    ]
    if len(seen) < 2 or seen[-1][0] <= seen[0][0]:
        return None, None
    (began, first), (ended, last) = seen[0], seen[-1]
    seconds = ended - began
    return (
        max(0, last.written_rows - first.written_rows) / seconds,
        max(0, last.dropped_rows - first.dropped_rows) / seconds,
    )


def _fell(before: Page, now: Page) -> bool:
    return any((now.value(n) or 0.0) < (before.value(n) or 0.0) for n in _TOTALS)
