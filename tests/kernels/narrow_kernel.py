"""Two kernels that differ in the width of one product; see `test_addresses`."""

import triton
import triton.language as tl


@triton.jit
def narrow_kernel(x, stride):
    tl.store(x + tl.program_id(0) * stride, 0)


@triton.jit
def wide_kernel(x, stride):
    tl.store(x + tl.program_id(0).to(tl.int64) * stride, 0)
