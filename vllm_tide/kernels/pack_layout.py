"""One staging block: where the arrays of n packed rows lie in a run of bytes.

    token_ids int32 [max_rows] | features [max_rows, 3H]

Each array starts at a multiple of 16 bytes. Rows that are neighbours in the block are
neighbours in every array, so the rows of one request are slices that a ring record
(`vllm_tide.transport.record`) takes as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

NUM_LAYERS = 3
"""EAGLE-3 reads the residual stream after three layers of the target."""

_ALIGN = 16  # bytes: the widest load of a GPU thread
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class PackedRows(NamedTuple):
    """Views of a staging block.

    Attributes:
        token_ids: int32 [max_rows].
        features: [max_rows, 3H] of the layout's dtype, the lowest layer first.
    """

    token_ids: Tensor
    features: Tensor


@dataclass(frozen=True)
class PackLayout:
    """Sizes and offsets of a staging block.

    Args:
        max_rows: Rows the block has room for.
        hidden_size: H of the target.
        dtype: What features are stored in: bfloat16, float16 or float32.

    Raises:
        ValueError: A size is below one, or the dtype is none of these.
    """

    max_rows: int
    hidden_size: int
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        if self.max_rows < 1 or self.hidden_size < 1:
            raise ValueError(
                f"a staging block of {self.max_rows} rows of {self.hidden_size} values "
                "holds nothing; both must be at least 1."
            )
        if self.dtype not in _DTYPES:
            known = ", ".join(str(d) for d in _DTYPES)
            raise ValueError(f"features cannot be packed as {self.dtype}; use {known}.")

    @property
    def width(self) -> int:
        """3H, values of a row."""
        return NUM_LAYERS * self.hidden_size

    @property
    def features_at(self) -> int:
        """First byte of the features."""
        return -(-4 * self.max_rows // _ALIGN) * _ALIGN

    @property
    def num_bytes(self) -> int:
        """Size of the block (bytes)."""
        return self.features_at + self.max_rows * self.width * self.dtype.itemsize

    def views(self, block: Tensor) -> PackedRows:
        """The arrays of a block, without a copy.

        Args:
            block: uint8 [at least `num_bytes`], contiguous, 16-byte aligned.

        Raises:
            ValueError: It is anything else.
        """
        if block.dtype != torch.uint8 or block.ndim != 1 or not block.is_contiguous():
            raise ValueError(
                "a staging block is a contiguous run of uint8, not "
                f"{block.dtype} {tuple(block.shape)}."
            )
        if block.numel() < self.num_bytes or block.data_ptr() % _ALIGN:
            raise ValueError(
                f"a staging block needs {self.num_bytes} bytes that start at a "
                f"multiple of {_ALIGN}; this one has {block.numel()}."
            )
        ids = block[: 4 * self.max_rows].view(torch.int32)
        features = block[self.features_at : self.num_bytes].view(self.dtype)
        return PackedRows(ids, features.view(self.max_rows, self.width))
