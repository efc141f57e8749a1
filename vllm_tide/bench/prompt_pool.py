"""Prompts as token ids, drawn by a seed, at the lengths wanted.

Ids, not text: a prompt cut or joined to a length then has exactly that length, and
the API server has no text to tokenise while it shares the engine's cores.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .control_arms import BenchError
from .stream import StreamError, read_prompts

# What the demo's draft was trained on, and what it was not.
DOMAIN_FILES: Mapping[str, str] = {"matched": "python", "unmatched": "c"}


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request of a closed loop or of a trace.

    Attributes:
        index: Place in the cell's sequence; the same request in every arm.
        segment: Domain.
        prompt: Token ids.
        max_tokens: Output tokens, exactly.
        arrival_s: Seconds after the trace's start; 0 in a closed loop.
    """

    index: int
    segment: str
    prompt: tuple[int, ...]
    max_tokens: int
    arrival_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PromptPool:
    """Tokenised prompts by domain."""

    prompts: Mapping[str, Sequence[tuple[int, ...]]]

    def sequence(self, domain: str, seed: str) -> Sequence[tuple[int, ...]]:
        """Return the domain's prompts in an order fixed by the seed."""
        chosen = list(self.prompts[domain])
        random.Random(f"{seed}:{domain}").shuffle(chosen)  # noqa: S311 - not cryptographic
        return chosen


def load_pool(folder: Path, target: Path, domains: Sequence[str]) -> PromptPool:
    """Read and tokenise the prompts of some domains.

    Args:
        folder: Holds ``<domain>.jsonl.gz``; ``matched`` and ``unmatched`` stand for
            the files of ``DOMAIN_FILES``.
        target: Folder of the served model, with its ``tokenizer.json``.
        domains: Names of domains.

    Raises:
        BenchError: A file is missing.
    """
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


def closed_loop_request(
    prompts: Sequence[tuple[int, ...]],
    domain: str,
    index: int,
    max_tokens: int,
    max_input_tokens: int,
) -> BenchRequest:
    """Return the request of a place in the sequence, which has no end."""
    prompt = prompts[index % len(prompts)][:max_input_tokens]
    return BenchRequest(index, domain, prompt, max_tokens)


def joined_prompt(
    prompts: Sequence[tuple[int, ...]], start: int, num_tokens: int
) -> tuple[int, ...]:
    """Return consecutive prompts joined and cut to exactly ``num_tokens``."""
    ids: list[int] = []
    place = start
    while len(ids) < num_tokens:
        ids.extend(prompts[place % len(prompts)])
        place += 1
    return tuple(ids[:num_tokens])
