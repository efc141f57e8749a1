"""Reading and comparing captured records in tests."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import torch

from vllm_tide.transport.record import Record
from vllm_tide.transport.ring import RingReader


def drain(reader: RingReader) -> list[Record]:
    """All records that wait."""
    records = []
    while (record := reader.read()) is not None:
        records.append(record)
    return records


def floats(array: np.ndarray) -> torch.Tensor:
    """Values as they came over the wire, float32."""
    if array.dtype == np.uint16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).float()
    return torch.from_numpy(array.astype(np.float32))


def counted(records: list[Record]) -> Counter[tuple[Any, ...]]:
    """What a record says besides features and teacher, whichever request it is of."""
    return Counter(
        (r.phase, r.start, r.num_accepted, r.next_token, tuple(r.token_ids))
        for r in records
    )
