"""The top-k teacher in Torch: what both adapters keep of a step's logits on a CPU."""

from __future__ import annotations

import torch


def top_k_teacher(
    logits: torch.Tensor, most: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The target's most likely tokens, and one bucket for the rest.

    Args:
        logits: [n, V], raw.
        most: k; at most V of it is used.

    Returns:
        Ids int32 [n, k], log-probabilities float32 [n, k], log-probability of all
        others float32 [n].
    """
    k = min(most, logits.shape[-1])
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    top, ids = logprobs.topk(k, dim=-1)
    tail = torch.log1p(-top.exp().sum(dim=-1).clamp(max=1.0))
    return ids.to(torch.int32), top, tail
