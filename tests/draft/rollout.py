"""The draft as in serving: prefill over rows 0..t, then one row per decode step.

Slow and plain on purpose: the oracle of `Eagle3Draft.forward_steps`, written without
its attention, masks or packing.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor

from vllm_tide.draft.eagle3 import Eagle3Draft
from vllm_tide.draft.eagle3_config import LAYER
from vllm_tide.draft.module import Weights


class _Cache:
    """Keys and values of one request, appended row by row."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def attend(self, q: Tensor) -> Tensor:
        """Attend with q [n_h, d] to all rows so far."""
        group = q.shape[0] // self.keys[0].shape[0]
        k = torch.stack(self.keys).repeat_interleave(group, 1)  # [s, n_h, d]
        v = torch.stack(self.values).repeat_interleave(group, 1)
        p = (torch.einsum("hd,shd->hs", q, k) * q.shape[-1] ** -0.5).softmax(-1)
        return torch.einsum("hs,shd->hd", p, v)


def rollout_logits(
    draft: Eagle3Draft,
    w: Weights,
    tokens: Tensor,
    features: Tensor,
    row: int,
    num_steps: int,
    *,
    start: int = 0,
) -> Tensor:
    """Draft `num_steps` tokens after committed row `row`; differentiable.

    Args:
        w: From `Eagle3Draft.compute_weights`.
        tokens: int64 [S], S > row + 1.
        features: [S, A*H].
        row: Last row with a known feature; token row + 1 is the last sampled token.
        num_steps: Steps, the prefill included.
        start: Position of row 0.

    Returns:
        Logits [num_steps, V_d] in the dtype of the weights.
    """
    cache = _Cache()
    hidden = draft.combine(features[: row + 1].to(w["fc.weight"].dtype), w)
    h = logits = hidden[0]  # set by the prefill
    for t in range(row + 1):
        h, logits = _one_row(draft, w, cache, int(tokens[t + 1]), hidden[t], start + t)
    out = [logits]
    for i in range(1, num_steps):
        token = int(tokens[row + 1 + i])
        h, logits = _one_row(draft, w, cache, token, h, start + row + i)
        out.append(logits)
    return torch.stack(out)


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def _one_row(
    draft: Eagle3Draft,
    w: Weights,
    cache: _Cache,
    token: int,
    hidden: Tensor,
    position: int,
) -> tuple[Tensor, Tensor]:
    config, attn, mlp = draft.config, f"{LAYER}.self_attn", f"{LAYER}.mlp"
    eps, dim = config.rms_norm_eps, config.head_dim
    e = draft.embed[token].to(hidden.dtype)
    u = _rms(e, w[f"{LAYER}.input_layernorm.weight"], eps)
    v = _rms(hidden, w[f"{LAYER}.hidden_norm.weight"], eps)
    residual = v if config.norm_before_residual else hidden
    z = torch.cat([u, v])
    q, k, val = (
        F.linear(z, w[f"{attn}.{n}_proj.weight"]).view(-1, dim) for n in ("q", "k", "v")
    )
    angle = position * torch.tensor(config.rope.inverse_frequencies(dim)).double()
    cos, sin = (f(angle).float().repeat(2) for f in (torch.cos, torch.sin))

    def rotate(x: Tensor) -> Tensor:
        half = torch.cat([-x[:, dim // 2 :], x[:, : dim // 2]], dim=-1)
        return x * cos + half * sin

    cache.keys.append(rotate(k))
    cache.values.append(val)
    mixed = cache.attend(rotate(q)).flatten()
    a = residual + F.linear(mixed, w[f"{attn}.o_proj.weight"])
    post = _rms(a, w[f"{LAYER}.post_attention_layernorm.weight"], eps)
    gate = F.silu(F.linear(post, w[f"{mlp}.gate_proj.weight"]))
    up = F.linear(post, w[f"{mlp}.up_proj.weight"])
    o = a + F.linear(gate * up, w[f"{mlp}.down_proj.weight"])
    normed = _rms(o, w["norm.weight"], eps)
    return normed if config.norm_output else o, F.linear(normed, w["lm_head.weight"])
