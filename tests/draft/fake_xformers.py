"""The part of `xformers.ops.fmha` that the draft uses, from its documentation.

Replaces xformers where it cannot run, to test our arguments and the use of its results.
The backward pass uses only the inputs of a flash kernel: grad, out, lse.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor

rounding = 0  # places that the log-sum-exp is rounded up by


@dataclass
class BottomRight:
    """Block-diagonal, causal from the bottom right of each block."""

    q_seqlen: list[int]
    kv_seqlen: list[int]

    @classmethod
    def from_seqlens(
        cls, q_seqlen: list[int], kv_seqlen: list[int], *, device: torch.device
    ) -> BottomRight:
        assert all(0 < q <= k for q, k in zip(q_seqlen, kv_seqlen, strict=True))
        return cls(q_seqlen, kv_seqlen)

    def blocked(self) -> Tensor:
        """Bool [sum q, sum k], True = may not attend."""
        out = torch.ones(sum(self.q_seqlen), sum(self.kv_seqlen), dtype=torch.bool)
        row = col = 0
        for q, k in zip(self.q_seqlen, self.kv_seqlen, strict=True):
            block = torch.ones(q, k, dtype=torch.bool).triu(k - q + 1)
            out[row : row + q, col : col + k] = block
            row, col = row + q, col + k
        return out


def _scores(query: Tensor, key: Tensor, bias: BottomRight) -> Tensor:
    assert query.shape[0] == 1
    assert query.shape[2:] == key.shape[2:]
    s = torch.einsum("qhd,khd->hqk", query[0], key[0]) * query.shape[-1] ** -0.5
    return s.masked_fill(bias.blocked(), float("-inf"))


def memory_efficient_attention_forward_requires_grad(query, key, value, attn_bias):
    s = _scores(query, key, attn_bias)
    out = torch.einsum("hqk,khd->qhd", s.softmax(-1), value[0])[None]
    return out, torch.nn.functional.pad(s.logsumexp(-1), (0, rounding))[None]


def memory_efficient_attention_backward(
    grad, output, lse, query, key, value, attn_bias
):
    s = _scores(query, key, attn_bias)
    p = (s - lse[0, :, : query.shape[1], None]).exp()
    delta = (grad * output).sum(-1)[0].T  # [h, q]
    gv = torch.einsum("hqk,qhd->khd", p, grad[0])
    gp = torch.einsum("qhd,khd->hqk", grad[0], value[0])
    gs = p * (gp - delta[..., None]) * query.shape[-1] ** -0.5
    gq = torch.einsum("hqk,khd->qhd", gs, key[0])
    gk = torch.einsum("hqk,qhd->khd", gs, query[0])
    return gq[None], gk[None], gv[None]


fmha = SimpleNamespace(
    attn_bias=SimpleNamespace(BlockDiagonalCausalFromBottomRightMask=BottomRight),
    memory_efficient_attention_forward_requires_grad=(
        memory_efficient_attention_forward_requires_grad
    ),
    memory_efficient_attention_backward=memory_efficient_attention_backward,
)
