"""From the engines' records to training documents and served requests."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

from vllm_tide.train.feeds import Feeds
from vllm_tide.train.served import ServedRequest, ServedRequests
from vllm_tide.train.trainer import Trainer

BATCH, LIMIT_S = 256, 2.0
# Rows per turn of all engines: what makes their shares fair when all have more.
TURN_ROWS = 8192


class Intake:
    """Drains all engines.

    Args:
        feeds: The engines.
        trainer: Takes the documents.
        served: Follows the requests.

    Attributes:
        engine: Engine of the records being taken in.
        emptied: The last drain took all there was.
    """

    def __init__(self, feeds: Feeds, trainer: Trainer, served: ServedRequests) -> None:
        self._feeds, self._trainer, self._served = feeds, trainer, served
        self.engine = ""
        self.emptied = False

    def drain(self, now: float) -> Iterator[ServedRequest]:
        """Take what the engines sent, for at most `LIMIT_S`; yield ended requests.

        Args:
            now: Monotonic clock (seconds).
        """
        until = time.monotonic() + LIMIT_S
        self.emptied = False
        while time.monotonic() < until:
            taken = self._feeds.read(BATCH, TURN_ROWS)
            if not taken:
                self.emptied = True
                break
            for engine, records in taken:
                self.engine = engine
                for record in records:
                    number = self._feeds.number_of(engine, record.draft_version)
                    if number != record.draft_version:
                        record = replace(record, draft_version=number)
                    # First: the trainer asks for the group of the request.
                    yield from self._served.add(record, engine, now)
                    self._trainer.add_records((record,), now)
        yield from self._served.flush_idle(now)
        self._trainer.flush_idle(now)
