"""A trainable draft of any kind: fp32 master parameters, selectable compute dtype.

Shapes: R packed rows, those of rejected branches last, A aux layers, H hidden, V_d
draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Self

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor, nn

from vllm_tide.draft.config import DraftConfig
from vllm_tide.draft.rows import Rows, StepRows
from vllm_tide.draft.vocab import VocabMap

Weights = dict[str, Tensor]


class Draft(nn.Module):
    """A trainable draft.

    Args:
        tensors: Initial value of every tensor of `config.parameter_shapes()`, and
            `lm_head.weight` [V_d, H].
        embed: [V_t, H] frozen token embedding (the draft's, else the target's); the
            parameters are on its device.
        owns_lm_head: The checkpoint has `lm_head.weight`; it is trained and exported.
            Otherwise the target's rows are used, frozen.
        owns_embed: The checkpoint has `embed_tokens.weight`; exported unchanged.
        constants: Stored integer tensors of the checkpoint (`d2t`, `t2d`).
        stored_names: Parameter's name to the checkpoint's name, if different.
    """

    trains_branches: ClassVar[bool] = False
    """Rejected branches are rows to train on: a token depends on those before it."""

    def __init__(
        self,
        config: DraftConfig,
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
        for name in [*config.parameter_shapes(), "lm_head.weight"]:
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
        config: DraftConfig,
        embed: Tensor,
        lm_head: Tensor,
        vocab: VocabMap | None = None,
        seed: int = 0,
    ) -> Self:
        """Initialize a fresh draft, with the target's rows as `lm_head`.

        Args:
            embed: [V_t, H] target embedding.
            lm_head: [V_t, H] target output rows.
            vocab: Draft vocabulary; None: the full target vocabulary.
        """
        vocab = vocab or VocabMap.identity(config.vocab_size)
        random = torch.Generator().manual_seed(seed)
        tensors = {}
        for name, shape in config.parameter_shapes().items():
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
    ) -> Self:
        """Copy the draft, with copies of the master parameters or of `tensors`.

        Everything else is shared unless given.
        """
        return type(self)(
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
        return w

    @property
    def step_decay(self) -> float:
        """Weight of each further drafted token in the loss, as in the kind's paper."""
        raise NotImplementedError

    def choose_rows(self, steps: list[StepRows]) -> list[StepRows]:
        """Return the rows to train on, of those that could be."""
        return steps

    def forward_steps(
        self,
        rows: Rows,
        w: Weights,
        *,
        depth: int | None = None,
        attention: str = "auto",
    ) -> list[Tensor]:
        """Return the output rows of every drafted token over packed documents.

        Args:
            w: From `compute_weights`; their dtype is computed in.
            depth: Drafted tokens of a draft as served; None: `len(rows.steps)`.

        Returns:
            Per step, the normed output rows [L_i, H] of `rows.steps[i].loss`; multiply
            by `lm_head.weight` for logits.

        Raises:
            DraftError: The attention backend does not support this device.
        """
        raise NotImplementedError

    def combine(self, features: Tensor, w: Weights) -> Tensor:
        """Combine captured features of all aux layers: [n, A*H] to [n, H]."""
        raise NotImplementedError

    def logits(self, normed: Tensor, w: Weights) -> Tensor:
        """Compute logits [n, V_d] over draft ids from [n, H]."""
        return F.linear(normed, w["lm_head.weight"])


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute RMSNorm over the last dimension in at least fp32, in the dtype of `x`."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return F.rms_norm(x.to(wide), weight.shape, weight.to(wide), eps).to(x.dtype)


def angles(positions: Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin of the rotary embedding, each [n, 1, d / 2].

    Args:
        positions: int64 [n].
        inv_freq: [d / 2], angle per position.
    """
    # fp64: fp32 angles are inexact at long context.
    frequency = inv_freq.to(positions.device, torch.float64)
    angle = positions.to(torch.float64)[:, None] * frequency
    return angle.cos().float()[:, None], angle.sin().float()[:, None]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate [n, n_h, d] (neox halves) by cos, sin [n, 1, d / 2]."""
    a, b = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


def _key(name: str) -> str:
    return name.replace(".", "/")  # a dot is not allowed in a ParameterDict key


def _name(key: str) -> str:
    return key.replace("/", ".")
