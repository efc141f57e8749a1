"""DFlash draft: a block of tokens from one pass (arXiv 2602.06036).

The computation of vLLM 0.32's `DFlashQwen3ForCausalLM`, written for training. The
context is c_t = hidden_norm(fc(g_t)), one row per target token; every layer has keys
and values of it. The queries are a block of slots: the known token x_a at anchor a,
then K mask tokens at a + 1 .. a + K. All slots see the context before a and each other.
Slot j >= 1 predicts x_{a+j}.

Identity with the rows of EAGLE-3: slot j of anchor t + 1 is step j - 1 of row t. It has
the same context (features up to t), label and teacher. In attention the block's own
keys are the diagonals; as all slots see the same keys, a block is one query row with
K + 1 times as many attention heads.

Shapes as in `draft.module`; L layers, n blocks of B = K + 1 slots.
"""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor

from vllm_tide.draft.attention import Attention, attention_backend
from vllm_tide.draft.dflash_config import MAX_BLOCKS, DFlashConfig
from vllm_tide.draft.module import Draft, Weights, angles, rms_norm, rotate
from vllm_tide.draft.rows import RowLayout, Rows, StepRows

_LONG_BLOCK = 12
_DECAY, _LONG_DECAY = math.exp(-1 / 4), math.exp(-1 / 7)
"""Weight of slot j is exp(-(j - 1) / gamma): 4 for blocks of 8, 7 for blocks of 16."""


class DFlashDraft(Draft):
    """A trainable DFlash draft."""

    config: DFlashConfig

    @property
    def step_decay(self) -> float:
        return _LONG_DECAY if self.config.block_size > _LONG_BLOCK else _DECAY

    def choose_rows(self, steps: list[StepRows]) -> list[StepRows]:
        """Choose `MAX_BLOCKS` rows at random, from torch's generator."""
        rows = steps[0].active
        if rows.numel() <= MAX_BLOCKS:
            return steps
        chosen = torch.zeros(int(rows[-1]) + 1, dtype=torch.bool)
        chosen[rows[torch.randperm(rows.numel())[:MAX_BLOCKS]]] = True
        out = []
        for step in steps:
            trained = step.active[step.loss]
            active = step.active[chosen[step.active]]
            loss = torch.searchsorted(active, trained[chosen[trained]])
            out.append(StepRows(active, loss))
        return out

    def forward_steps(
        self,
        rows: Rows,
        w: Weights,
        *,
        depth: int | None = None,
        attention: str = "auto",
    ) -> list[Tensor]:
        """See `Draft`: one pass over blocks of `depth` masked tokens."""
        tokens, steps, dtype = rows.tokens, rows.steps, w["fc.weight"].dtype
        anchors, width = steps[0].active, 1 + (depth or len(steps))
        mask = self.config.mask_token_id
        slots = torch.full((anchors.numel(), width), mask, device=tokens.device)
        slots[:, 0] = tokens[rows.layout.ahead(anchors, 0)]
        out = draft_blocks(
            self.config,
            w,
            self.combine(rows.features.to(dtype), w),
            self.embed[slots].to(dtype),
            rows.positions,
            anchors,
            rows.layout,
            self._inv_freq,
            attention_backend(attention, tokens.device.type),
        )
        outputs = []
        for i, step in enumerate(steps):
            at = torch.searchsorted(anchors, step.active[step.loss])
            outputs.append(out[at, i])
        return outputs

    def combine(self, features: Tensor, w: Weights) -> Tensor:
        """Compute the context `hidden_norm(fc(g))`."""
        hidden = F.linear(features, w["fc.weight"])
        return rms_norm(hidden, w["hidden_norm.weight"], self.config.rms_norm_eps)


def draft_blocks(
    config: DFlashConfig,
    w: Weights,
    context: Tensor,
    slots: Tensor,
    positions: Tensor,
    rows: Tensor,
    layout: RowLayout,
    inv_freq: Tensor,
    attend: Attention,
) -> Tensor:
    """Compute the normed output rows of the masked slots of some blocks.

    Args:
        w: Tensors by parameter, in the compute dtype.
        context: [R, H], `DFlashDraft.combine` of all rows.
        slots: [n, B, H] embedded tokens.
        positions: int64 [R], of the context.
        rows: int64 [n], sorted: the last context row that each block sees.
        inv_freq: [d / 2], angle per position.

    Returns:
        [n, B - 1, H].
    """
    n, width, hidden = slots.shape
    eps, kv = config.rms_norm_eps, config.num_key_value_heads
    ahead = torch.arange(1, width + 1, device=rows.device)
    of_context = angles(positions, inv_freq)
    of_slots = angles((positions[rows][:, None] + ahead).flatten(), inv_freq)

    def by_block(x: Tensor) -> Tensor:
        return x.unflatten(0, (n, width))

    x = slots
    for i in range(config.num_layers):
        layer = f"layers.{i}."
        heads = partial(_heads, config, w, f"{layer}self_attn.")
        normed = rms_norm(x, w[f"{layer}input_layernorm.weight"], eps)
        normed = normed.reshape(n * width, hidden)
        queries = by_block(heads(normed, "q", of_slots))
        if i == config.num_layers - 1:  # the known token's output is not used
            queries, x = queries[:, 1:], x[:, 1:]
        mixed = attend(
            _as_heads(queries, kv),
            heads(context, "k", of_context),
            heads(context, "v"),
            by_block(heads(normed, "k", of_slots)).transpose(0, 1),
            by_block(heads(normed, "v")).transpose(0, 1),
            rows,
            layout,
        )
        mixed = _as_slots(mixed, kv, x.shape[1]).flatten(2)
        x = x + F.linear(mixed, w[f"{layer}self_attn.o_proj.weight"])
        post = rms_norm(x, w[f"{layer}post_attention_layernorm.weight"], eps)
        gate = F.silu(F.linear(post, w[f"{layer}mlp.gate_proj.weight"]))
        up = F.linear(post, w[f"{layer}mlp.up_proj.weight"])
        x = x + F.linear(gate * up, w[f"{layer}mlp.down_proj.weight"])
    return rms_norm(x, w["norm.weight"], eps)


def _heads(
    config: DFlashConfig,
    w: Weights,
    prefix: str,
    x: Tensor,
    part: str,
    rotation: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Project [m, H] to [m, n_h, d]; queries and keys are normed and rotated."""
    y = F.linear(x, w[f"{prefix}{part}_proj.weight"])
    y = y.view(x.shape[0], -1, config.head_dim)
    if rotation is None:
        return y
    normed = rms_norm(y, w[f"{prefix}{part}_norm.weight"], config.rms_norm_eps)
    return rotate(normed, *rotation)


def _as_heads(x: Tensor, kv: int) -> Tensor:
    """Convert slots to further attention heads: [n, B, n_h, d] to [n, B * n_h, d].

    Those with the same keys stay together, as attention expects them.
    """
    n, width, heads, dim = x.shape
    grouped = x.view(n, width, kv, heads // kv, dim).permute(0, 2, 1, 3, 4)
    return grouped.reshape(n, width * heads, dim)


def _as_slots(x: Tensor, kv: int, width: int) -> Tensor:
    """Undo `_as_heads`: [n, B * n_h, d] to [n, B, n_h, d]."""
    n, _, dim = x.shape
    grouped = x.view(n, kv, width, -1, dim).permute(0, 2, 1, 3, 4)
    return grouped.reshape(n, width, -1, dim)
