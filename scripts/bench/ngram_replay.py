#!/usr/bin/env python
"""Replay texts: how many tokens a step do n-gram look-ups give?

    ngram_replay.py --model DIR [--text FILE ...] [--json FILE]

Each text stands for the output of a request. At every position the tokens after an
earlier occurrence of the latest ones are proposed, and accepted as far as they agree
with the text. Compares look-ups of the memory and of vLLM's `NgramProposer`
(`prompt_lookup_min`, `prompt_lookup_max`), which returns no length of the match.
`net` is accepted tokens per step, less a cost for each verified one. Depths are chosen
by the acceptance so far: by length of the match (memory), or by depth alone (vLLM).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer
from vllm.v1.spec_decode.ngram_proposer import (
    _find_longest_matched_ngram_and_propose_tokens as find_ngram,
)

from vllm_tide.memory.ngram import NgramIndex, Text
from vllm_tide.memory.source import MATCHES

ROOT = Path(__file__).parents[2]
K = 5
COSTS = (0.05, 0.15, 0.3)
MAX_TOKENS = 4000
Lookup = Callable[[np.ndarray, int], tuple[np.ndarray, int]]


def memory() -> Lookup:
    index, table = NgramIndex(1, 2 * MAX_TOKENS, K), np.zeros((1, MAX_TOKENS), np.int32)
    slot, known = np.zeros(1, np.int64), 0

    def propose(tokens: np.ndarray, end: int) -> tuple[np.ndarray, int]:
        nonlocal known
        table[0, :end] = tokens[:end]
        new = tokens[None, known:end]
        text = Text(table, np.array([known]), new, np.array([end - known]))
        proposed, match = index.propose(slot, text)
        known = end
        return proposed[0], int(match[0])

    return propose


def vllm(shortest: int, longest: int) -> Lookup:
    def propose(tokens: np.ndarray, end: int) -> tuple[np.ndarray, int]:
        proposed = find_ngram(tokens[:end], shortest, longest, 2 * MAX_TOKENS, K)
        return proposed, MATCHES[0] if len(proposed) else 0

    return propose


def steps(tokens: np.ndarray, propose: Lookup) -> Iterator[tuple[int, int]]:
    """Yield match length and accepted tokens of each step."""
    end = min(64, len(tokens) // 2)
    while end < len(tokens) - K:
        proposed, match = propose(tokens, end)
        proposed = proposed[: K if match else 0]
        same = proposed == tokens[end : end + len(proposed)]
        accepted = int(np.logical_and.accumulate(same).sum())
        yield match, accepted
        end += accepted + 1


def net(rows: list[tuple[int, int]], cost: float) -> float:
    """Return accepted tokens per step, less `cost` for each verified one."""
    tries, hits = np.zeros((2, len(MATCHES) + 1, K))
    total = 0.0
    for match, accepted in rows:
        if not match:
            continue
        bucket = int(np.searchsorted(MATCHES, match, side="right"))
        mean = (hits[bucket].sum() + 3.2) / (tries[bucket].sum() + 8)
        chance = (hits[bucket] + 8 * mean) / (tries[bucket] + 8)
        value = np.cumsum(np.cumprod(chance) - cost)
        depth = int(np.argmax(value)) + 1 if value.max() > 0 else 0
        total += min(accepted, depth) - cost * depth
        tries[bucket, : accepted + 1] += 1
        hits[bucket, :accepted] += 1
    return total / len(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="folder with a tokenizer")
    parser.add_argument("--text", nargs="*", help="default: Python files and READMEs")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    paths = args.text or sorted(
        path
        for pattern in ("vllm_tide/*/*.py", "vllm_tide/*/README.md")
        for path in ROOT.glob(pattern)
    )
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    texts = [
        np.array(tokenizer(Path(path).read_text())["input_ids"][:MAX_TOKENS], np.int32)
        for path in paths
    ]
    texts = [tokens for tokens in texts if len(tokens) > 100]
    print(f"{len(texts)} texts, {sum(map(len, texts))} tokens, K = {K}")
    lookups = {"memory": memory}
    for shortest, longest in ((2, 5), (2, 8), (3, 8), (5, 8)):
        name = f"vLLM, {shortest} to {longest}"
        lookups[name] = lambda low=shortest, high=longest: vllm(low, high)
    report = []
    for name, lookup in lookups.items():
        rows = [row for tokens in texts for row in steps(tokens, lookup())]
        accepted = sum(accepted for _, accepted in rows) / len(rows)
        gains = {str(cost): round(net(rows, cost), 4) for cost in COSTS}
        report.append({"lookup": name, "tokens_per_step": 1 + accepted, "net": gains})
        print(f"{name:14s} {1 + accepted:.3f} tokens/step, net by cost {gains}")
    if args.json:
        args.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
