"""Requests of a step by hand, and their expected records, one after another."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from vllm_tide.capture.policy import Ticket
from vllm_tide.capture.step import Step, request_table
from vllm_tide.transport.record import MEMORY, Phase, Record

COLUMNS = (
    "low", "first", "count", "drafts", "padding", "start", "num_prompt_tokens",
    "logit_end", "committed", "next_token",
)  # fmt: skip


def request_rows(
    tickets: list[Ticket], chance: float = 1.0, cost: float = 1.0, **columns: Any
) -> np.ndarray:
    """Return columns; those that are not named are 0."""
    made = request_table(tickets, step_rows(np.zeros(0, np.int32), cost=cost))
    for name in COLUMNS:
        made[name] = columns.get(name, 0)
    made["verify_chance"] = chance
    made["flags"] |= MEMORY * (np.arange(len(tickets)) % 2)
    return made


def step_rows(
    token_ids: Any,
    features: Any = None,
    hidden: Any = None,
    topk: Any = None,
    version: int = 0,
    concurrency: int = 0,
    **more: Any,
) -> Step:
    """A step with nothing but its rows; without features, none of them."""
    none = np.zeros(0, np.int32)
    rows = SimpleNamespace(features=features, hidden=hidden, topk=topk)
    full = features is not None
    return Step(
        [""] * concurrency, none, none, none, none, none, version,
        token_ids=token_ids, full=full, staged=rows if full else None, **more,
    )  # fmt: skip


def expected(
    tickets: list[Ticket], table: np.ndarray, step: Step, wire: np.dtype, max_rows: int
) -> list[Record]:
    """The records by their description, each made by itself.

    Args:
        wire: Type of features.
    """
    made: list[Record] = []
    stored = step.staged if step.full else None
    for i, ticket in enumerate(tickets):
        (
            low,
            first,
            count,
            drafts,
            padding,
            start,
            prompt,
            logit_end,
            committed,
            after,
        ) = (int(table[name][i]) for name in COLUMNS)
        verifies = drafts > 0 or count == 1
        known = count - drafts  # rows of which no drafted token is the input
        record = Record(
            key=ticket.key,
            phase=Phase.VERIFY if verifies else Phase.PREFILL,
            start=start,
            num_prompt_tokens=prompt,
            num_accepted=min(known - 1 + max(committed - 1, 0), count - 1),
            next_token=after,
            draft_version=step.version,
            token_ids=step.token_ids[first : first + count],
            features=np.empty((count, 0), wire),
            teacher_start=count,
            tenant=ticket.tenant,
            sampled=ticket.sampled,
            concurrency=len(step.req_ids),
            cost=float(np.float32(table["cost"][i])),
            verify_chance=float(np.float32(table["verify_chance"][i])),
            memory=i % 2 == 1,
        )
        if verifies and step.drafted_by is not None:
            record = replace(record, draft_version=step.drafted_by)
        if stored is None:
            made.append(record)
            continue
        # Teacher of each row; None where it has none.
        rows = [stored.features[low + j] for j in range(count)]
        taught: list[tuple[np.ndarray, ...] | None] = [None] * count
        if stored.hidden is not None:
            taught = [(stored.hidden[low + j],) for j in range(count)]
        elif stored.topk is not None:
            sampled_rows = range(max(known - 1, 0), count)
            for j in sampled_rows:
                at = logit_end - padding - count + j
                taught[j] = tuple(part[at] for part in stored.topk)
        begin = 0
        while True:
            # Rows that need no verification may be sent ahead, as many as fit.
            end = min(begin + max_rows, known - 1)
            last = count - begin <= max_rows or begin >= known - 1
            end = count if last else end
            made.append(_part(record, rows, taught, begin, end, last, stored))
            if last:
                break
            begin = end
    return made


def _part(record, rows, taught, begin, end, last, staged) -> Record:
    stored = [row for row in taught[begin:end] if row is not None]
    teacher: dict[str, np.ndarray] = {}
    if staged.hidden is not None:
        teacher["teacher_hidden"] = np.stack([row[0] for row in stored])
    elif staged.topk is not None:
        kinds = ("teacher_topk_ids", "teacher_topk_logprobs", "teacher_tail_logprob")
        for kind, name in enumerate(kinds):
            like = staged.topk[kind][:0]
            values = [row[kind] for row in stored]
            teacher[name] = np.stack(values).astype(like.dtype) if values else like
    return replace(
        record,
        phase=record.phase if last else Phase.PREFILL,
        start=record.start + begin,
        num_accepted=record.num_accepted - begin if last else end - begin - 1,
        next_token=record.next_token if last else -1,
        token_ids=record.token_ids[begin:end],
        features=np.stack(rows[begin:end]),
        teacher_start=end - begin - len(stored),
        **teacher,
    )
