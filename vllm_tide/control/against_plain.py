"""Seconds that rounds took, beside those that plain decoding would have taken.

Their ratio is the speed-up as far as control can know it: measured time against the
time model's word for a step without drafts, for the same tokens.
"""

from __future__ import annotations

import numpy as np


class AgainstPlain:
    """Totals over measured rounds.

    Attributes:
        plain_s: Predicted seconds of plain decoding that emits the same tokens.
        round_s: Measured seconds.
    """

    def __init__(self) -> None:
        self.plain_s = self.round_s = 0.0

    def add(self, plain: float, emitted: np.ndarray, seconds: float, idle: int) -> None:
        """Add a round, and those like it that passed undrafted before it was seen.

        Args:
            plain: Predicted seconds of one plain step of its requests.
            emitted: int64 [n], tokens that each of its requests got; a plain step
                gives one to each that gets any.
            seconds: Measured, of all these rounds.
            idle: Number of the undrafted ones.
        """
        served = int(np.count_nonzero(emitted))
        if served:
            # Python's own floats: the engine core encodes no others for the metrics.
            self.plain_s += float(plain * (int(emitted.sum()) / served + idle))
            self.round_s += float(seconds)
