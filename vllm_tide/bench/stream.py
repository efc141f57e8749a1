"""The request stream: which prompts, in which order, at which concurrency.

Pure and deterministic: every arm of a run replays exactly the same stream.  A
*segment* is a stretch that is drained before the next one starts, so that the
server's counters can be read at its edges without a request in flight.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

BEFORE_SHIFT = "before_shift"
AFTER_SHIFT = "after_shift"
# The last quarter of the after-shift phase, reported as "final" as well.
FINAL_SHARE = 0.25
# Number of requests in flight, one entry per block of requests, then again.
CONCURRENCY_CYCLE = (1, 2, 4, 3)


class StreamError(ValueError):
    """The stream cannot be built from the prompts given; says what to do."""


@dataclass(frozen=True, slots=True)
class StreamRequest:
    """One request of the stream."""

    index: int
    phase: str  # BEFORE_SHIFT or AFTER_SHIFT
    final: bool  # in the last quarter of the after-shift phase
    domain: str
    prompt: str
    max_tokens: int
    concurrency: int  # most requests in flight when this one is admitted

    @property
    def segment(self) -> str:
        """Name of the drained stretch this request belongs to."""
        return "final" if self.final else self.phase


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """What to replay."""

    before_domain: str = "python"
    after_domain: str = "c"
    num_before: int = 16
    num_after: int = 96
    max_tokens: int = 128
    concurrency_cycle: tuple[int, ...] = CONCURRENCY_CYCLE
    block_requests: int = 4
    seed: int = 0


def read_prompts(folder: Path, domain: str) -> list[str]:
    """Read the prompts of a domain from ``<domain>.jsonl`` or ``.jsonl.gz``."""
    for path in (folder / f"{domain}.jsonl.gz", folder / f"{domain}.jsonl"):
        if path.exists():
            data = path.read_bytes()
            text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
            rows = [json.loads(line) for line in text.splitlines() if line]
            return [str(row["prompt"]) for row in rows]
    raise StreamError(f"no prompts of domain {domain!r} in {folder}")


def choose_prompts(
    prompts: Sequence[str], count: int, domain: str, seed: int
) -> list[tuple[str, str]]:
    """Return ``count`` distinct prompts with their domain, in an order by the seed.

    Raises:
        StreamError: There are not so many.
    """
    distinct = list(dict.fromkeys(prompts))
    if len(distinct) < count:
        raise StreamError(
            f"domain {domain!r} has {len(distinct)} distinct prompts, the stream "
            f"wants {count}; ask for fewer requests"
        )
    rng = random.Random(f"{seed}:{domain}")  # noqa: S311 - not cryptographic
    rng.shuffle(distinct)
    return [(domain, prompt) for prompt in distinct[:count]]


def build_stream(
    before: Sequence[str], after: Sequence[str], options: StreamOptions
) -> list[StreamRequest]:
    """Return the stream: ``num_before`` requests, the shift, ``num_after`` more."""
    o = options
    chosen = choose_prompts(before, o.num_before, o.before_domain, o.seed)
    chosen += choose_prompts(after, o.num_after, o.after_domain, o.seed)
    first_final = len(chosen) - max(1, round(o.num_after * FINAL_SHARE))
    requests = []
    for index, (domain, prompt) in enumerate(chosen):
        # Blocks are counted from the start of the phase, so that both phases
        # begin at the same place of the cycle.
        place = index if index < o.num_before else index - o.num_before
        block = place // o.block_requests
        requests.append(
            StreamRequest(
                index=index,
                phase=BEFORE_SHIFT if index < o.num_before else AFTER_SHIFT,
                final=index >= first_final,
                domain=domain,
                prompt=prompt,
                max_tokens=o.max_tokens,
                concurrency=o.concurrency_cycle[block % len(o.concurrency_cycle)],
            )
        )
    return requests


def segments(stream: Sequence[StreamRequest]) -> list[list[StreamRequest]]:
    """Split the stream where it is drained, in order."""
    parts: list[list[StreamRequest]] = []
    for request in stream:
        if not parts or parts[-1][0].segment != request.segment:
            parts.append([])
        parts[-1].append(request)
    return parts
