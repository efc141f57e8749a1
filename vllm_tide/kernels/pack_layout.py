"""One staging block: where the arrays of n packed rows lie in a run of bytes.

    token_ids int32 [max_rows] | verdicts int32 [max_rows] | scales fp32 [max_rows]
    | features [max_rows, 3H]

Each array starts at a multiple of 16 bytes. Rows that are neighbours in the block are
neighbours in every array, so the rows of one request are slices that a ring record
(`vllm_tide.transport.record`) takes as they are. The narrow arrays come first: the
first `used_bytes(n)` bytes hold all of the first n rows, and one copy to the host moves
no more than those.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_tide.kernels.fp8 import LARGEST

NUM_LAYERS = 3
"""EAGLE-3 reads the residual stream after three layers of the target."""

_ALIGN = 16  # bytes: the widest load of a GPU thread
_PLAIN = (torch.bfloat16, torch.float16, torch.float32)


class PackedRows(NamedTuple):
    """Views of a staging block.

    Attributes:
        token_ids: int32 [max_rows]; -1 says that nothing was packed in this row.
        verdicts: int32 [max_rows], as they were given; 0 in a row without a token.
        scales: fp32 [max_rows] for fp8 features (0 in a row without a token), else
            None. NaN says that the row was not finite; its codes are NaN too.
        features: [max_rows, 3H] of the layout's dtype, the lowest layer first.
    """

    token_ids: Tensor
    verdicts: Tensor
    scales: Tensor | None
    features: Tensor

    def decoded(self, num_rows: int) -> Tensor:
        """The features of the first rows, fp32 [num_rows, 3H]."""
        wide = self.features[:num_rows].to(torch.float32)
        return wide if self.scales is None else wide * self.scales[:num_rows, None]


@dataclass(frozen=True)
class PackLayout:
    """Sizes and offsets of a staging block.

    Args:
        max_rows: Rows the block has room for.
        hidden_size: H of the target.
        dtype: What features are stored in: bfloat16, float16, float32, or an fp8 of
            `vllm_tide.kernels.fp8` (e4m3fnuz is the one that gfx942 computes in).

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
        if self.dtype not in _PLAIN and self.dtype not in LARGEST:
            known = ", ".join(str(d) for d in (*_PLAIN, *LARGEST))
            raise ValueError(f"features cannot be packed as {self.dtype}; use {known}.")

    @property
    def is_fp8(self) -> bool:
        """Whether each row has a scale."""
        return self.dtype in LARGEST

    @property
    def width(self) -> int:
        """3H, values of a row."""
        return NUM_LAYERS * self.hidden_size

    @property
    def features_at(self) -> int:
        """First byte of the features."""
        return (3 if self.is_fp8 else 2) * self._column_bytes

    @property
    def num_bytes(self) -> int:
        """Size of the block (bytes)."""
        return self.used_bytes(self.max_rows)

    def used_bytes(self, num_rows: int) -> int:
        """Bytes from the start of the block that hold its first rows."""
        return self.features_at + num_rows * self.width * self.dtype.itemsize

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
        step, narrow = self._column_bytes, 4 * self.max_rows
        ids = block[:narrow].view(torch.int32)
        verdicts = block[step : step + narrow].view(torch.int32)
        scales = None
        if self.is_fp8:
            scales = block[2 * step : 2 * step + narrow].view(torch.float32)
        features = block[self.features_at : self.num_bytes].view(self.dtype)
        shaped = features.view(self.max_rows, self.width)
        return PackedRows(ids, verdicts, scales, shaped)

    @property
    def _column_bytes(self) -> int:
        """Bytes from one narrow array to the next."""
        return -(-4 * self.max_rows // _ALIGN) * _ALIGN
