"""How long a trainer leaves a GPU that it shares alone."""

from __future__ import annotations

import math


class Pacer:
    """Bounds busy time to a share of wall time.

    A turn claims `busy / share` seconds from its beginning, or from the end of the
    claims before. Time that nobody asked for is not saved up.
    """

    def __init__(self, share: float) -> None:
        self.share, self._free_at = share, -math.inf

    def worked(self, began_s: float, busy_s: float) -> None:
        """A turn that began at `began_s` kept the GPU busy for `busy_s`."""
        self._free_at = max(self._free_at, began_s) + busy_s / self.share

    def rest(self, now_s: float) -> float:
        """Seconds until the next turn may begin."""
        return max(0.0, self._free_at - now_s)
