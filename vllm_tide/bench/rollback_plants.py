"""Heads that must not stay: NaN, permuted, or slightly worse than the one served."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .control_arms import BenchError

NAN, PERMUTED, NOISE = "nan", "permuted", "noise"
_ROWS = ("lm_head.weight", "embed_tokens.weight")  # of tokens, not of the layer


@dataclass(frozen=True, slots=True)
class Plant:
    """One planted head.

    Attributes:
        name: As on the command line.
        kind: `nan`, `permuted` or `noise`.
        noise: Standard deviation of what is added, as a share of each tensor's own.
    """

    name: str
    kind: str
    noise: float = 0.0


def parse_plant(text: str) -> Plant:
    """Return the planted head of `nan`, `permuted` or `noise0.1`.

    Raises:
        BenchError: It is none of them.
    """
    if text in (NAN, PERMUTED):
        return Plant(text, text)
    try:
        share = float(text.removeprefix(NOISE)) if text.startswith(NOISE) else 0.0
    except ValueError:
        share = 0.0
    if not 0 < share < 100:
        raise BenchError(
            f"--plants: {text!r} is none; give nan, permuted, or noise with its share, "
            "such as noise0.1"
        )
    return Plant(text, NOISE, share)


def planted(
    tensors: Mapping[str, Tensor], plant: Plant, seed: int
) -> dict[str, Tensor]:
    """Return a spoilt copy of a head; shapes and types stay as they are.

    * `nan`: one weight of `fc` is NaN;
    * `permuted`: the rows of every matrix of the layer but the output rows;
    * `noise`: Gaussian noise on every float tensor.

    Args:
        tensors: The head that serves well.
        plant: How it is spoilt.
        seed: Of permutation and noise.
    """
    random = torch.Generator().manual_seed(seed)
    out = {name: tensor.clone() for name, tensor in tensors.items()}
    if plant.kind == NAN:
        (name,) = [name for name in out if name.endswith("fc.weight")]
        out[name].view(-1)[0] = float("nan")
        return out
    for name, tensor in out.items():
        if not tensor.is_floating_point():
            continue
        if plant.kind == NOISE:
            wide = tensor.float()
            added = torch.randn(tensor.shape, generator=random) * wide.std()
            tensor.copy_(wide + plant.noise * added)
        elif tensor.dim() == 2 and not name.endswith(
            ("lm_head.weight", "tokens.weight")
        ):
            tensor.copy_(tensor[torch.randperm(tensor.shape[0], generator=random)])
    return out
