"""Counters of the null GPU of this process."""

from __future__ import annotations

import ctypes
import os


class Counters:
    """Calls of the runtime and the driver since the start of the process."""

    def __init__(self) -> None:
        runtime = ctypes.CDLL(os.environ["LD_PRELOAD"])
        driver = ctypes.CDLL("libcuda.so.1")
        self._parts = [
            _part(runtime, "ng_names", "ng_counts"),
            _part(driver, "ng_driver_names", "ng_driver_counts"),
        ]

    def read(self) -> dict[str, int]:
        """Return counts by name; launches include those through the driver."""
        counts = {
            name: int(values[i])
            for names, values in self._parts
            for i, name in enumerate(names)
        }
        counts["launches"] += counts.pop("driver_launches")
        return counts | torch_allocations()


def _part(
    library: ctypes.CDLL, names: str, counts: str
) -> tuple[list[str], ctypes.Array]:
    labels = ctypes.c_char_p.in_dll(library, names).value.decode().split()
    return labels, (ctypes.c_ulong * len(labels)).in_dll(library, counts)


def torch_allocations() -> dict[str, int]:
    """Return blocks allocated by PyTorch's allocators, without calls of the runtime."""
    import torch

    device = torch.cuda.memory_stats()
    host = torch.cuda.host_memory_stats()
    return {
        "torch_allocations": device.get("allocation.all.allocated", 0),
        "torch_pinned_allocations": host.get("allocation.allocated", 0),
    }
