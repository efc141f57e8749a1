"""A forward pass over a few rows, from published tensors, to detect an overflow.

Unlike a `Draft` it does not copy the tensors, for which a server has no memory. That of
EAGLE-3 leaves out rotary embedding, which does not change magnitudes. The tensors alone
do not show whether the logits overflow.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor

from vllm_tide.draft.attention import packed_attention
from vllm_tide.draft.config import DraftConfig
from vllm_tide.draft.dflash import draft_blocks
from vllm_tide.draft.dflash_config import DFlashConfig
from vllm_tide.draft.eagle3_config import LAYER, Eagle3Config
from vllm_tide.draft.kind import canonical
from vllm_tide.draft.module import rms_norm
from vllm_tide.draft.rows import RowLayout

ROWS = 4


@torch.no_grad()
def probe_rows(
    config: DraftConfig, tensors: Mapping[str, Tensor], dtype: torch.dtype
) -> Tensor:
    """Compute logits of random rows with a fixed seed.

    Args:
        tensors: On the host, by checkpoint name; without `lm_head.weight` the result is
            the output rows before it.
        dtype: The server's compute dtype.

    Returns:
        [ROWS, V_d] or [ROWS, H].
    """
    w = canonical(tensors)
    if isinstance(config, DFlashConfig):
        return _dflash_rows(config, {n: t.to(dtype) for n, t in w.items()}, dtype)
    assert isinstance(config, Eagle3Config)  # noqa: S101 - there are two kinds
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


def _dflash_rows(
    config: DFlashConfig, w: Mapping[str, Tensor], dtype: torch.dtype
) -> Tensor:
    random = torch.Generator().manual_seed(0)
    features = torch.randn(ROWS, config.feature_size, generator=random).to(dtype)
    slots = torch.randn(1, ROWS + 1, config.hidden_size, generator=random).to(dtype)
    context = F.linear(features, w["fc.weight"])
    context = rms_norm(context, w["hidden_norm.weight"], config.rms_norm_eps)
    frequencies = config.rope.inverse_frequencies(config.head_dim)
    out = draft_blocks(
        config,
        dict(w),
        context,
        slots,
        torch.arange(ROWS),
        torch.tensor([ROWS - 1]),
        RowLayout([0, ROWS], [ROWS], [], []),
        torch.tensor(frequencies),
        packed_attention,
    )[0]
    return F.linear(out, w["lm_head.weight"]) if "lm_head.weight" in w else out
