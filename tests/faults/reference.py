"""Prompts with the right output, from the target without speculation.

Computed by Transformers in fp32. An output is cut where the two best tokens are so
close that other kernels may swap them; so any difference in serving is a wrong token.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.harness.stream import load_pool

PROMPT_TOKENS = 40
WHOLE_TOKENS = 144
MOST_TOKENS = 176
LEAST_TOKENS = 24
BATCH = 16
"""Prompts computed at a time."""
CLEAR_GAP = 2e-3
"""Logit gap below which fp32 kernels may choose the other token."""


@dataclass(frozen=True, slots=True)
class Known:
    """A prompt and its greedy output up to the first near tie."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]


def known_outputs(
    target: Path,
    prompts: Path,
    domains: tuple[str, ...],
    count: int,
    seed: int,
    *,
    whole: bool = False,
) -> list[Known]:
    """Compute the greedy outputs of some prompts.

    Args:
        target: Folder of the served model.
        prompts: Folder of ``<domain>.jsonl.gz``.
        domains: Which of them.
        count: Prompts to try; those with an early near tie are left out.
        seed: Of the choice.
        whole: Take prompts of at most `WHOLE_TOKENS` tokens as they are, instead of the
            first `PROMPT_TOKENS` of each.

    Raises:
        ValueError: Too few prompts are left to serve a load.
        BenchError: A file is missing.
    """
    pool = load_pool(prompts, target, domains)
    ids = [p for d in domains for p in pool.prompts[d]]
    if whole:
        ids = sorted({p for p in ids if len(p) <= WHOLE_TOKENS})
    else:
        ids = sorted({p[:PROMPT_TOKENS] for p in ids if len(p) >= PROMPT_TOKENS})
    random.Random(seed).shuffle(ids)  # noqa: S311 - not cryptographic
    known = [k for k in _greedy(target, ids[:count]) if len(k.output) >= LEAST_TOKENS]
    if len(known) < 4 or max(len(k.output) for k in known) < MOST_TOKENS // 2:
        raise ValueError(f"only {len(known)} of {count} prompts have a clear output")
    return known


def _greedy(target: Path, prompts: list[tuple[int, ...]]) -> list[Known]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    model.generation_config.eos_token_id = None  # as `ignore_eos`
    batches = [prompts[at : at + BATCH] for at in range(0, len(prompts), BATCH)]
    return [known for batch in batches for known in _greedy_batch(model, batch)]


def _greedy_batch(model: Any, prompts: list[tuple[int, ...]]) -> list[Known]:
    import torch

    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    with torch.no_grad():
        out = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=MOST_TOKENS,
            do_sample=False,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
    top = torch.stack([step.topk(2).values for step in out.logits])
    close = (top[..., 0] - top[..., 1] < CLEAR_GAP).T  # [prompts, tokens]
    rows = out.sequences[:, ids.shape[1] :].tolist()
    lengths = [_first(row.tolist()) for row in close]
    return [
        Known(prompt, tuple(row[:length]))
        for prompt, row, length in zip(prompts, rows, lengths, strict=True)
    ]


def _first(close: list[bool]) -> int:
    return close.index(True) if True in close else len(close)
