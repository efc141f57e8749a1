"""Import of Triton, if installed, and launch helpers of all kernels."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

__all__ = [
    "HAVE_TRITON",
    "INTERPRETED",
    "Variant",
    "cdiv",
    "power_of_two",
    "runs_triton",
    "tl",
    "triton",
]

try:
    import triton  # type: ignore[import-untyped,import-not-found]
    import triton.language as tl  # type: ignore[import-untyped,import-not-found]

    HAVE_TRITON = True
    # Read when kernels are defined, as `triton.jit` does.
    _interpret = os.environ.get("TRITON_INTERPRET", "0").lower()
    INTERPRETED = _interpret in ("1", "true", "on", "yes", "y")
except ImportError:

    class _Absent:
        """Stand-in for Triton: kernels can be defined but not run."""

        @staticmethod
        def jit(function: Callable[..., Any] | None = None, **_: Any) -> Any:
            return (lambda later: later) if function is None else function

        @staticmethod
        def constexpr(value: Any) -> Any:
            return value

    triton = tl = _Absent()
    HAVE_TRITON = INTERPRETED = False


def runs_triton(*tensors: Tensor) -> bool:
    """Return whether the kernels can run on these tensors.

    True on a GPU (ROCm's device type is "cuda" too) and with Triton's interpreter
    (`TRITON_INTERPRET=1` before the first import of Triton).
    """
    if not HAVE_TRITON:
        return False
    return INTERPRETED or all(t.device.type == "cuda" for t in tensors)


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least n; 1 for n < 2."""
    return 1 << max(0, n - 1).bit_length()


@dataclass(frozen=True)
class Variant:
    """Signature of a kernel launch, for `compile_all`.

    Attributes:
        name: Unique among the kernel's variants.
        types: Type of each argument that is not a constant ("*fp32", "i64", ...).
    """

    kernel: Any
    name: str
    types: Mapping[str, str]
    constants: Mapping[str, Any]
    num_warps: int

    @property
    def kernel_name(self) -> str:
        return str(self.kernel.__name__)
