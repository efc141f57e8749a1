"""The requests of a run: which prompts, in which order, at which concurrency.

Streams are deterministic: every arm of a run replays exactly the same stream. A
*segment* is drained before the next one starts, so that the server's counters can be
read before and after it without a request in flight.

The suites `control` and `long` send token ids, not text: a truncated prompt then has an
exact length, and the API server, which shares the engine's cores, tokenises nothing.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.harness.common import BenchError, StreamError

# Number of requests in flight, one entry per block of requests, repeated.
BLOCK_REQUESTS = 4
CONCURRENCY_CYCLE = (1, 2, 4, 3)


@dataclass(frozen=True, slots=True)
class StreamRequest:
    """One request of the stream."""

    index: int
    segment: str  # unique although domains may repeat
    domain: str
    prompt: str
    max_tokens: int
    concurrency: int  # maximum requests in flight when this one is sent
    ignore_eos: bool = True  # exactly `max_tokens` tokens


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """Options of the quickstart's stream, with one domain after the other."""

    domains: tuple[str, ...] = ("math", "sql")
    counts: tuple[int, ...] = (48, 240)
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


def chat_prompts(folder: Path, domain: str, target: Path) -> list[str]:
    """Return prompts of a domain in the model's chat template, if it has one."""
    prompts = read_prompts(folder, domain)
    config = target / "tokenizer_config.json"
    if not config.exists() or "chat_template" not in json.loads(config.read_text()):
        return prompts
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target)
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}],
            add_generation_prompt=True,
            tokenize=False,
        )
        for prompt in prompts
    ]


def choose_prompts(
    prompts: Sequence[str], count: int, domain: str, seed: int
) -> list[tuple[str, str]]:
    """Return `count` distinct prompts with their domain, shuffled by the seed."""
    distinct = list(dict.fromkeys(prompts))
    if len(distinct) < count:
        raise StreamError(
            f"domain {domain!r} has {len(distinct)} distinct prompts, fewer than the "
            f"{count} of the stream; reduce the number of requests"
        )
    rng = random.Random(f"{seed}:{domain}")
    rng.shuffle(distinct)
    return [(domain, prompt) for prompt in distinct[:count]]


def build_stream(
    prompts: Mapping[str, Sequence[str]], options: StreamOptions, num_more: int = 0
) -> tuple[list[StreamRequest], list[StreamRequest]]:
    """Build a stream, and `num_more` other requests of its first domain.

    The model may end an answer before `max_tokens` tokens.

    Raises:
        StreamError: A domain has too few prompts.
    """
    o = options
    stretches = list(zip(o.domains, o.counts, strict=True))
    if num_more:
        stretches.append((o.domains[0], num_more))
    left = {}
    for domain in o.domains:
        count = sum(number for name, number in stretches if name == domain)
        left[domain] = choose_prompts(prompts[domain], count, domain, o.seed)
    requests: list[StreamRequest] = []
    for place, (domain, count) in enumerate(stretches):
        chosen, left[domain] = left[domain][:count], left[domain][count:]
        name = segment_name(place, domain)
        requests += _stretch(
            chosen, len(requests), name, o.max_tokens, o.concurrency_cycle, False
        )
    end = len(requests) - num_more
    return requests[:end], requests[end:]


def _stretch(
    chosen: Sequence[tuple[str, str]],
    first: int,
    segment: str,
    max_tokens: int,
    concurrency: Sequence[int],
    ignore_eos: bool = True,
) -> list[StreamRequest]:
    """Return the requests of a segment; the concurrency cycle starts with it."""
    return [
        StreamRequest(
            first + place,
            segment,
            domain,
            prompt,
            max_tokens,
            concurrency[place // BLOCK_REQUESTS % len(concurrency)],
            ignore_eos,
        )
        for place, (domain, prompt) in enumerate(chosen)
    ]


def segments(stream: Sequence[StreamRequest]) -> list[list[StreamRequest]]:
    """Split the stream into its segments, in order."""
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
        raise BenchError(f"{error}; set --prompts to a folder with them") from None


def shift_stream(
    prompts: Mapping[str, Sequence[str]],
    counts: Sequence[int],
    max_tokens: int,
    concurrency: Sequence[int],
    seed: int,
) -> list[StreamRequest]:
    """Build a stream of the domains of `prompts`, one after the other."""
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
    """Return the name of a segment, unique although domains may repeat."""
    return f"{place} {domain}"


# `home`: training domain of the committed draft; `shifted`: another domain.
DOMAIN_FILES: Mapping[str, str] = {"home": "math", "shifted": "sql"}


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request of token ids."""

    index: int  # index in the cell's sequence; the same request in every arm
    segment: str  # domain
    prompt: tuple[int, ...]  # token ids
    max_tokens: int  # output tokens
    ignore_eos: bool = True  # exactly `max_tokens` tokens


@dataclass(frozen=True, slots=True)
class PromptPool:
    """Tokenised prompts by domain."""

    prompts: Mapping[str, Sequence[tuple[int, ...]]]

    def sequence(self, domain: str, seed: str) -> Sequence[tuple[int, ...]]:
        chosen = list(self.prompts[domain])
        random.Random(f"{seed}:{domain}").shuffle(chosen)
        return chosen


def load_pool(folder: Path, target: Path, domains: Sequence[str]) -> PromptPool:
    """Read and tokenise the prompts of some domains."""
    from tokenizers import Tokenizer  # type: ignore[import-untyped]

    path = target / "tokenizer.json"
    if not path.exists():
        raise BenchError(
            f"{target} has no tokenizer.json; set --target to a model folder"
        )
    tokenizer = Tokenizer.from_file(str(path))
    prompts: dict[str, list[tuple[int, ...]]] = {}
    for domain in domains:
        try:
            name = DOMAIN_FILES.get(domain, domain)
            texts = dict.fromkeys(chat_prompts(folder, name, target))
        except StreamError as error:
            raise BenchError(f"{error}; set --prompts to a folder with them") from None
        encoded = [tuple(e.ids) for e in tokenizer.encode_batch(list(texts))]
        prompts[domain] = [ids for ids in encoded if ids]
    return PromptPool(prompts)
