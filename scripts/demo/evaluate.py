"""Evaluate stage: held-out loss of a target per domain, in nats per token."""

from pathlib import Path

import numpy as np
import torch
from transformers import LlamaForCausalLM

from . import corpus, tokens

SEQUENCE_TOKENS = 512


@torch.no_grad()
def held_out_losses(
    model: LlamaForCausalLM, work: Path, num_sequences: int
) -> dict[str, float]:
    """Return the mean loss per domain over evenly spaced held-out sequences."""
    losses = {}
    for domain in corpus.DOMAINS:
        stream = tokens.stream(work, domain, "held_out").astype(np.int64)
        length = SEQUENCE_TOKENS + 1
        starts = np.arange(0, len(stream) - length, length)
        chosen = np.linspace(0, len(starts) - 1, min(num_sequences, len(starts)))
        total = 0.0
        for index in chosen.astype(int):
            row = torch.from_numpy(stream[starts[index] : starts[index] + length])
            logits = model(row[None, :-1], use_cache=False).logits[0]
            total += torch.nn.functional.cross_entropy(logits.float(), row[1:]).item()
        losses[domain] = round(total / len(chosen), 4)
    return losses


def evaluate(work: Path, folder: Path, num_sequences: int) -> dict[str, float]:
    """Load an exported target and return its held-out losses."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return held_out_losses(model, work, num_sequences)
