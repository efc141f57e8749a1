"""EAGLE-3 draft: `fc`, one Llama decoder layer over [token; feature], `lm_head`.

The computation of vLLM 0.32's `Eagle3LlamaForCausalLM`, written for training: fp32
master parameters, selectable compute dtype, packed documents, training-time test.

Shapes: R packed rows, those of rejected branches last, A aux layers, H hidden, V_d
draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor, nn

from vllm_tide.draft.attention import attention_backend
from vllm_tide.draft.config import Eagle3Config
from vllm_tide.draft.rows import RowLayout, StepRows
from vllm_tide.draft.vocab import VocabMap

LAYER = "midlayer"
Weights = dict[str, Tensor]


def parameter_shapes(config: Eagle3Config) -> dict[str, tuple[int, ...]]:
    h, q = config.hidden_size, config.num_attention_heads * config.head_dim
    kv, inter = config.num_key_value_heads * config.head_dim, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (h, config.feature_size),
        f"{LAYER}.self_attn.q_proj.weight": (q, 2 * h),
        f"{LAYER}.self_attn.k_proj.weight": (kv, 2 * h),
        f"{LAYER}.self_attn.v_proj.weight": (kv, 2 * h),
        f"{LAYER}.self_attn.o_proj.weight": (h, q),
        f"{LAYER}.mlp.gate_proj.weight": (inter, h),
        f"{LAYER}.mlp.up_proj.weight": (inter, h),
        f"{LAYER}.mlp.down_proj.weight": (h, inter),
        f"{LAYER}.input_layernorm.weight": (h,),
        f"{LAYER}.hidden_norm.weight": (h,),
        f"{LAYER}.post_attention_layernorm.weight": (h,),
        "norm.weight": (h,),
    }
    if config.norm_before_fc:
        shapes["input_norm.weight"] = (config.feature_size,)
    if config.fc_norm:
        for i in range(config.num_aux):
            shapes[f"fc_norm.{i}.weight"] = (config.target_hidden_size,)
    return shapes


class Eagle3Draft(nn.Module):
    """A trainable draft.

    Args:
        tensors: Initial value of every tensor of `parameter_shapes`, and
            `lm_head.weight` [V_d, H].
        embed: [V_t, H] frozen token embedding (the draft's, else the target's); the
            parameters are on its device.
        owns_lm_head: The checkpoint has `lm_head.weight`; it is trained and exported.
            Otherwise the target's rows are used, frozen.
        owns_embed: The checkpoint has `embed_tokens.weight`; exported unchanged.
        constants: Stored integer tensors of the checkpoint (`d2t`, `t2d`).
        stored_names: EAGLE-3 name to the checkpoint's name, if different.
    """

    def __init__(
        self,
        config: Eagle3Config,
        tensors: dict[str, Tensor],
        vocab: VocabMap,
        embed: Tensor,
        *,
        owns_lm_head: bool = True,
        owns_embed: bool = False,
        dtype: torch.dtype = torch.bfloat16,
        constants: dict[str, Tensor] | None = None,
        stored_names: dict[str, str] | None = None,
    ) -> None:
        super().__init__()
        if constants is None and not vocab.is_identity:
            constants = {"d2t": vocab.d2t, "t2d": vocab.t2d}
        self.constants, self.stored_names = constants or {}, stored_names or {}
        self.config, self.vocab, self.checkpoint_dtype = config, vocab, dtype
        self.owns_lm_head, self.owns_embed = owns_lm_head, owns_embed
        self.embed = embed  # frozen and shared, so not a parameter
        self.weights = nn.ParameterDict()
        for name in [*parameter_shapes(config), "lm_head.weight"]:
            value = tensors[name].detach().to(embed.device, torch.float32, copy=True)
            self.weights[_key(name)] = nn.Parameter(value)
        self.weights[_key("lm_head.weight")].requires_grad_(owns_lm_head)
        self._inv_freq = torch.tensor(
            config.rope.inverse_frequencies(config.head_dim),
            dtype=torch.float32,
            device=embed.device,
        )

    @classmethod
    def initialise(
        cls,
        config: Eagle3Config,
        embed: Tensor,
        lm_head: Tensor,
        vocab: VocabMap | None = None,
        seed: int = 0,
    ) -> Eagle3Draft:
        """Initialize a fresh draft, with the target's rows as `lm_head`.

        Args:
            embed: [V_t, H] target embedding.
            lm_head: [V_t, H] target output rows.
            vocab: Draft vocabulary; None: the full target vocabulary.
        """
        vocab = vocab or VocabMap.identity(config.vocab_size)
        random = torch.Generator().manual_seed(seed)
        tensors = {}
        for name, shape in parameter_shapes(config).items():
            if len(shape) == 1:
                tensors[name] = torch.ones(shape)
                continue
            std = shape[1] ** -0.5
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                std *= 0.5
            tensors[name] = torch.randn(shape, generator=random) * std
        tensors["lm_head.weight"] = lm_head[vocab.target_ids]
        return cls(config, tensors, vocab, embed)

    def tensor(self, name: str) -> Tensor:
        return self.weights[_key(name)]

    def named_tensors(self) -> dict[str, Tensor]:
        """Return all master parameters by checkpoint name (not copies)."""
        return {_name(key): value for key, value in self.weights.items()}

    def clone(
        self,
        tensors: dict[str, Tensor] | None = None,
        vocab: VocabMap | None = None,
        constants: dict[str, Tensor] | None = None,
    ) -> Eagle3Draft:
        """Copy the draft, with copies of the master parameters or of `tensors`.

        Everything else is shared unless given.
        """
        return Eagle3Draft(
            self.config,
            tensors or self.named_tensors(),
            vocab or self.vocab,
            self.embed,
            owns_lm_head=self.owns_lm_head,
            owns_embed=self.owns_embed,
            dtype=self.checkpoint_dtype,
            constants=self.constants if constants is None else constants,
            stored_names=self.stored_names,
        )

    @torch.no_grad()
    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy `tensors` into the master parameters.

        Args:
            tensors: By checkpoint name; parameters without an entry are unchanged (a
                shared `lm_head` is not published).
        """
        for name, value in self.named_tensors().items():
            if name in tensors:
                value.copy_(tensors[name])

    def compute_weights(self, dtype: torch.dtype) -> Weights:
        """Cast parameters, once per forward pass; norms stay at least fp32."""
        w: Weights = {}
        for key, value in self.weights.items():
            wide = value.ndim == 1 and dtype.itemsize < 4
            w[_name(key)] = value if wide else value.to(dtype)
        attn, mlp = f"{LAYER}.self_attn", f"{LAYER}.mlp"
        w["kv"] = torch.cat([w[f"{attn}.{n}_proj.weight"] for n in "kv"])
        w["gate_up"] = torch.cat([w[f"{mlp}.{n}_proj.weight"] for n in ("gate", "up")])
        return w

    def forward_ttt(
        self,
        tokens: Tensor,
        features: Tensor,
        positions: Tensor,
        layout: RowLayout,
        steps: Sequence[StepRows],
        dtype: torch.dtype = torch.float32,
        weights: Weights | None = None,
        *,
        attention: str = "auto",
    ) -> list[Tensor]:
        """Run all training-time-test steps over packed documents and their branches.

        Row t pairs feature t with token t + 1 (+ i at step i) of the same document.
        Branch rows are computed in the same pass and do not change trunk rows
        (eagle3-training.md c.8).

        Args:
            tokens: int64 [R] target ids x_t, and b_1..b_m of each branch.
            features: [R, A*H] captured features g_t.
            positions: int64 [R] true positions.
            steps: From `train.packing.plan_rows`.

        Returns:
            Per step, the normed output rows [L_i, H] of `steps[i].loss`; multiply by
            `lm_head.weight` for logits.

        Raises:
            DraftError: The attention backend does not support this device.
        """
        w = weights if weights is not None else self.compute_weights(dtype)
        attend = attention_backend(attention, features.device.type)
        last = tokens.numel() - 1
        every = torch.arange(layout.num_rows, device=tokens.device)
        hidden = self.combine(features.to(dtype), w)  # [R,H]
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
            rows = every if i == 0 else active
            following = tokens[layout.ahead(rows, i).clamp_(max=last)]
            z, residual = self._layer_input(following, hidden, w, dtype)
            cos, sin = self._rotation(positions[rows] + i)
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
            features = self._norm(features, w["input_norm.weight"], features.dtype)
        if config.fc_norm:
            parts = features.chunk(config.num_aux, dim=-1)
            features = torch.cat(
                [
                    self._norm(part, w[f"fc_norm.{i}.weight"], features.dtype)
                    for i, part in enumerate(parts)
                ],
                dim=-1,
            )
        return F.linear(features, w["fc.weight"])

    def logits(self, normed: Tensor, w: Weights) -> Tensor:
        """Compute logits [n, V_d] over draft ids from [n, H]."""
        return F.linear(normed, w["lm_head.weight"])

    def _norm(self, x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        y = F.rms_norm(
            x.to(wide), weight.shape, weight.to(wide), self.config.rms_norm_eps
        )
        return y.to(dtype)

    def _layer_input(
        self, following: Tensor, hidden: Tensor, w: Weights, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        e = self.embed[following].to(dtype)
        u = self._norm(e, w[f"{LAYER}.input_layernorm.weight"], dtype)
        v = self._norm(hidden, w[f"{LAYER}.hidden_norm.weight"], dtype)
        residual = v if self.config.norm_before_residual else hidden
        return torch.cat([u, v], dim=-1), residual

    def _rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        # fp64: fp32 angles are inexact at long context.
        frequency = self._inv_freq.to(positions.device, torch.float64)
        angle = positions.to(torch.float64)[:, None] * frequency
        return angle.cos().float()[:, None], angle.sin().float()[:, None]

    @staticmethod
    def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        # x [n, n_h, d]; cos, sin [n, 1, d/2]
        a, b = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)

    def _keys_values(
        self, z: Tensor, cos: Tensor, sin: Tensor, w: Weights
    ) -> tuple[Tensor, Tensor]:
        kv = F.linear(z, w["kv"]).view(z.shape[0], 2, -1, self.config.head_dim)
        return self._rotate(kv[:, 0], cos, sin), kv[:, 1]

    def _queries(self, z: Tensor, cos: Tensor, sin: Tensor, w: Weights) -> Tensor:
        q = F.linear(z, w[f"{LAYER}.self_attn.q_proj.weight"])
        return self._rotate(q.view(z.shape[0], -1, self.config.head_dim), cos, sin)

    def _layer_output(
        self, mixed: Tensor, residual: Tensor, w: Weights
    ) -> tuple[Tensor, Tensor]:
        dtype = mixed.dtype
        a = residual + F.linear(mixed, w[f"{LAYER}.self_attn.o_proj.weight"])
        post = self._norm(a, w[f"{LAYER}.post_attention_layernorm.weight"], dtype)
        gate, up = F.linear(post, w["gate_up"]).chunk(2, dim=-1)
        o = a + F.linear(F.silu(gate) * up, w[f"{LAYER}.mlp.down_proj.weight"])
        return o, self._norm(o, w["norm.weight"], dtype)


def _key(name: str) -> str:
    return name.replace(".", "/")  # a dot is not allowed in a ParameterDict key


def _name(key: str) -> str:
    return key.replace("/", ".")
