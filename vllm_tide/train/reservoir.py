"""Training buffer (the newest) and held-out reservoir (at random), bounded in tokens.

A request goes wholly to one side, decided by its key: a window of a held-out request
never leaks into training. Within a side a (request, position) is trained once, by the
document that came last, and one tenant fills at most its share.

In one pass over the buffer a document of weight 1 appears once, one of weight 0.3 in
three passes of ten, one of weight 2 twice.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from vllm_tide.config import TrainConfig
from vllm_tide.train.sample import Sample, by_request, split_windows
from vllm_tide.transport.process import steady_unix
from vllm_tide.transport.tenant import NOBODY

FLOORS, FLOOR_REQUESTS = 8, 3
"""Most tenants with a floor, and held-out requests that earn one: who names a new
tenant in each request has none."""
TENANT_IDLE_S = 600.0
"""A tenant unseen for so long has no floor: judged is what is served."""
HOLDOUT_TOKENS = 8192
"""Held-out tokens kept: enough that a gain of 0.01 tokens shows, soon judged."""
WINDOW_TOKENS = 1024
"""Longest window of one request in a step; half a batch at most, so that none is of one
request alone."""
CYCLE_PASSES = 4
"""Most appearances of a document in one cycle."""
SEED = 0  # of shuffling, of the choice of what is held out and kept, of initialisation
_MASK = (1 << 64) - 1


def window_tokens(config: TrainConfig) -> int:
    return min(WINDOW_TOKENS, config.batch_tokens // 2)


def is_held_out(key: int, share: float) -> bool:
    """True if the request of this key is held out (SplitMix64 of key and seed)."""
    z = (key + (SEED + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return (z ^ (z >> 31)) < share * (_MASK + 1)


class Purged(NamedTuple):
    """Windows that a purge removed, of both sides, and their rows (tokens)."""

    samples: int = 0
    tokens: int = 0


class Side:
    """Windows by serial number, oldest first, found by request and by tenant.

    Args:
        tenant_share: Bound of one tenant's windows (share of `max_tokens`, 0 to 1).
        chance: Chooses what makes room, see `_crowded_out`; None: the oldest does.
    """

    def __init__(
        self,
        max_tokens: int,
        tenant_share: float,
        chance: random.Random | None = None,
    ) -> None:
        self._chance, self._named = chance, frozenset[int]()
        self.windows: dict[int, Sample] = {}
        self.tokens = 0
        self._max_tokens = max_tokens
        self._tenant_tokens = (
            int(tenant_share * max_tokens) if tenant_share < 1 else max_tokens
        )
        # Serial numbers, as dicts: ordered, and quick to remove from.
        self._by_key: defaultdict[int, dict[int, None]] = defaultdict(dict)
        self._by_tenant: defaultdict[int, dict[int, None]] = defaultdict(dict)
        self._tokens_of: Counter[int] = Counter()
        self._next = 0

    def add(self, window: Sample) -> int:
        serial, self._next = self._next, self._next + 1
        self.windows[serial] = window
        self._by_key[window.key][serial] = None
        self._by_tenant[window.tenant][serial] = None
        self._count(window, 1)
        return serial

    def remove(self, serial: int) -> Sample:
        window = self.windows.pop(serial)
        for index, name in (
            (self._by_key, window.key),
            (self._by_tenant, window.tenant),
        ):
            del index[name][serial]
            if not index[name]:
                del index[name]
        self._count(window, -1)
        return window

    def exchange(self, serial: int, window: Sample) -> None:
        """Put another window of the same request and tenant in the place of one."""
        self._count(self.windows[serial], -1)
        self.windows[serial] = window
        self._count(window, 1)

    def of_key(self, key: int) -> list[int]:
        return list(self._by_key.get(key, ()))

    def over_share(self, tenant: int) -> int | None:
        """The oldest window of a tenant that holds more than its share, else None."""
        held = self._by_tenant.get(tenant, {})
        over = self._tokens_of[tenant] > self._tenant_tokens
        return next(iter(held)) if tenant != NOBODY and over and len(held) > 1 else None

    def overfull(self) -> int | None:
        """The window that has to go if the side holds too much, else None."""
        if self.tokens <= self._max_tokens or len(self.windows) < 2:
            return None
        if self._chance is None:
            return next(iter(self.windows))
        return self._crowded_out(self._chance)

    def _crowded_out(self, chance: random.Random) -> int:
        """A window at random: what is held follows the traffic, in its shares.

        But tenants with a floor, all alike, hold half before all others (unnamed, or
        named too seldom) hold more.
        """
        windows, sizes = self.windows, self._tokens_of
        now = max(window.captured_unix_s for window in windows.values())

        def seen(n: int) -> bool:
            return windows[n].captured_unix_s >= now - TENANT_IDLE_S

        def has_floor(held: dict[int, None]) -> bool:
            kept = windows[next(iter(held))].tenant in self._named
            return kept or len({windows[n].key for n in held}) >= FLOOR_REQUESTS

        last = {t: next(reversed(held)) for t, held in self._by_tenant.items()}
        named = [t for t in last if t != NOBODY and seen(last[t])]
        named = [t for t in named if has_floor(self._by_tenant[t])]
        named.sort(key=lambda t: t not in self._named)  # who has one keeps it
        self._named = frozenset(named[:FLOORS])
        chosen = [n for n, w in windows.items() if w.tenant not in self._named]
        if 2 * sum(sizes[t] for t in self._named) > self.tokens:
            chosen = list(self._by_tenant[max(self._named, key=sizes.__getitem__)])
        # The newest window says when a tenant was seen: it stays.
        kept = {last[t] for t in self._named}
        return chance.choice([n for n in chosen if n not in kept] or chosen)

    def _count(self, window: Sample, sign: int) -> None:
        self.tokens += sign * window.num_tokens
        self._tokens_of[window.tenant] += sign * window.num_tokens
        if not self._tokens_of[window.tenant]:
            del self._tokens_of[window.tenant]


class SampleBuffer:
    """Both sides; `clock` is Unix time (s).

    Attributes:
        new_tokens: Training tokens that came since the owner last set this to 0.
        at_once: Appearances of a document in one cycle, at most.
        evicted: Rows that left, by reason: `train` and `holdout` (full),
            `tenant_share`, `duplicate`, `purged`, `expired`.
    """

    def __init__(
        self, config: TrainConfig, clock: Callable[[], float] = steady_unix
    ) -> None:
        self.config = config
        self.window = window_tokens(config)
        self.new_tokens = self.num_samples = 0
        self.at_once = CYCLE_PASSES
        self.evicted: Counter[str] = Counter()
        self._sides = {
            "train": Side(config.buffer_tokens, config.tenant_share),
            "holdout": Side(
                HOLDOUT_TOKENS,
                config.tenant_share,
                random.Random(SEED),  # noqa: S311 - not cryptographic
            ),
        }
        self._fresh: dict[int, None] = {}  # serial numbers of `fresh`
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
        """Serial number of the training window that came last; -1 of none."""
        return next(reversed(self._sides["train"].windows), -1)

    @property
    def fresh(self) -> list[Sample]:
        """Training windows that no pass has begun with yet, oldest first.

        Settable, to windows of `train`, by who breaks a pass off.
        """
        windows = self._sides["train"].windows
        return [windows[serial] for serial in self._fresh]

    @fresh.setter
    def fresh(self, samples: Collection[Sample]) -> None:
        wanted = {id(sample) for sample in samples}
        windows = self._sides["train"].windows
        self._fresh = {n: None for n, s in windows.items() if id(s) in wanted}

    @property
    def train_tokens(self) -> int:
        return self._sides["train"].tokens

    @property
    def holdout_tokens(self) -> int:
        return self._sides["holdout"].tokens

    def add(self, sample: Sample) -> None:
        held = is_held_out(sample.key, self.config.holdout_share)
        name = "holdout" if held else "train"
        side = self._sides[name]
        if not sample.captured_unix_s:
            sample = replace(sample, captured_unix_s=self._clock())
        self._supersede(name, sample)
        for window in split_windows(sample, self.window):
            self.num_samples += 1
            serial = side.add(window)
            if name == "train":
                self._fresh[serial] = None
                self.new_tokens += window.num_tokens
        while (oldest := side.over_share(sample.tenant)) is not None:
            self._drop(name, oldest, "tenant_share")
        while (victim := side.overfull()) is not None:
            self._drop(name, victim, name)

    def held_out(
        self, scored: Collection[int], rows: int, turn: int
    ) -> tuple[list[Sample], list[Sample]]:
        """Held-out windows to evaluate on, and the others.

        Args:
            scored: Request keys; windows of other requests are all among the first.
            rows: Of `scored` requests, at most, among the first; about as many again
                among the others (tokens).
            turn: Which of them, at random, is different in every turn.
        """
        requests = by_request(self.holdout)
        order = list(requests)
        random.Random(SEED + turn).shuffle(order)  # noqa: S311 - not cryptographic
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
        """One pass over the training side in random order, as far as passes are left.

        Windows that came after `until` (see `newest`) are left out and stay fresh:
        they are no evidence of a candidate that has learnt from them.

        Documents new since the last pass come first, unless tenants are balanced: a
        cycle may end in the middle of a pass, so then every part of it has to be
        balanced.
        """
        windows = self._sides["train"].windows
        if until is None:
            until = self.newest
        held = [window for serial, window in windows.items() if serial <= until]
        new = {id(windows[serial]) for serial in self._fresh if serial <= until}
        self._fresh = {serial: None for serial in self._fresh if serial > until}
        weight = weights(held, self.config)
        most = partial(self._passes_left, cycle=cycle)
        drawn = draw(held, weight, self._random, most)
        if self.config.tenant_share >= 1:
            drawn.sort(key=lambda sample: id(sample) not in new)
        return deque(drawn)

    def rows_left(self, cycle: int) -> int:
        """Rows that the training side may still be trained on in a cycle."""
        held = self._sides["train"].windows.values()
        return sum(s.num_tokens * self._passes_left(s, cycle) for s in held)

    def _passes_left(self, sample: Sample, cycle: int) -> int:
        done = sample.trained
        left = self.config.max_passes - len(done), self.at_once - done.count(cycle)
        return max(0, min(left))

    def map_train(self, change: Callable[[Sample], Sample]) -> None:
        side = self._sides["train"]
        for serial, window in list(side.windows.items()):
            side.exchange(serial, change(window))

    def purge(self, tenant: int | None = None, before: float | None = None) -> Purged:
        """Remove windows for good: a tenant's, or those from before a Unix time (s)."""
        return self._forget("purged", tenant, before)

    def expire(self) -> Purged:
        """Remove windows older than `max_age_s` from both sides, for good."""
        limit = self.config.max_age_s
        if limit is None:
            return Purged()
        return self._forget("expired", None, self._clock() - limit)

    def expired(self, sample: Sample) -> bool:
        limit = self.config.max_age_s
        return limit is not None and sample.captured_unix_s < self._clock() - limit

    def _forget(self, reason: str, tenant: int | None, before: float | None) -> Purged:
        samples = tokens = 0
        for name, side in self._sides.items():
            for serial, window in list(side.windows.items()):
                if tenant is not None and window.tenant != tenant:
                    continue
                if before is not None and window.captured_unix_s >= before:
                    continue
                if name == "train" and serial in self._fresh:
                    self.new_tokens = max(0, self.new_tokens - window.num_tokens)
                self._drop(name, serial, reason)
                samples += 1
                tokens += window.num_tokens
        return Purged(samples, tokens)

    def _drop(self, name: str, serial: int, reason: str) -> None:
        gone = self._sides[name].remove(serial)
        self.evicted[reason] += gone.num_tokens
        if name == "train":
            self._fresh.pop(serial, None)

    def _supersede(self, name: str, sample: Sample) -> None:
        """Let older windows of the request train no position that `sample` trains."""
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
                side.exchange(serial, left)


def weights(samples: Sequence[Sample], config: TrainConfig) -> list[float]:
    """Weight of each document, so that no tenant exceeds `tenant_share`."""
    masses: Counter[int] = Counter()
    for sample in samples:
        masses[sample.tenant] += sample.num_tokens
    caps = cap_factors(masses, config.tenant_share)
    return [caps.get(sample.tenant, 1.0) for sample in samples]


def draw(
    samples: Sequence[Sample],
    weight: Sequence[float],
    rng: random.Random,
    most: Callable[[Sample], int],
) -> list[Sample]:
    """The documents of one pass, shuffled, each as often as `most` says at most.

    Chance plays no part for whole weights: a plain pass depends on the order only.
    """
    out: list[Sample] = []
    for sample, expected in zip(samples, weight, strict=True):
        times = int(expected)
        if expected > times and rng.random() < expected - times:
            times += 1
        out += [sample] * min(times, most(sample))
    rng.shuffle(out)
    return out


def cap_factors(masses: Mapping[int, float], share: float) -> dict[int, float]:
    """Factors that bring every tenant down to its share (0 to 1), so none steers alone.

    The other bound (`Side`) is on what a tenant may hold of the buffer: one that is not
    full yet would otherwise be whoever is loudest. Requests without a tenant are many
    unknown clients and have no bound.

    With the j heaviest capped at a level L and a rest R left as it is, L is the share
    of the whole: L = share (j L + R), so L = share R / (1 - j share); j is the
    smallest number for which no tenant of the rest exceeds L. Where nothing can fill
    the rest (all tenants are over their share and nobody else is there) all weigh
    alike.
    """
    named = sorted(
        ((mass, tenant) for tenant, mass in masses.items() if tenant != NOBODY),
        reverse=True,
    )
    nobody = masses.get(NOBODY, 0.0)
    if share >= 1 or not named:
        return {}
    level = named[-1][0]
    for capped in range(len(named) + 1):
        rest = nobody + sum(mass for mass, _ in named[capped:])
        if rest <= 0 or capped * share >= 1:
            break
        bound = share * rest / (1 - capped * share)
        if capped == len(named) or named[capped][0] <= bound:
            level = bound
            break
    return {tenant: level / mass for mass, tenant in named if mass > level}
