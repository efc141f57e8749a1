"""Streams of several domains: one after the other, or all at once.

Both hold exactly the same requests, so that what differs between them is their order
(Aurora's two traffic patterns; the first is TIDE's figure 9). Pure and deterministic.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from .control_arms import BenchError
from .stream import StreamError, StreamRequest, choose_prompts, read_prompts

SHIFT, MIXED = "shift", "mixed"
TRAFFIC = (SHIFT, MIXED)
BLOCK_REQUESTS = 4
MIXED_PARTS = 4
"""Drained stretches of a mixed stream, so that a change over time is seen."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """One drained stretch of a stream.

    Attributes:
        name: Segment name of its requests.
        domain: Its one domain, or `mixed`.
        shifted: It comes after a shift of domain; the whole of a mixed stream does.
    """

    name: str
    domain: str
    shifted: bool


def read_domains(folder: Path, domains: Sequence[str]) -> dict[str, list[str]]:
    """Read the prompts of some domains.

    Raises:
        BenchError: A file is missing.
    """
    try:
        return {domain: read_prompts(folder, domain) for domain in domains}
    except StreamError as error:
        raise BenchError(f"{error}; give --prompts the folder that has it") from None


def shift_stream(
    prompts: Mapping[str, Sequence[str]],
    counts: Sequence[int],
    max_tokens: int,
    concurrency: Sequence[int],
    seed: int,
) -> list[StreamRequest]:
    """Return the domains of `prompts` one after the other.

    Args:
        prompts: By domain, in the order wanted.
        counts: Requests of each domain.
        max_tokens: Output tokens of every request.
        concurrency: Requests in flight, one entry per block, then again; begins anew
            with each domain.
        seed: Which prompts, and in which order.

    Raises:
        BenchError: A domain has too few distinct prompts.
    """
    requests: list[StreamRequest] = []
    for place, (domain, count) in enumerate(zip(prompts, counts, strict=True)):
        try:
            chosen = choose_prompts(prompts[domain], count, domain, seed)
        except StreamError as error:
            raise BenchError(f"--requests: {error}") from None
        name = segment_name(place, domain)
        for index, (_, prompt) in enumerate(chosen):
            requests.append(
                StreamRequest(
                    index=len(requests),
                    phase=name,
                    final=False,
                    domain=domain,
                    prompt=prompt,
                    max_tokens=max_tokens,
                    concurrency=_in_flight(concurrency, index),
                )
            )
    return requests


def mixed_stream(
    shifted: Sequence[StreamRequest], concurrency: Sequence[int], seed: int
) -> list[StreamRequest]:
    """Return the requests of a stream shuffled, in `MIXED_PARTS` stretches."""
    order = list(shifted)
    random.Random(f"{seed}:{MIXED}").shuffle(order)  # noqa: S311 - not cryptographic
    size = -(-len(order) // MIXED_PARTS)
    return [
        replace(
            request,
            index=index,
            phase=segment_name(index // size, MIXED),
            concurrency=_in_flight(concurrency, index % size),
        )
        for index, request in enumerate(order)
    ]


def stretches(stream: Sequence[StreamRequest]) -> list[Stretch]:
    """Return the drained stretches of a stream, in order."""
    found: dict[str, Stretch] = {}
    for request in stream:
        name = request.segment
        if name not in found:
            domain = name.partition(" ")[2]
            found[name] = Stretch(name, domain, domain == MIXED or bool(found))
    return list(found.values())


def segment_name(place: int, domain: str) -> str:
    """Return the name of a stretch, unique although a domain may come again."""
    return f"{place} {domain}"


def _in_flight(concurrency: Sequence[int], index: int) -> int:
    return concurrency[index // BLOCK_REQUESTS % len(concurrency)]
