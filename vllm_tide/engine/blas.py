"""NumPy's BLAS in the worker: one thread.

The policy's arrays are small, but some products are just large enough for OpenBLAS to
wake its threads, which then spin for tens of milliseconds on the cores that the model's
OpenMP threads compute on.
"""

from __future__ import annotations

from threadpoolctl import threadpool_limits


def use_one_blas_thread() -> None:
    """From now on, in this process; Torch's own threads are not touched."""
    threadpool_limits(limits=1, user_api="blas")
