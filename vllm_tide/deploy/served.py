"""Requests as they were served: steps, drafts, acceptance, put together from records.

Reads ids and counts only, so metadata-only records are as good as full ones. Memory is
bounded: open requests are limited in number and in tokens kept. No torch.
"""

from __future__ import annotations

import bisect
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm_tide.deploy.groups import MIN_TOKENS, UNKNOWN, Groups

if TYPE_CHECKING:
    from vllm_tide.transport.record import Record

PREFILL = 0
BUCKET_EDGES = (16, 64, 256, 1024)
"""Generated tokens before a decode step at which the next bucket begins."""
_PROMPT_TOKENS = _OUTPUT_TOKENS = 512  # of each request, kept for its group

Cell = tuple[int, int, int]
"""Of a decode step: buckets of generation position, of concurrency (powers of two) and
of the prompt's cached share (0: none, 1: less than half, 2: the rest)."""


@dataclass(slots=True)
class ServedRequest:
    """Drafts of one request; it grows until the request has ended.

    Attributes:
        tenant: Id of who sent it; 0 is nobody.
        group: Group of similar requests; -1 is unknown.
        versions: Draft versions seen, in order; the first is the one it began under.
        whole: Its beginning was captured, so `first_version` is true.
        began: Place in the order in which requests began, on all engines.
        cached: Bucket of the share of the prompt that came from the prefix cache.
        cells: Per cell: tokens of its decode steps, with or without drafts, and cost of
            these steps in steps without drafts (`Record.cost`). Only of steps under the
            first version: later ones had draft KV of two versions. Steps in which the
            memory drafted, and all under a fast draft, are left out, here and below.
        tries: Drafted first tokens that were verified, weighted by 1 / `verify_chance`.
        hits: Those of them that were accepted, weighted alike.
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
    """Bucket of a decode step before which `generated` tokens were generated."""
    return bisect.bisect_right(BUCKET_EDGES, generated)


@dataclass(slots=True)
class _Open(ServedRequest):
    seen: float = 0.0
    upto: int = 0
    asked_at: int = 0  # tokens at which its likely group was looked for
    prompt: list[int] = field(default_factory=list)
    output: list[int] = field(default_factory=list)


class ServedRequests:
    """Follows requests from their records; hands out the finished ones.

    Args:
        groups: Finds the group of each request; None leaves it unknown.
        max_open: Requests followed at once; beyond that the one unseen for the longest
            is handed out early.
        idle_s: A request unseen this long is handed out by `flush_idle` (seconds).
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

    def add(
        self, record: Record, engine: str, now: float, *, fast: bool = False
    ) -> list[ServedRequest]:
        """Take one record; return the requests it ended.

        Args:
            now: Monotonic (s).
            fast: A fast draft drafted (`fast_draft.py`), not the one deployed.
        """
        name = (engine, record.key)
        count = len(record.token_ids)
        request = self._open.get(name)
        if count and record.start >= 0:
            if request is None:
                self._begun += 1
                request = self._open[name] = _begin(record, count, engine, self._begun)
            request.seen = now
            self._open.move_to_end(name)
            _append(request, record, count, fast)
        if record.finished:
            return [] if request is None else [self._close(name)]
        if len(self._open) > self.max_open:
            return [self._close(next(iter(self._open)))]
        return []

    def flush_idle(self, now: float) -> list[ServedRequest]:
        """Hand out requests unseen for `idle_s`: their end was never captured."""
        idle = [n for n, r in self._open.items() if now - r.seen >= self.idle_s]
        return [self._close(name) for name in idle]

    def forget(self, engine: str) -> None:
        for name in [n for n in self._open if n[0] == engine]:
            del self._open[name]

    def purge(self, tenant: int | None = None) -> int:
        """Drop open requests of a tenant, None of all; the number dropped."""
        gone = [n for n, r in self._open.items() if tenant in (None, r.tenant)]
        for name in gone:
            del self._open[name]
        return len(gone)

    def open_requests(self) -> Iterator[ServedRequest]:
        """Requests that have not ended, as far as they were served.

        Left out are those unlike every group that is known: only their end founds one.
        """
        for request in self._open.values():
            if request.cells and (self.groups is None or self._placed(request)):
                yield request

    def _placed(self, request: _Open) -> bool:
        """True if an open request's group is likely, or it is too short for one."""
        tokens = len(request.prompt) + len(request.output)
        if request.group == UNKNOWN and tokens >= 2 * request.asked_at:
            request.asked_at = tokens
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
        # Rows past the prompt are recomputed: the request began before we looked.
        whole = record.start < prompt and record.start + count <= prompt
    else:
        # One row short of the prompt's end: all the rest came from the prefix cache.
        whole = prompt - 1 <= record.start <= prompt
    return _Open(
        record.key,
        engine,
        record.tenant,
        versions=(record.draft_version,),
        whole=whole,
        began=began,
        ended=False,
        cached=(record.start > 0) + (2 * record.start >= max(prompt, 1)),
    )


def _append(request: _Open, record: Record, count: int, fast: bool) -> None:
    if record.draft_version != request.versions[-1]:
        request.versions += (record.draft_version,)
    _keep_tokens(request, record, count)
    if record.phase == PREFILL or record.start < record.num_prompt_tokens:
        return
    if record.memory or fast:  # the deployed draft had no part in it
        return
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


def _keep_tokens(request: _Open, record: Record, count: int) -> None:
    """Committed tokens not seen before: the end of the prompt, the output's begin."""
    committed = count if record.phase == PREFILL else record.num_accepted + 1
    first = max(record.start, request.upto)
    request.upto = max(request.upto, record.start + committed)
    prompt_end = min(record.num_prompt_tokens, record.start + committed)
    # int(): a copy, for a view would keep the whole record alive.
    if first < prompt_end:
        low = max(first, prompt_end - _PROMPT_TOKENS) - record.start
        part = record.token_ids[low : prompt_end - record.start]
        request.prompt = [*request.prompt, *map(int, part)][-_PROMPT_TOKENS:]
    room = _OUTPUT_TOKENS - len(request.output)
    if room > 0:
        low = max(first, record.num_prompt_tokens) - record.start
        part = record.token_ids[low : min(committed, low + room)]
        request.output.extend(map(int, part))
