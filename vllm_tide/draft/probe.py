"""A forward pass over a few rows, from published tensors, to detect an overflow.

Unlike `Eagle3Draft` it does not copy the draft, for which a server has no memory. It
leaves out rotary embedding, which does not change magnitudes. The tensors alone do not
show whether the logits overflow.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor

from vllm_tide.draft.checkpoint import canonical_name
from vllm_tide.draft.config import Eagle3Config
from vllm_tide.draft.eagle3 import LAYER

ROWS = 4


@torch.no_grad()
def probe_rows(
    config: Eagle3Config, tensors: Mapping[str, Tensor], dtype: torch.dtype
) -> Tensor:
    """Compute logits of random rows with a fixed seed.

    Args:
        tensors: On the host, by checkpoint name; without `lm_head.weight` the result is
            the output rows before it.
        dtype: The server's compute dtype.

    Returns:
        [ROWS, V_d] or [ROWS, H].
    """
    w = {canonical_name(name): tensor for name, tensor in tensors.items()}
    random = torch.Generator().manual_seed(0)

    def rows(size: int) -> Tensor:
        return torch.randn(ROWS, size, generator=random).to(dtype)

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, w[f"{name}.weight"].to(dtype))

    def norm(x: Tensor, name: str) -> Tensor:
        weight = w[f"{name}.weight"].float()
        return F.rms_norm(x.float(), weight.shape, weight, config.rms_norm_eps).to(
            dtype
        )

    features = rows(config.feature_size)
    if config.norm_before_fc:
        features = norm(features, "input_norm")
    if config.fc_norm:
        parts = features.chunk(config.num_aux, dim=-1)
        features = torch.cat([norm(p, f"fc_norm.{i}") for i, p in enumerate(parts)], -1)
    hidden = linear(features, "fc")
    normed = norm(hidden, f"{LAYER}.hidden_norm")
    residual = normed if config.norm_before_residual else hidden
    embedded = norm(rows(config.hidden_size), f"{LAYER}.input_layernorm")
    z = torch.cat([embedded, normed], dim=-1)
    q, k, v = (
        linear(z, f"{LAYER}.self_attn.{part}_proj")
        .view(1, ROWS, -1, config.head_dim)
        .transpose(1, 2)
        for part in "qkv"
    )
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    mixed = mixed.transpose(1, 2).reshape(ROWS, -1)
    x = residual + linear(mixed, f"{LAYER}.self_attn.o_proj")
    post = norm(x, f"{LAYER}.post_attention_layernorm")
    gate, up = (linear(post, f"{LAYER}.mlp.{part}_proj") for part in ("gate", "up"))
    x = x + linear(F.silu(gate) * up, f"{LAYER}.mlp.down_proj")
    out = norm(x, "norm")
    return linear(out, "lm_head") if "lm_head.weight" in w else out
