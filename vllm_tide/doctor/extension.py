"""Does the C++ extension load, and do its atomics do what their names say?"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from typing import Any

from vllm_tide.doctor.finding import Finding, failed, ok
from vllm_tide.doctor.subject import Subject

_BUILD = "scripts/install.sh builds it (needs g++); or 'pip install .' in the checkout."
_CHECK_DIGITS = (b"123456789", 0xE3069283)  # the published check value of CRC-32C


def check(subject: Subject) -> Iterator[Finding]:
    """Load it and try it on memory of our own."""
    del subject
    try:
        from vllm_tide import _shm
    except ImportError as error:
        yield failed("extension", f"vllm_tide._shm does not load: {error}.", _BUILD)
        return
    yield judge(_shm)


def judge(module: Any) -> Finding:
    """Try the functions that rings and weights segments rest on.

    Args:
        module: `vllm_tide._shm`.
    """
    with mmap.mmap(-1, mmap.PAGESIZE) as shared, memoryview(shared) as words:
        module.store(words, 64, 5)
        steps = (
            ("load", module.load(words, 64) == 5),
            ("fetch_add", module.fetch_add(words, 64, 2) == 5),
            ("compare_exchange", bool(module.compare_exchange(words, 64, 7, 9))),
            ("compare_exchange", not module.compare_exchange(words, 64, 7, 1)),
            ("store", module.load(words, 64) == 9 and module.load(words, 0) == 0),
            ("crc32c", module.crc32c(_CHECK_DIGITS[0]) == _CHECK_DIGITS[1]),
        )
    wrong = sorted({name for name, fine in steps if not fine})
    if wrong:
        return failed("extension", f"Wrong results from {', '.join(wrong)}.", _BUILD)
    how = "in hardware" if module.crc32c_is_hardware() else "by table"
    return ok("extension", f"Loads; atomics work, CRC-32C {how}.")
