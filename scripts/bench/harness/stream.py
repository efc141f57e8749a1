"""The requests of a run: which prompts, in which order, at which concurrency.

Pure and deterministic: every arm of a run replays exactly the same stream. A *segment*
is a stretch that is drained before the next one starts, so that the server's counters
can be read at its edges without a request in flight.

The suites of control and of long outputs send token ids, not text: a prompt cut to a
length then has exactly that length, and the API server has no text to tokenise while it
shares the engine's cores.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.harness.common import BenchError, StreamError

BEFORE_SHIFT = "before_shift"
AFTER_SHIFT = "after_shift"
# The last quarter of the after-shift phase, reported as "final" as well.
FINAL_SHARE = 0.25
# Number of requests in flight, one entry per block of requests, then again.
BLOCK_REQUESTS = 4
CONCURRENCY_CYCLE = (1, 2, 4, 3)


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
        return "final" if self.final else self.phase


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """Options of a stream with one shift of domain."""

    before_domain: str = "json"
    after_domain: str = "logs"
    num_before: int = 12
    num_after: int = 64
    max_tokens: int = 96
    concurrency_cycle: tuple[int, ...] = (2,)
    seed: int = 0


def read_prompts(folder: Path, domain: str) -> list[str]:
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
    """`count` distinct prompts with their domain, in an order by the seed."""
    distinct = list(dict.fromkeys(prompts))
    if len(distinct) < count:
        raise StreamError(
            f"domain {domain!r} has {len(distinct)} distinct prompts, the stream "
            f"wants {count}; ask for fewer requests"
        )
    rng = random.Random(f"{seed}:{domain}")
    rng.shuffle(distinct)
    return [(domain, prompt) for prompt in distinct[:count]]


def build_stream(
    before: Sequence[str], after: Sequence[str], options: StreamOptions
) -> list[StreamRequest]:
    """Stream: `num_before` requests, the shift, `num_after` more."""
    o = options
    requests: list[StreamRequest] = []
    for phase, prompts, domain, count in (
        (BEFORE_SHIFT, before, o.before_domain, o.num_before),
        (AFTER_SHIFT, after, o.after_domain, o.num_after),
    ):
        chosen = choose_prompts(prompts, count, domain, o.seed)
        requests += _stretch(
            chosen, len(requests), phase, o.max_tokens, o.concurrency_cycle
        )
    first_final = len(requests) - max(1, round(o.num_after * FINAL_SHARE))
    return [replace(r, final=r.index >= first_final) for r in requests]


def _stretch(
    chosen: Sequence[tuple[str, str]],
    first: int,
    phase: str,
    max_tokens: int,
    concurrency: Sequence[int],
) -> list[StreamRequest]:
    """Requests of a phase, at whose start the cycle of concurrency begins."""
    return [
        StreamRequest(
            first + place,
            phase,
            False,
            domain,
            prompt,
            max_tokens,
            concurrency[place // BLOCK_REQUESTS % len(concurrency)],
        )
        for place, (domain, prompt) in enumerate(chosen)
    ]


def segments(stream: Sequence[StreamRequest]) -> list[list[StreamRequest]]:
    """Splits the stream where it is drained, in order."""
    parts: list[list[StreamRequest]] = []
    for request in stream:
        if not parts or parts[-1][0].segment != request.segment:
            parts.append([])
        parts[-1].append(request)
    return parts


def read_domains(folder: Path, domains: Sequence[str]) -> dict[str, list[str]]:
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
    """Domains of `prompts` one after the other."""
    requests: list[StreamRequest] = []
    for place, (domain, count) in enumerate(zip(prompts, counts, strict=True)):
        try:
            chosen = choose_prompts(prompts[domain], count, domain, seed)
        except StreamError as error:
            raise BenchError(f"--requests: {error}") from None
        name = segment_name(place, domain)
        requests += _stretch(chosen, len(requests), name, max_tokens, concurrency)
    return requests


def segment_name(place: int, domain: str) -> str:
    """Name of a stretch, unique although a domain may come again."""
    return f"{place} {domain}"


# What the demo's draft was trained on, and what it was not.
DOMAIN_FILES: Mapping[str, str] = {"matched": "python", "unmatched": "c"}


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request of token ids."""

    index: int  # place in the cell's sequence; the same request in every arm
    segment: str  # domain
    prompt: tuple[int, ...]  # token ids
    max_tokens: int  # output tokens, exactly


@dataclass(frozen=True, slots=True)
class PromptPool:
    """Tokenised prompts by domain."""

    prompts: Mapping[str, Sequence[tuple[int, ...]]]

    def sequence(self, domain: str, seed: str) -> Sequence[tuple[int, ...]]:
        chosen = list(self.prompts[domain])
        random.Random(f"{seed}:{domain}").shuffle(chosen)
        return chosen


def load_pool(folder: Path, target: Path, domains: Sequence[str]) -> PromptPool:
    """Reads and tokenises the prompts of some domains."""
    from tokenizers import Tokenizer  # type: ignore[import-untyped]

    path = target / "tokenizer.json"
    if not path.exists():
        raise BenchError(
            f"{target} has no tokenizer.json; give --target a model folder"
        )
    tokenizer = Tokenizer.from_file(str(path))
    prompts: dict[str, list[tuple[int, ...]]] = {}
    for domain in domains:
        try:
            texts = dict.fromkeys(
                read_prompts(folder, DOMAIN_FILES.get(domain, domain))
            )
        except StreamError as error:
            raise BenchError(
                f"{error}; give --prompts the folder that has it"
            ) from None
        encoded = [tuple(e.ids) for e in tokenizer.encode_batch(list(texts))]
        prompts[domain] = [ids for ids in encoded if ids]
    return PromptPool(prompts)
