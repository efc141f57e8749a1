"""EAGLE-3 draft: `fc`, one Llama decoder layer over [token; feature], `lm_head`.

The computation of vLLM 0.32's `Eagle3LlamaForCausalLM`, written for training: packed
documents, training-time test. Shapes as in `draft.module`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor

from vllm_tide.draft.attention import attention_backend
from vllm_tide.draft.eagle3_config import LAYER, Eagle3Config
from vllm_tide.draft.module import Draft, Weights, angles, rms_norm, rotate
from vllm_tide.draft.rows import Rows

STEP_DECAY = 0.8  # weight of each further training-time-test step (EAGLE-3)


class Eagle3Draft(Draft):
    """A trainable EAGLE-3 draft."""

    config: Eagle3Config
    trains_branches = True

    @property
    def step_decay(self) -> float:
        return STEP_DECAY

    def compute_weights(self, dtype: torch.dtype) -> Weights:
        w = super().compute_weights(dtype)
        attn, mlp = f"{LAYER}.self_attn", f"{LAYER}.mlp"
        w["kv"] = torch.cat([w[f"{attn}.{n}_proj.weight"] for n in "kv"])
        w["gate_up"] = torch.cat([w[f"{mlp}.{n}_proj.weight"] for n in ("gate", "up")])
        return w

    def forward_steps(
        self,
        rows: Rows,
        w: Weights,
        *,
        depth: int | None = None,
        attention: str = "auto",
    ) -> list[Tensor]:
        """See `Draft`: all training-time-test steps, step i embeds token t + 1 + i.

        Branch rows are computed in the same pass and do not change trunk rows
        (eagle3-training.md c.8).
        """
        tokens, layout, steps = rows.tokens, rows.layout, rows.steps
        dtype = w["fc.weight"].dtype
        attend = attention_backend(attention, tokens.device.type)
        last = tokens.numel() - 1
        every = torch.arange(layout.num_rows, device=tokens.device)
        hidden = self.combine(rows.features.to(dtype), w)  # [R,H]
        active = steps[0].active
        keys: list[Tensor] = []
        values: list[Tensor] = []
        k0 = v0 = hidden  # set at step 0
        outputs: list[Tensor] = []
        for i, step in enumerate(steps):
            if i > 0 and step.active.numel() != active.numel():
                keep = torch.searchsorted(active, step.active)
                hidden = hidden[keep]
                keys = [k[keep] for k in keys]
                values = [v[keep] for v in values]
            active = step.active
            computed = every if i == 0 else active
            following = tokens[layout.ahead(computed, i).clamp_(max=last)]
            z, residual = self._layer_input(following, hidden, w, dtype)
            cos, sin = angles(rows.positions[computed] + i, self._inv_freq)
            k, v = self._keys_values(z, cos, sin, w)
            if i == 0:
                k0, v0 = k, v
                if active.numel() != every.numel():
                    z, residual = z[active], residual[active]
                    cos, sin = cos[active], sin[active]
            else:
                keys.append(k)
                values.append(v)
            q = self._queries(z, cos, sin, w)
            kd = torch.stack(keys) if keys else None
            vd = torch.stack(values) if values else None
            mixed = attend(q, k0, v0, kd, vd, active, layout)
            out, normed = self._layer_output(mixed.flatten(1), residual, w)
            hidden = normed if self.config.norm_output else out
            outputs.append(
                normed if step.loss.numel() == active.numel() else normed[step.loss]
            )
        return outputs

    def combine(self, features: Tensor, w: Weights) -> Tensor:
        """Compute `h^(0) = fc(g)`: [n, A*H] to [n, H]."""
        config = self.config
        if config.norm_before_fc:
            features = self._norm(features, w["input_norm.weight"])
        if config.fc_norm:
            parts = features.chunk(config.num_aux, dim=-1)
            features = torch.cat(
                [
                    self._norm(part, w[f"fc_norm.{i}.weight"])
                    for i, part in enumerate(parts)
                ],
                dim=-1,
            )
        return F.linear(features, w["fc.weight"])

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, self.config.rms_norm_eps)

    def _layer_input(
        self, following: Tensor, hidden: Tensor, w: Weights, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        e = self.embed[following].to(dtype)
        u = self._norm(e, w[f"{LAYER}.input_layernorm.weight"])
        v = self._norm(hidden, w[f"{LAYER}.hidden_norm.weight"])
        residual = v if self.config.norm_before_residual else hidden
        return torch.cat([u, v], dim=-1), residual

    def _keys_values(
        self, z: Tensor, cos: Tensor, sin: Tensor, w: Weights
    ) -> tuple[Tensor, Tensor]:
        kv = F.linear(z, w["kv"]).view(z.shape[0], 2, -1, self.config.head_dim)
        return rotate(kv[:, 0], cos, sin), kv[:, 1]

    def _queries(self, z: Tensor, cos: Tensor, sin: Tensor, w: Weights) -> Tensor:
        q = F.linear(z, w[f"{LAYER}.self_attn.q_proj.weight"])
        return rotate(q.view(z.shape[0], -1, self.config.head_dim), cos, sin)

    def _layer_output(
        self, mixed: Tensor, residual: Tensor, w: Weights
    ) -> tuple[Tensor, Tensor]:
        a = residual + F.linear(mixed, w[f"{LAYER}.self_attn.o_proj.weight"])
        post = self._norm(a, w[f"{LAYER}.post_attention_layernorm.weight"])
        gate, up = F.linear(post, w["gate_up"]).chunk(2, dim=-1)
        o = a + F.linear(F.silu(gate) * up, w[f"{LAYER}.mlp.down_proj.weight"])
        return o, self._norm(o, w["norm.weight"])
