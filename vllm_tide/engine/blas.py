"""NumPy's BLAS in the worker: one thread.

The policy's arrays are small, but some products are just large enough for OpenBLAS to
share them out over threads. Those take cores from the model's own OpenMP threads and
gain nothing at this size.
"""

from __future__ import annotations

from threadpoolctl import threadpool_limits


def use_one_blas_thread() -> None:
    """From now on, in this process; Torch's own threads are not touched."""
    threadpool_limits(limits=1, user_api="blas")
