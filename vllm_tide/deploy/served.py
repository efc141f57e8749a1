"""Steps, drafts and acceptance of served requests, assembled from records.

Reads ids and counts only, so metadata-only records suffice. Memory is bounded: open
requests are limited in number and in stored tokens. No torch.
"""

from __future__ import annotations

import bisect
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm_tide.deploy.canary_groups import MIN_TOKENS, UNKNOWN, Groups
from vllm_tide.transport.versions import is_fast, number_of

if TYPE_CHECKING:
    from vllm_tide.transport.record import Record

PREFILL = 0
BUCKET_EDGES = (16, 64, 256, 1024)
"""Generated tokens before a decode step at which the next bucket begins."""
_PROMPT_TOKENS = _OUTPUT_TOKENS = 512  # of each request, stored for its group

Cell = tuple[int, int, int]
"""Buckets of a decode step: generation position, concurrency (powers of two) and cached
share of the prompt (0: none, 1: less than half, 2: half or more)."""


@dataclass(slots=True)
class ServedRequest:
    """Served steps of one request, updated until it has finished.

    Attributes:
        tenant: Id of its tenant; 0 is none.
        group: Group of similar requests; -1 is unknown.
        versions: Numbers of the drafts seen, in order, from the one at its start.
        whole: Its start was captured, so `first_version` is valid.
        began: Index in the order of request starts over all engines.
        cached: Bucket of the share of the prompt that came from the prefix cache.
        cells: Tokens of the decode steps by cell, with or without drafts, and cost of
            these steps in steps without drafts (`Record.cost`). Only steps under the
            first version: later ones have draft KV of two versions. Steps drafted by
            memory or by a fast draft are left out, here and below.
        tries: Verified first draft tokens, weighted by 1 / `verify_chance`.
        hits: Accepted ones of them, with the same weights.
        squares: Sum of the squared weights of `tries`.
    """

    key: int
    engine: str = ""
    tenant: int = 0
    group: int = UNKNOWN
    versions: tuple[int, ...] = (0,)
    whole: bool = True
    began: int = 0
    ended: bool = True
    cached: int = 0
    cells: dict[Cell, list[float]] = field(default_factory=dict)
    tries: float = 0.0
    hits: float = 0.0
    squares: float = 0.0

    @property
    def first_version(self) -> int:
        return self.versions[0]


def bucket_of(generated: int) -> int:
    """Return the bucket of a decode step after `generated` generated tokens."""
    return bisect.bisect_right(BUCKET_EDGES, generated)


@dataclass(slots=True)
class _Open(ServedRequest):
    seen: float = 0.0
    upto: int = 0
    grouped_at: int = 0  # number of tokens at the last search for a group
    prompt: list[int] = field(default_factory=list)
    output: list[int] = field(default_factory=list)


class ServedRequests:
    """Assembles served requests from their records.

    Args:
        groups: Assigns a group to each request; None: unknown.
        max_open: Maximum number of open requests; above it the least recently seen one
            is returned early.
        idle_s: `flush_idle` returns a request without a record for this long (s).
    """

    def __init__(
        self,
        groups: Groups | None = None,
        *,
        max_open: int = 4096,
        idle_s: float = 30.0,
    ) -> None:
        self.groups = groups
        self.max_open, self.idle_s = max_open, idle_s
        self._open: OrderedDict[tuple[str, int], _Open] = OrderedDict()
        self._begun = 0

    def add(self, record: Record, engine: str, now: float) -> list[ServedRequest]:
        """Add a record at `now` (monotonic, s); return requests that it finishes."""
        name = (engine, record.key)
        count = len(record.token_ids)
        request = self._open.get(name)
        if count and record.start >= 0:
            if request is None:
                self._begun += 1
                request = self._open[name] = _begin(record, count, engine, self._begun)
            request.seen = now
            self._open.move_to_end(name)
            _append(request, record, count)
        if record.finished:
            return [] if request is None else [self._close(name)]
        if len(self._open) > self.max_open:
            return [self._close(next(iter(self._open)))]
        return []

    def flush_idle(self, now: float) -> list[ServedRequest]:
        """Return requests without a record for `idle_s`: their end was not captured."""
        idle = [n for n, r in self._open.items() if now - r.seen >= self.idle_s]
        return [self._close(name) for name in idle]

    def forget(self, engine: str) -> None:
        for name in [n for n in self._open if n[0] == engine]:
            del self._open[name]

    def purge(self, tenant: int | None = None) -> int:
        """Remove open requests of a tenant (None: all); return their number."""
        names = [n for n, r in self._open.items() if tenant in (None, r.tenant)]
        for name in names:
            del self._open[name]
        return len(names)

    def open_requests(self) -> Iterator[ServedRequest]:
        """Yield unfinished requests with decode steps.

        Requests far from every group are left out: they create a group when finished.
        """
        for request in self._open.values():
            if request.cells and (self.groups is None or self._has_group(request)):
                yield request

    def _has_group(self, request: _Open) -> bool:
        """Return whether an open request has a group, or is too short for one."""
        tokens = len(request.prompt) + len(request.output)
        if request.group == UNKNOWN and tokens >= 2 * request.grouped_at:
            request.grouped_at = tokens
            text = request.prompt + request.output
            request.group = self.groups.nearest(text) if self.groups else 0
        return request.group != UNKNOWN or tokens < MIN_TOKENS

    def _close(self, name: tuple[str, int]) -> ServedRequest:
        request = self._open.pop(name)
        if self.groups is not None:
            request.group = self.groups.assign(request.prompt + request.output)
        request.ended = True
        request.prompt, request.output = [], []
        return request


def _begin(record: Record, count: int, engine: str, began: int) -> _Open:
    prompt = record.num_prompt_tokens
    if record.phase == PREFILL:
        # Rows past the prompt are recomputed: the request began before capture.
        whole = record.start < prompt and record.start + count <= prompt
    else:
        # Only the last prompt row is computed: the prefix cache had all others.
        whole = prompt - 1 <= record.start <= prompt
    return _Open(
        record.key,
        engine,
        record.tenant,
        versions=(number_of(record.draft_version),),
        whole=whole,
        began=began,
        ended=False,
        cached=(record.start > 0) + (2 * record.start >= max(prompt, 1)),
    )


def _append(request: _Open, record: Record, count: int) -> None:
    if (number := number_of(record.draft_version)) != request.versions[-1]:
        request.versions += (number,)
    _keep_tokens(request, record)
    if record.phase == PREFILL or record.start < record.num_prompt_tokens:
        return
    if record.memory or is_fast(record.draft_version):
        return  # not drafted by the deployed draft
    drafts, accepted = count - 1, record.num_accepted
    if drafts and record.verify_chance > 0:
        weight = 1.0 / record.verify_chance
        request.tries += weight
        request.squares += weight * weight
        request.hits += weight * (accepted > 0)
    if len(request.versions) > 1 or not record.cost:
        return
    bucket = bucket_of(record.start - record.num_prompt_tokens)
    cell = (bucket, record.concurrency.bit_length(), request.cached)
    sums = request.cells.setdefault(cell, [0.0, 0.0])
    sums[0] += accepted + 1
    sums[1] += record.cost


def _keep_tokens(request: _Open, record: Record) -> None:
    """Store new committed tokens: the last of the prompt, the first of the output."""
    committed = record.num_committed
    first = max(record.start, request.upto)
    request.upto = max(request.upto, record.start + committed)
    prompt_end = min(record.num_prompt_tokens, record.start + committed)
    # int() copies: a view would reference the whole record.
    if first < prompt_end:
        low = max(first, prompt_end - _PROMPT_TOKENS) - record.start
        part = record.token_ids[low : prompt_end - record.start]
        request.prompt = [*request.prompt, *map(int, part)][-_PROMPT_TOKENS:]
    free = _OUTPUT_TOKENS - len(request.output)
    if free > 0:
        low = max(first, record.num_prompt_tokens) - record.start
        part = record.token_ids[low : min(committed, low + free)]
        request.output.extend(map(int, part))
