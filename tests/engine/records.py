"""Read and compare captured records."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import torch

from vllm_tide.transport.record import Phase, Record
from vllm_tide.transport.ring import RingReader


def drain(reader: RingReader) -> list[Record]:
    """Return all records in the ring."""
    records = []
    while (record := reader.read()) is not None:
        records.append(record)
    return records


def floats(array: np.ndarray) -> torch.Tensor:
    """Return values after the transport, in float32."""
    if array.dtype == np.uint16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).float()
    return torch.from_numpy(array.astype(np.float32))


def counted(records: list[Record]) -> Counter[tuple[Any, ...]]:
    """Return the fields of a record besides features, teacher and request key."""
    return Counter(
        (r.phase, r.start, r.num_accepted, r.next_token, tuple(r.token_ids))
        for r in records
    )


def drafted(records: list[Record]) -> list[list[int]]:
    """Return drafted tokens in order of generation."""
    return [
        record.token_ids[1:].tolist()
        for record in records
        if record.phase == Phase.VERIFY and record.num_rows > 1
    ]


def longest_drafts(records: list[Record], prompts: list[list[int]]) -> list[int]:
    """Return the most drafts verified in a step, by prompt of one prefill step."""
    longest, which = [-1] * len(prompts), {}
    for record in records:
        if record.phase == Phase.PREFILL:
            which[record.key] = prompts.index(record.token_ids.tolist())
        else:
            place = which[record.key]
            longest[place] = max(longest[place], record.num_rows - 1)
    return longest


def metric(report: dict[str, Any], name: str) -> float:
    """Return the growth of a counter of vLLM's speculation in a work."""
    start = f"vllm:spec_decode_num_{name}["
    return sum(v for k, v in report["metrics"].items() if k.startswith(start))
