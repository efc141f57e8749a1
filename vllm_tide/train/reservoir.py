"""Training buffer (newest windows) and held-out reservoir (random), bounded in tokens.

The key of a request selects its side, so that no window of a held-out request is
trained on. Within a side each (request, position) is trained once, in the newest
document, and a tenant fills at most its share.

A tenant over its share has a weight below 1: a document of weight 0.3 appears in three
of ten passes over the buffer.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

import torch

from vllm_tide.config import TrainConfig
from vllm_tide.train.sample import Sample, by_request, split_windows
from vllm_tide.transport.process import steady_unix
from vllm_tide.transport.tenant import NO_TENANT

FLOORS, FLOOR_REQUESTS = 8, 3
"""Maximum tenants with a floor, and held-out requests needed for one: a client that
sends a new tenant name with each request gets none."""
TENANT_IDLE_S = 600.0
"""A tenant without a request for this long loses its floor."""
HOLDOUT_TOKENS = 8192
"""Held-out tokens: enough to resolve a gain of 0.01 tokens, quick to evaluate."""
WINDOW_TOKENS = 1024
"""Longest window of one request; at most half a batch, so that every batch has several
requests."""
CYCLE_PASSES = 4
"""Maximum passes over a document in one cycle."""
SEED = 0  # of shuffling, of the held-out choice and eviction, of initialization
_MASK = (1 << 64) - 1


def window_tokens(config: TrainConfig) -> int:
    return min(WINDOW_TOKENS, config.batch_tokens // 2)


def in_holdout(key: int, share: float) -> bool:
    """Return whether a request is held out (SplitMix64 of key and seed)."""
    z = (key + (SEED + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return (z ^ (z >> 31)) < share * (_MASK + 1)


class Side:
    """Windows by serial number, oldest first.

    Args:
        tenant_share: Limit of one tenant's windows (share of `max_tokens`, 0 to 1).
        rng: Selects evicted windows (`_random_eviction`); None: the oldest goes first.
    """

    def __init__(
        self, max_tokens: int, tenant_share: float, rng: random.Random | None = None
    ) -> None:
        self._rng, self._with_floor = rng, frozenset[int]()
        self.windows: dict[int, Sample] = {}
        self._by_key: defaultdict[int, list[int]] = defaultdict(list)
        self._tokens_of: Counter[int] = Counter()  # by tenant
        self.tokens = self._next = 0
        self._max_tokens = max_tokens
        self._tenant_tokens = int(min(1.0, tenant_share) * max_tokens)

    def add(self, window: Sample) -> None:
        self.windows[self._next] = window
        self._by_key[window.key].append(self._next)
        self._next += 1
        self._count(window, 1)

    def remove(self, serial: int) -> Sample:
        window = self.windows.pop(serial)
        self._by_key[window.key].remove(serial)
        if not self._by_key[window.key]:
            del self._by_key[window.key]
        self._count(window, -1)
        return window

    def replace(self, serial: int, window: Sample) -> None:
        """Replace a window by another one of the same request and tenant."""
        self._count(self.windows[serial], -1)
        self.windows[serial] = window
        self._count(window, 1)

    def of_key(self, key: int) -> list[int]:
        return list(self._by_key.get(key, ()))

    def evict_over_share(self, tenant: int) -> int | None:
        """Return a tenant's oldest window if it exceeds its share, else None."""
        if tenant == NO_TENANT or self._tokens_of[tenant] <= self._tenant_tokens:
            return None
        mine = (n for n, window in self.windows.items() if window.tenant == tenant)
        oldest, second = next(mine), next(mine, None)
        return None if second is None else oldest

    def evict_over_capacity(self) -> int | None:
        """Return the window to evict if the side is over capacity, else None."""
        if self.tokens <= self._max_tokens or len(self.windows) < 2:
            return None
        if self._rng is None:
            return next(iter(self.windows))
        return self._random_eviction(self._rng)

    def _random_eviction(self, rng: random.Random) -> int:
        """Return a random window, so that the reservoir follows the traffic shares.

        Half of the side is a floor for frequent tenants, in equal parts; other tenants
        and requests without one get more only if that half is not used.
        """
        windows, sizes = self.windows, self._tokens_of
        now = max(window.captured_unix_s for window in windows.values())
        by_tenant: defaultdict[int, list[int]] = defaultdict(list)
        for serial, window in windows.items():
            by_tenant[window.tenant].append(serial)

        def has_floor(tenant: int, serials: list[int]) -> bool:
            idle = now - windows[serials[-1]].captured_unix_s > TENANT_IDLE_S
            if tenant == NO_TENANT or idle:
                return False
            requests = {windows[n].key for n in serials}
            return tenant in self._with_floor or len(requests) >= FLOOR_REQUESTS

        active = [t for t, mine in by_tenant.items() if has_floor(t, mine)]
        active.sort(key=lambda t: t not in self._with_floor)  # existing floors first
        self._with_floor = floors = frozenset(active[:FLOORS])
        chosen = [n for n, w in windows.items() if w.tenant not in floors]
        if 2 * sum(sizes[t] for t in floors) > self.tokens:
            chosen = by_tenant[max(floors, key=sizes.__getitem__)]
        # A tenant's newest window stays: it has the time of the last request.
        newest = {by_tenant[t][-1] for t in floors}
        return rng.choice([n for n in chosen if n not in newest] or chosen)

    def _count(self, window: Sample, sign: int) -> None:
        self.tokens += sign * window.num_tokens
        self._tokens_of[window.tenant] += sign * window.num_tokens
        if not self._tokens_of[window.tenant]:
            del self._tokens_of[window.tenant]


class SampleBuffer:
    """Training buffer and held-out reservoir; `clock` is Unix time (s).

    Attributes:
        new_tokens: Training tokens that were not used by a cycle yet.
        cycle_passes: Maximum passes over a document in one cycle.
        evicted: Removed rows by reason: `train` and `holdout` (over capacity),
            `tenant_share`, `duplicate`, `purged`, `expired`.
    """

    def __init__(
        self, config: TrainConfig, clock: Callable[[], float] = steady_unix
    ) -> None:
        self.config = config
        self.window = window_tokens(config)
        self.new_tokens = self.num_samples = 0
        self.cycle_passes = CYCLE_PASSES
        self.evicted: Counter[str] = Counter()
        self._sides = {
            "train": Side(config.buffer_tokens, config.tenant_share),
            "holdout": Side(
                HOLDOUT_TOKENS,
                config.tenant_share,
                random.Random(SEED),  # noqa: S311 - not cryptographic
            ),
        }
        self._cycled = -1  # last serial number that was part of a cycle
        self._clock = clock
        self._random = random.Random(SEED)  # noqa: S311 - shuffling only

    @property
    def train(self) -> list[Sample]:
        return list(self._sides["train"].windows.values())

    @property
    def holdout(self) -> list[Sample]:
        return list(self._sides["holdout"].windows.values())

    @property
    def newest(self) -> int:
        """Serial number of the newest training window; -1 without one."""
        return next(reversed(self._sides["train"].windows), -1)

    @property
    def fresh(self) -> list[Sample]:
        """Training windows that were not part of a cycle yet, oldest first."""
        windows = self._sides["train"].windows.items()
        return [window for serial, window in windows if self._is_fresh(serial, window)]

    def _is_fresh(self, serial: int, window: Sample) -> bool:
        return serial > self._cycled and not window.trained

    def end_cycle(self, until: int, new_tokens: int) -> None:
        """Count windows up to `until` and so many new tokens as used by a cycle."""
        self._cycled, self.new_tokens = until, max(0, self.new_tokens - new_tokens)

    @property
    def train_tokens(self) -> int:
        return self._sides["train"].tokens

    @property
    def holdout_tokens(self) -> int:
        return self._sides["holdout"].tokens

    def add(self, sample: Sample) -> None:
        holdout = in_holdout(sample.key, self.config.holdout_share)
        name = "holdout" if holdout else "train"
        side = self._sides[name]
        if not sample.captured_unix_s:
            sample = replace(sample, captured_unix_s=self._clock())
        self._supersede(name, sample)
        for window in split_windows(sample, self.window):
            self.num_samples += 1
            side.add(window)
            if not holdout:
                self.new_tokens += window.num_tokens
        while (oldest := side.evict_over_share(sample.tenant)) is not None:
            self._drop(name, oldest, "tenant_share")
        while (victim := side.evict_over_capacity()) is not None:
            self._drop(name, victim, name)

    def split_holdout(
        self, scored: Collection[int], rows: int, cycle: int
    ) -> tuple[list[Sample], list[Sample]]:
        """Split held-out windows into those to evaluate now and the others.

        Args:
            scored: Request keys; windows of other requests are all evaluated now.
            rows: Maximum rows of `scored` requests to evaluate now; the others have
                about as many (tokens).
            cycle: Seed of the random choice among `scored` requests.
        """
        requests = by_request(self.holdout)
        order = list(requests)
        random.Random(SEED + cycle).shuffle(order)  # noqa: S311 - not cryptographic
        chosen: list[Sample] = []
        others: list[Sample] = []
        limit = rows
        for key in order:
            rows -= sum(s.num_tokens for s in requests[key]) if key in scored else 0
            if key not in scored or rows >= 0:
                chosen += requests[key]
            elif rows >= -limit or not others:
                others += requests[key]
        return chosen, others

    def shuffled(self, cycle: int = 0, until: int | None = None) -> deque[Sample]:
        """Return one pass over the training side in random order, within `max_passes`.

        Windows added after `until` (see `newest`) are left out, because a window is
        evidence only if it is scored before it is trained on.

        Fresh documents come first, unless tenants are balanced: a cycle may end within
        a pass, so every part of it has to be balanced then.
        """
        windows = self._sides["train"].windows.items()
        chosen = {n: w for n, w in windows if until is None or n <= until}
        masses: Counter[int] = Counter()
        for sample in chosen.values():
            masses[sample.tenant] += sample.num_tokens
        caps = cap_factors(masses, self.config.tenant_share)
        drawn: list[tuple[bool, Sample]] = []
        for serial, sample in chosen.items():
            weight = caps.get(sample.tenant, 1.0)
            times = weight == 1.0 or self._random.random() < weight
            if times and self._passes_left(sample, cycle):
                drawn.append((not self._is_fresh(serial, sample), sample))
        self._random.shuffle(drawn)
        if self.config.tenant_share >= 1:
            drawn.sort(key=lambda pair: pair[0])
        return deque(sample for _, sample in drawn)

    def rows_left(self, cycle: int) -> int:
        """Return the rows left to train in a cycle, over all passes."""
        windows = self._sides["train"].windows.values()
        return sum(s.num_tokens * self._passes_left(s, cycle) for s in windows)

    def _passes_left(self, sample: Sample, cycle: int) -> int:
        done = sample.trained
        left = self.config.max_passes - len(done), self.cycle_passes - done.count(cycle)
        return max(0, min(left))

    def map_train(self, change: Callable[[Sample], Sample]) -> None:
        side = self._sides["train"]
        for serial, window in list(side.windows.items()):
            side.replace(serial, change(window))

    def purge(
        self, tenant: int | None = None, before: float | None = None
    ) -> tuple[int, int]:
        """Remove a tenant's windows, or those captured before a Unix time (s).

        Returns:
            Number of removed windows, and their rows (tokens).
        """
        return self._forget("purged", tenant, before)

    def expire(self) -> bool:
        """Remove windows older than `max_age_s`; return whether there were any."""
        limit = self.config.max_age_s
        if limit is None:
            return False
        return self._forget("expired", None, self._clock() - limit) != (0, 0)

    def expired(self, sample: Sample) -> bool:
        limit = self.config.max_age_s
        return limit is not None and sample.captured_unix_s < self._clock() - limit

    def _forget(
        self, reason: str, tenant: int | None, before: float | None
    ) -> tuple[int, int]:
        samples = tokens = 0
        for name, side in self._sides.items():
            for serial, window in list(side.windows.items()):
                if tenant is not None and window.tenant != tenant:
                    continue
                if before is not None and window.captured_unix_s >= before:
                    continue
                if name == "train" and self._is_fresh(serial, window):
                    self.new_tokens = max(0, self.new_tokens - window.num_tokens)
                self._drop(name, serial, reason)
                samples += 1
                tokens += window.num_tokens
        return samples, tokens

    def _drop(self, name: str, serial: int, reason: str) -> None:
        self.evicted[reason] += self._sides[name].remove(serial).num_tokens

    def _supersede(self, name: str, sample: Sample) -> None:
        """Remove positions that `sample` trains from older windows of the request."""
        side = self._sides[name]
        older = side.of_key(sample.key)
        if not older:
            return
        positions = sample.trained_positions
        branches = frozenset(b.position for b in sample.branches)
        for serial in older:
            window = side.windows[serial]
            if not torch.isin(window.trained_positions, positions).any():
                continue
            left = window.superseded(positions, branches)
            if left is None:
                self._drop(name, serial, "duplicate")
            else:
                self.evicted["duplicate"] += window.num_tokens - left.num_tokens
                side.replace(serial, left)


def cap_factors(masses: Mapping[int, float], share: float) -> dict[int, float]:
    """Return factors that limit every tenant to its share (0 to 1) of the weight.

    `Side` limits a tenant's tokens only when the buffer is full; before that the most
    active tenant would dominate. Requests without a tenant have no limit.

    With the j largest tenants capped at a level L and a remainder R uncapped,
    L = share (j L + R); j is the smallest number for which no tenant of the remainder
    exceeds L. If there is no remainder (all are over their share) all get equal weight.
    """
    named = sorted(
        ((mass, tenant) for tenant, mass in masses.items() if tenant != NO_TENANT),
        reverse=True,
    )
    unnamed = masses.get(NO_TENANT, 0.0)
    if share >= 1 or not named:
        return {}
    level = named[-1][0]
    for capped in range(len(named) + 1):
        remainder = unnamed + sum(mass for mass, _ in named[capped:])
        if remainder <= 0 or capped * share >= 1:
            break
        bound = share * remainder / (1 - capped * share)
        if capped == len(named) or named[capped][0] <= bound:
            level = bound
            break
    return {tenant: level / mass for mass, tenant in named if mass > level}
