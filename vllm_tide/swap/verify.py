"""Is a publication fit to serve? Names, shapes, types, finiteness, norms."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from vllm_tide.draft.config import DraftError
from vllm_tide.draft.vocab import VocabMap

FLOATS = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


class DraftRefused(ValueError):
    """A publication is not installed.

    Attributes:
        reason: Short label for the counter (`shape`, `dtype`, `names`, ...).
    """

    def __init__(self, reason: str, sentence: str) -> None:
        super().__init__(sentence)
        self.reason = reason


class DraftContract:
    """What every publication must look like: the draft the server started with.

    Args:
        reference: Tensors of the served checkpoint, by their names in it.
        max_norm_ratio: Largest growth of a tensor's norm against the live draft.
        shared: Names of tensors the draft shares with the target; they may not be
            published, because loading them would write into the target.
        vocab_size: The target's; None leaves `d2t` unchecked.
    """

    def __init__(
        self,
        reference: Mapping[str, torch.Tensor],
        max_norm_ratio: float,
        shared: frozenset[str] = frozenset(),
        vocab_size: int | None = None,
    ) -> None:
        self._vocab_size = vocab_size
        self._shapes = {
            name: tuple(tensor.shape)
            for name, tensor in reference.items()
            if name not in shared
        }
        self._integer = {
            name: tensor.dtype
            for name, tensor in reference.items()
            if not tensor.dtype.is_floating_point and name not in shared
        }
        self._norms = norms_of(reference)
        self._ratio = max_norm_ratio
        self._shared = shared

    def check(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """Refuse what cannot be served.

        Returns:
            Norm of every floating-point tensor, for `accept`.

        Raises:
            DraftRefused: With one sentence naming the tensor.
        """
        extra = sorted(set(tensors) - set(self._shapes))
        if extra and extra[0] in self._shared:
            raise DraftRefused(
                "shared",
                f"tensor {extra[0]!r} belongs to the target model and may not be "
                "published.",
            )
        missing = sorted(set(self._shapes) - set(tensors))
        if missing or extra:
            which = f"lacks {missing[0]!r}" if missing else f"has unknown {extra[0]!r}"
            raise DraftRefused("names", f"the publication {which}.")
        norms = {}
        for name, tensor in tensors.items():
            norm = self._check_one(name, tensor)
            if norm is not None:
                norms[name] = norm
        if self._vocab_size is not None:
            check_vocabulary(tensors, self._vocab_size)
        return norms

    def _check_one(self, name: str, tensor: torch.Tensor) -> float | None:
        if tuple(tensor.shape) != self._shapes[name]:
            raise DraftRefused(
                "shape",
                f"tensor {name!r} has shape {tuple(tensor.shape)}, the served draft "
                f"has {self._shapes[name]}.",
            )
        integer = self._integer.get(name)
        if integer is not None or not tensor.dtype.is_floating_point:
            if tensor.dtype != integer:
                raise DraftRefused(
                    "dtype", f"tensor {name!r} has type {tensor.dtype}, not {integer}."
                )
            return None
        norm = torch.linalg.vector_norm(tensor, dtype=torch.float32).item()
        if norm != norm or norm == float("inf"):
            raise DraftRefused("not_finite", f"tensor {name!r} has NaN or infinity.")
        bound = self._ratio * max(self._norms.get(name, 0.0), 1e-3)
        if norm > bound:
            raise DraftRefused(
                "norm",
                f"tensor {name!r} has norm {norm:.3g}, more than {bound:.3g} "
                "(tide.swap.max_norm_ratio).",
            )
        return float(norm)

    def accept(self, norms: Mapping[str, float]) -> None:
        """Those of the draft that is live now, which later ones are compared with."""
        self._norms.update(norms)


def norms_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Euclidean norm of every floating-point tensor, in fp32."""
    return {
        name: torch.linalg.vector_norm(tensor, dtype=torch.float32).item()
        for name, tensor in tensors.items()
        if tensor.dtype.is_floating_point
    }


def check_vocabulary(tensors: Mapping[str, torch.Tensor], vocab_size: int) -> None:
    """Refuse a `d2t` that would send a drafted token outside the target's vocabulary.

    Args:
        tensors: A publication; without `d2t` there is nothing to check.
        vocab_size: The target's.

    Raises:
        DraftRefused: An id is out of range, or the ids do not increase.
    """
    if "d2t" not in tensors:
        return
    try:
        VocabMap.from_d2t(tensors["d2t"], vocab_size)
    except DraftError as error:
        raise DraftRefused("vocabulary", str(error)) from None
