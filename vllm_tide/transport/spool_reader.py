"""Shards out of a spool, in order, one after another, from where this reader stopped.

Needs no listing: the engine's state says which shards there are. A shard that is
damaged, or that the bounds removed first, is passed over and counted.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass

from vllm_tide.transport.record import Record
from vllm_tide.transport.ring_format import RingSpec
from vllm_tide.transport.spool import EngineFolder, EngineState
from vllm_tide.transport.spool_shard import ShardDamaged, read_shard
from vllm_tide.transport.spool_writer import RECORDS, manifest_name, shard_number

logger = logging.getLogger("vllm_tide.spool")

# A shared file system may show the state before the shard: look again a few times.
_ATTEMPTS = 3


@dataclass(frozen=True)
class Shard:
    """A shard as it was read: its number and its records."""

    number: int
    records: list[Record]


class SpoolReader:
    """Reads one engine's shards.

    Attributes:
        next_shard: Number of the shard that :meth:`fetch` gives next.
        skipped: Shards passed over: "removed" and "damaged"; "unfit" counts records.
    """

    def __init__(
        self, folder: EngineFolder, spec: RingSpec, next_shard: int = 1
    ) -> None:
        self._folder, self._spec = folder, spec
        self.next_shard = next_shard
        self.skipped: Counter[str] = Counter()
        self._failed = 0

    def fetch(self, state: EngineState) -> Shard | None:
        """The next shard by the state read last; None if there is none now."""
        if self.next_shard < state.first_shard:
            self._skip_to(min(state.first_shard, state.last_shard + 1))
        if self.next_shard > state.last_shard:
            return None
        number = self.next_shard
        manifest = self._folder.read_json(manifest_name(number))
        body = None
        if manifest is not None:
            name = str(manifest.get("file"))
            told = manifest.get("bytes")
            # Name and size come from a file: they may say anything.
            if shard_number(name) == number:
                most = max(told, 0) + 1 if type(told) is int else 0
                at = self._folder.path(RECORDS, name)
                body = self._folder.store.read(at, most)
        if manifest is None or body is None:
            self._failure("", state)
            return None
        try:
            records, unfit = read_shard(manifest, body, self._spec)
        except ShardDamaged as error:
            self._failure(str(error), state)
            return None
        self._failed = 0
        self.skipped["unfit"] += unfit
        self.next_shard = number + 1
        return Shard(number, records)

    def _failure(self, damage: str, state: EngineState) -> None:
        """Look again later, or pass over it."""
        self._failed += 1
        if self._failed < _ATTEMPTS:
            return
        self._failed = 0
        if damage:
            logger.warning(
                "engine %s: shard %d is passed over: %s",
                self._folder.engine_id,
                self.next_shard,
                damage,
            )
            self.skipped["damaged"] += 1
            self.next_shard += 1
            return
        # Removed meanwhile, and perhaps many more with it: one look at what is left.
        names = self._folder.store.sizes(self._folder.path(RECORDS))
        left = [
            number
            for name in names
            if name.endswith(".json")
            and (number := shard_number(name)) > self.next_shard
        ]
        self._skip_to(min(left, default=state.last_shard + 1))

    def _skip_to(self, number: int) -> None:
        self.skipped["removed"] += max(number - self.next_shard, 0)
        self.next_shard = max(number, self.next_shard)
