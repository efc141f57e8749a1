"""Traces: the target's own continuations with the features a draft trains on.

What the engine would capture while serving these prompts: aux features (the
residual stream ENTERING each listed layer, as in vLLM) and the hidden state
after the final norm.  Computed by one forward pass over prompt and continuation.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from .generate import BATCH, Generator
from .prompts import LOOP_DISTINCT_4GRAMS, candidates, distinct_4grams


@dataclass(frozen=True)
class Trace:
    """One finished request.

    Attributes:
        tokens: int64 [S], prompt then continuation.
        num_prompt_tokens: Length of the prompt.
        features: bf16 [S, 3H], aux features side by side.
        hidden: bf16 [S, H], after the target's final norm.
    """

    tokens: Tensor
    num_prompt_tokens: int
    features: Tensor
    hidden: Tensor


@torch.no_grad()
def capture(
    generator: Generator, rows: Sequence[list[int]], layer_ids: Sequence[int]
) -> list[tuple[Tensor, Tensor]]:
    """Return (features, hidden) of each row; rows are padded on the right."""
    width = max(len(row) for row in rows)
    ids = torch.full((len(rows), width), generator.eos)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
    # Right padding under a causal mask needs no attention mask.
    states = generator.model.model(
        ids, use_cache=False, output_hidden_states=True
    ).hidden_states
    features = torch.cat([states[i] for i in layer_ids], dim=-1).bfloat16()
    hidden = states[-1].bfloat16()  # transformers applies the final norm to this one
    return [
        (features[i, : len(row)].clone(), hidden[i, : len(row)].clone())
        for i, row in enumerate(rows)
    ]


def collect(
    work: Path,
    generator: Generator,
    domain: str,
    split: str,
    layer_ids: Sequence[int],
    *,
    num_prompts: int,
    num_tokens: int,
    temperature: float,
    skip: int = 0,
) -> Iterator[Trace]:
    """Yield traces of the domain's prompts ``skip .. skip + num_prompts``.

    Continuations that loop are left out: their tokens teach a draft nothing and
    would crowd out the others.
    """
    stream = candidates(work, domain, split)
    texts = [t for _, t in islice(stream, skip, skip + num_prompts)]
    prompts = generator.ids(texts)
    for begin in range(0, len(prompts), BATCH):
        part = prompts[begin : begin + BATCH]
        continuations = generator.continue_ids(
            part, num_tokens, temperature=temperature, seed=skip + begin
        )
        pairs = [
            (prompt, new)
            for prompt, new in zip(part, continuations, strict=True)
            if len(new) >= 8 and distinct_4grams(new) >= LOOP_DISTINCT_4GRAMS
        ]
        if not pairs:
            continue
        rows = [prompt + new for prompt, new in pairs]
        captured = capture(generator, rows, layer_ids)
        for (prompt, _), row, (features, hidden) in zip(
            pairs, rows, captured, strict=True
        ):
            yield Trace(torch.tensor(row), len(prompt), features, hidden)
