"""What every request was served: rounds, drafts, acceptance, put together from records.

Reads ids and counts only, so light records are as good as full ones. Memory is bounded:
open requests are limited in number and in tokens kept. No torch.
"""

from __future__ import annotations

import bisect
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm_tide.train.groups import UNKNOWN, Groups

if TYPE_CHECKING:
    from vllm_tide.transport.record import Record

PREFILL = 0
BUCKET_EDGES = (16, 64, 256, 1024)
"""Generated tokens before a round at which the next bucket begins."""
_PROMPT_TOKENS = _OUTPUT_TOKENS = 512  # of each request, kept for its group
_REMEMBERED = 8192  # finished requests whose group can still be asked for

Cell = tuple[int, int]
"""Bucket of generation position, and number of drafted tokens, of a round."""


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """How one request was drafted for.

    Attributes:
        key: Request key.
        engine: Engine that served it.
        tenant: Id of who sent it; 0 is nobody.
        group: Group of similar requests; -1 is unknown.
        versions: Draft versions seen, in order; the first is the one it began under.
        whole: Its beginning was captured, so `first_version` is true.
        rounds: Verifications of at least one drafted token.
        plain_rounds: Decoding steps without a draft.
        drafted: Drafted tokens.
        accepted: Drafted tokens that were accepted.
        examined: Drafted tokens whose predecessors were all accepted: up to the first
            rejection of each round, that one included.
        cells: Per (bucket, drafts): rounds and accepted tokens.
    """

    key: int
    engine: str = ""
    tenant: int = 0
    group: int = UNKNOWN
    versions: tuple[int, ...] = (0,)
    whole: bool = True
    rounds: int = 0
    plain_rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    examined: int = 0
    cells: dict[Cell, tuple[int, int]] = field(default_factory=dict)

    @property
    def first_version(self) -> int:
        """Version it began under."""
        return self.versions[0]

    @property
    def last_version(self) -> int:
        """Version it ended under."""
        return self.versions[-1]

    @property
    def accepted_share(self) -> float | None:
        """Accepted / drafted tokens (TIDE's alpha); None if nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def acceptance(self) -> float | None:
        """Accepted / examined tokens: the chance that one more draft is accepted.

        The maximum-likelihood alpha of TIDE's equation 2. Unlike the accepted share it
        does not move when a controller drafts more or fewer tokens.
        """
        return self.accepted / self.examined if self.examined else None

    @property
    def acceptance_length(self) -> float | None:
        """Tokens per drafted round, the target's own included (vLLM's definition)."""
        return 1.0 + self.accepted / self.rounds if self.rounds else None


def bucket_of(generated: int) -> int:
    """Bucket of a round before which `generated` tokens were generated."""
    return bisect.bisect_right(BUCKET_EDGES, generated)


@dataclass(slots=True)
class _Open:
    """A request that may still grow."""

    tenant: int
    whole: bool
    seen: float
    versions: list[int]
    upto: int = 0
    plain_rounds: int = 0
    cells: dict[Cell, list[int]] = field(default_factory=dict)
    prompt: list[int] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    examined: int = 0


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
        # By key alone, which is random and 64 bits: who asks may not know the engine.
        self._group: OrderedDict[int, int] = OrderedDict()

    def add(self, record: Record, engine: str, now: float) -> list[ServedRequest]:
        """Take one record; return the requests it ended.

        Args:
            record: As read from the ring, full or light.
            engine: Engine it came from.
            now: Monotonic clock (seconds).
        """
        name = (engine, record.key)
        count = len(record.token_ids)
        request = self._open.get(name)
        if count and record.start >= 0:
            if request is None:
                request = _begin(record, count, now)
                self._open[name] = request
            request.seen = now
            self._open.move_to_end(name)
            _append(request, record, count)
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
        """Drop what is open of an engine that is gone."""
        for name in [n for n in self._open if n[0] == engine]:
            del self._open[name]

    def purge(self, tenant: int | None = None) -> int:
        """Drop open requests, tokens and all; the number dropped.

        Args:
            tenant: Only this tenant's; None is everybody's.
        """
        gone = [
            name
            for name, request in self._open.items()
            if tenant is None or request.tenant == tenant
        ]
        for name in gone:
            del self._open[name]
        return len(gone)

    def group_of(self, key: int, engine: str = "") -> int:
        """Group of a request lately finished, or the likely one of an open request.

        -1 where nothing is known.
        """
        if key in self._group:
            return self._group[key]
        request = self._open.get((engine, key))
        if request is None or self.groups is None:
            return UNKNOWN
        return self.groups.nearest(request.prompt + request.output)

    def _close(self, name: tuple[str, int]) -> ServedRequest:
        request = self._open.pop(name)
        group = UNKNOWN
        if self.groups is not None:
            group = self.groups.assign(request.prompt + request.output)
        self._group[name[1]] = group
        while len(self._group) > _REMEMBERED:
            self._group.popitem(last=False)
        return ServedRequest(
            key=name[1],
            engine=name[0],
            tenant=request.tenant,
            group=group,
            versions=tuple(request.versions),
            whole=request.whole,
            rounds=sum(rounds for rounds, _ in request.cells.values()),
            plain_rounds=request.plain_rounds,
            drafted=request.drafted,
            accepted=request.accepted,
            examined=request.examined,
            cells={cell: (n, a) for cell, (n, a) in request.cells.items()},
        )


def _begin(record: Record, count: int, now: float) -> _Open:
    prompt = record.num_prompt_tokens
    if record.phase == PREFILL:
        # Rows past the prompt are recomputed: the request began before we looked.
        whole = record.start < prompt and record.start + count <= prompt
    else:
        whole = record.start == prompt
    return _Open(record.tenant, whole, now, [record.draft_version])


def _append(request: _Open, record: Record, count: int) -> None:
    if record.draft_version != request.versions[-1]:
        request.versions.append(record.draft_version)
    _keep_tokens(request, record, count)
    if record.phase == PREFILL:
        return
    drafts, accepted = count - 1, record.num_accepted
    if drafts == 0:
        request.plain_rounds += 1
        return
    request.drafted += drafts
    request.accepted += accepted
    request.examined += min(accepted + 1, drafts)
    bucket = bucket_of(record.start - record.num_prompt_tokens)
    cell = request.cells.setdefault((bucket, drafts), [0, 0])
    cell[0] += 1
    cell[1] += accepted


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
