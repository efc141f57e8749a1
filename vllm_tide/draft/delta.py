"""Changes of low rank: a fast draft as its difference from the draft it stands on.

A fast draft (`tide.test_time.adapt`) changes every few seconds and by little. It is
published with the meta `{"delta": {"base": FINGERPRINT}}` and these tensors, NAME being
one of the base's:

* `NAME.u` [m, r] and `NAME.v` [r, n]: u @ v is added to the base's matrix [m, n];
* `NAME`, of the base's shape: in its place, where factors would be no smaller.

What is not named is the base's own; no tensors at all are the base again. Integer
tensors (`d2t`) never change: another vocabulary is another base. No vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property

import torch
from torch import Tensor

from vllm_tide.draft.checkpoint import digest
from vllm_tide.draft.config import DraftError

RANK = 48
"""Of a published change, at most."""
# Of the randomised decomposition (Halko, Martinsson and Tropp, arXiv 0909.4061): more
# columns than are kept, and passes over the matrix that sharpen them.
_SPARE, _PASSES = 8, 2


class Base:
    """The draft that changes stand on; it is not read before the first one comes.

    Not for two threads at once.

    Args:
        read: Gives its tensors, on the host, as they were published or stored, without
            those that are the target's.
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
    """Name of a base, the same for trainer and engine (32 hexadecimal digits).

    Args:
        tensors: On the host; `t2d`, which an engine does not load, does not count.
    """
    return digest({name: t for name, t in tensors.items() if name != "t2d"})


def factors(
    base: Mapping[str, Tensor], tensors: Mapping[str, Tensor], rank: int = RANK
) -> dict[str, Tensor]:
    """The change from `base` to `tensors`, as it is published.

    Args:
        base: Matrices [m, n], vectors [n].
        tensors: Of the same names, shapes and types, on any device. Of float32 both,
            nothing is lost; what rounding took from one of them alone would count as
            change.

    Returns:
        See above; on the host, in the base's types.

    Raises:
        DraftError: They differ in names, shapes or integers, or hold NaN or infinity.
    """
    if odd := sorted(base.keys() ^ tensors.keys()):
        raise DraftError(f"draft change: only one of the drafts has {odd[0]}.")
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
    """The draft that `factors` make of `base`; always from the base, so errors stay.

    Returns:
        Every tensor of the base's names, shapes and types; of what did not change the
        base's own, not copies.

    Raises:
        DraftError: One sentence: a name, a shape, other integers, NaN or infinity.
    """
    out = dict(base)
    on = next(iter(base.values())).device if base else torch.device("cpu")
    left = {name: tensor.to(on) for name, tensor in factors.items()}
    for name, old in base.items():
        u, v = left.pop(f"{name}.u", None), left.pop(f"{name}.v", None)
        whole = left.pop(name, None)
        if whole is not None:
            _check_shape(name, old, whole)
            new = whole
        elif u is not None and v is not None:
            new = _added(name, old, u, v)
        elif u is not None or v is not None:
            raise DraftError(f"draft change: {name} has one factor and not the other.")
        else:
            continue
        if old.dtype.is_floating_point:
            out[name] = new = new.to(old.dtype)
            _check_finite(name, new)
        else:
            _check_equal(name, old, new)
    if left:
        raise DraftError(f"draft change: {min(left)} belongs to nothing of the base.")
    return out


def low_rank(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Nearest matrix of a rank, but for what a randomised decomposition misses.

    Draws its own numbers, the same for everybody.

    Args:
        matrix: float32 [m, n].

    Returns:
        u [m, r] and v [r, n], r = min(rank, m, n), of equal norms; their product is
        exact up to rounding where the matrix has no higher rank.
    """
    generator = torch.Generator(matrix.device).manual_seed(0)
    width = min(rank + _SPARE, *matrix.shape)
    start = (matrix.shape[1], width)
    rows = torch.randn(start, generator=generator, device=matrix.device)
    for _ in range(_PASSES):
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
            f"draft change: factors {shapes[0]} and {shapes[1]} of {name} do not make "
            f"{tuple(old.shape)}."
        )
    return torch.addmm(old.float(), u.float(), v.float())


def _check_shape(name: str, old: Tensor, new: Tensor) -> None:
    if new.shape != old.shape:
        raise DraftError(
            f"draft change: {name} has shape {tuple(new.shape)}, its base "
            f"{tuple(old.shape)}."
        )


def _check_equal(name: str, old: Tensor, new: Tensor) -> None:
    if not torch.equal(old.cpu(), new.cpu()):
        raise DraftError(
            f"draft change: {name} is not its base's; another vocabulary is another "
            "base."
        )


def _check_finite(name: str, tensor: Tensor) -> None:
    if not bool(tensor.isfinite().all()):
        raise DraftError(f"draft change: {name} has NaN or infinity.")
