"""Low-rank changes: a fast draft as its difference from its base draft.

A fast draft (`tide.test_time.adapt`) changes every few seconds by a small amount. It is
published with the meta `{"delta": {"base": FINGERPRINT}}` and these tensors, where NAME
is a tensor of the base:

* `NAME.u` [m, r] and `NAME.v` [r, n]: u @ v is added to the base's matrix [m, n];
* `NAME`, of the base's shape: replaces it, if factors would not be smaller.

Tensors without an entry are the base's; no entry at all means the base. Integer tensors
(`d2t`) do not change: a base has one vocabulary. No vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property

import torch
from torch import Tensor

from vllm_tide.draft.checkpoint import digest
from vllm_tide.draft.config import DraftError

RANK = 48
"""Maximum rank of a published change."""
# Randomized decomposition (Halko, Martinsson and Tropp, arXiv 0909.4061).
_OVERSAMPLING, _POWER_ITERATIONS = 8, 2


class Base:
    """The base of changes, read when the first change arrives; not thread-safe.

    Args:
        read: Returns its published or stored tensors on the host, without those that
            are shared with the target.
    """

    def __init__(self, read: Callable[[], dict[str, Tensor]]) -> None:
        self._read = read

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        return self._read()

    @cached_property
    def fingerprint(self) -> str:
        return fingerprint(self.tensors)


def fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """Return the digest of a base, equal in trainer and engine (32 hex digits).

    Args:
        tensors: On the host; `t2d` is ignored, as engines do not load it.
    """
    return digest({name: t for name, t in tensors.items() if name != "t2d"})


def factors(
    base: Mapping[str, Tensor], tensors: Mapping[str, Tensor], rank: int = RANK
) -> dict[str, Tensor]:
    """Return the change from `base` to `tensors` in published form.

    Args:
        base: Matrices [m, n], vectors [n].
        tensors: Same names, shapes and dtypes, on any device. Both should be float32:
            rounding of only one of them would be part of the change.

    Returns:
        See above; on the host, in the base's dtypes.

    Raises:
        DraftError: They differ in names, shapes or integers, or have NaN or infinity.
    """
    if different := sorted(base.keys() ^ tensors.keys()):
        raise DraftError(f"draft change: only one of the drafts has {different[0]}.")
    out: dict[str, Tensor] = {}
    for name, old in base.items():
        new = tensors[name].detach()
        _check_shape(name, old, new)
        if not old.dtype.is_floating_point:
            _check_equal(name, old, new)
            continue
        change = new.float() - old.detach().to(new.device).float()
        _check_finite(name, change)
        if not change.any():
            continue
        if change.ndim == 2 and rank * sum(change.shape) < change.numel():
            pair = low_rank(change, rank)
            for key, factor in zip((f"{name}.u", f"{name}.v"), pair, strict=True):
                out[key] = factor.to("cpu", old.dtype).contiguous()
        else:
            out[name] = new.to("cpu", old.dtype, copy=True).contiguous()
    return out


@torch.no_grad()
def apply(
    base: Mapping[str, Tensor], factors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Apply `factors` to `base`; never to a changed draft, so errors do not add up.

    Returns:
        All tensors of the base; unchanged ones are not copied.

    Raises:
        DraftError: A name, shape or integer differs, or there is NaN or infinity.
    """
    out = dict(base)
    on = next(iter(base.values())).device if base else torch.device("cpu")
    left = {name: tensor.to(on) for name, tensor in factors.items()}
    for name, old in base.items():
        u, v = left.pop(f"{name}.u", None), left.pop(f"{name}.v", None)
        full = left.pop(name, None)
        if full is not None:
            _check_shape(name, old, full)
            new = full
        elif u is not None and v is not None:
            new = _added(name, old, u, v)
        elif u is not None or v is not None:
            raise DraftError(f"draft change: {name} has only one of two factors.")
        else:
            continue
        if old.dtype.is_floating_point:
            out[name] = new = new.to(old.dtype)
            _check_finite(name, new)
        else:
            _check_equal(name, old, new)
    if left:
        raise DraftError(f"draft change: {min(left)} is not a tensor of the base.")
    return out


def low_rank(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Approximate a matrix by one of lower rank (randomized SVD, fixed seed).

    Args:
        matrix: float32 [m, n].

    Returns:
        u [m, r] and v [r, n], r = min(rank, m, n), of equal norms; their product is
        exact up to rounding if the matrix has at most that rank.
    """
    generator = torch.Generator(matrix.device).manual_seed(0)
    width = min(rank + _OVERSAMPLING, *matrix.shape)
    start = (matrix.shape[1], width)
    rows = torch.randn(start, generator=generator, device=matrix.device)
    for _ in range(_POWER_ITERATIONS):
        basis = torch.linalg.qr(matrix @ rows).Q
        rows = torch.linalg.qr(matrix.T @ basis).Q
    basis = torch.linalg.qr(matrix @ rows).Q  # [m, width]
    u, s, v = torch.linalg.svd(basis.T @ matrix, full_matrices=False)
    root = s[:rank].sqrt()
    return basis @ u[:, :rank] * root, root[:, None] * v[:rank]


def _added(name: str, old: Tensor, u: Tensor, v: Tensor) -> Tensor:
    shapes = tuple(u.shape), tuple(v.shape)
    fit = u.ndim == v.ndim == old.ndim == 2 and u.shape[1] == v.shape[0]
    if not fit or (u.shape[0], v.shape[1]) != tuple(old.shape):
        raise DraftError(
            f"draft change: factors {shapes[0]} and {shapes[1]} of {name} do not fit "
            f"the base's {tuple(old.shape)}."
        )
    return torch.addmm(old.float(), u.float(), v.float())


def _check_shape(name: str, old: Tensor, new: Tensor) -> None:
    if new.shape != old.shape:
        raise DraftError(
            f"draft change: {name} has shape {tuple(new.shape)}, the base has "
            f"{tuple(old.shape)}."
        )


def _check_equal(name: str, old: Tensor, new: Tensor) -> None:
    if not torch.equal(old.cpu(), new.cpu()):
        raise DraftError(
            f"draft change: {name} differs from the base's; a change cannot have "
            "another vocabulary."
        )


def _check_finite(name: str, tensor: Tensor) -> None:
    if not bool(tensor.isfinite().all()):
        raise DraftError(f"draft change: {name} has NaN or infinity.")
