"""Types of the extension built from csrc/ (see csrc/shm.h for the contracts).

A word is a u64 at an 8-byte aligned offset inside the buffer; an offset outside or
unaligned is a ValueError. OS errors are OSError with the segment's name. Arrays of
control and of the memory are NumPy's; values of another type are a TypeError.
"""

from mmap import mmap
from typing import Any

import numpy as np

Buffer = bytes | bytearray | memoryview | mmap | np.ndarray[Any, Any]

def shm_create(name: str, size: int, /) -> int: ...
def shm_open(name: str, /) -> int: ...
def shm_unlink(name: str, /) -> None: ...
def fd_size(fd: int, /) -> int: ...
def load(buffer: Buffer, offset: int, /) -> int: ...
def store(buffer: Buffer, offset: int, value: int, /) -> None: ...
def fetch_add(buffer: Buffer, offset: int, delta: int, /) -> int: ...
def crc32c(data: Buffer, crc: int = 0, /) -> int: ...
def crc32c_table(data: Buffer, crc: int = 0, /) -> int: ...
def crc32c_is_hardware() -> bool: ...
def gather(target: Buffer, offset: int, parts: tuple[Buffer, ...], /) -> int: ...

# Write n records into a ring (ring.Frames). `end`: u64 [2], the producer's head
# and tail, which move on. `metas`: [n, 96] bytes; `spans`: 64-bit [n, S, 2], where each
# of S parts begins in its source and how long it is (bytes); `follows`: bool [n];
# `status`: uint8 [n], in: 0 to be written; out: ring.Status. ValueError, and
# nothing written: something lies outside its buffer. The interpreter lock is given up.
def write_frames(
    ring: Buffer,
    fd: int,
    end: Buffer,
    metas: Buffer,
    spans: Buffer,
    follows: Buffer,
    status: Buffer,
    sources: tuple[Buffer, ...],
    /,
) -> None: ...

# csrc/step.h. `requests`: `REQUEST` of capture/step.py; `taught`: 0 no row has a
# teacher, 1 those with logits, 2 all; `row_bytes`: of token ids, features, and each
# array of the teacher. Of each record, as bytes: its `META`; int64 [S, 2] spans; bool,
# it continues the one before; bool, its counts fit each other; int64, its request.
def lay_out(
    requests: Buffer,
    draft_version: int,
    drafted_by: int,
    concurrency: int,
    dtype: int,
    format: int,
    flags: int,
    feature_width: int,
    hidden_width: int,
    topk: int,
    taught: int,
    max_rows: int,
    row_bytes: tuple[int, ...],
    /,
) -> tuple[bytearray, bytearray, bytearray, bytearray, bytearray]: ...

# csrc/control.h, and control/verifier.py for the arrays. Tokens of the set, those that
# are expected, seconds. ValueError, and nothing written: an array is not as long as the
# others say.
def best_set(
    order: Buffer,
    survival: Buffer,
    plain_tokens: float,
    seconds: Buffer,
    limit: float,
    bar: float,
    lengths: Buffer,
    /,
) -> tuple[int, float, float]: ...

# csrc/control.h, and control/acceptance.py for the arrays; the last two are written.
# ValueError, and nothing written: an array is not as long as the others say, or a slot
# is none of `requests`.
def survival(
    confidence: Buffer,
    slots: Buffer,
    sampled: Buffer,
    room: Buffer,
    knots: Buffer,
    curves: Buffer,
    requests: Buffer,
    logits: Buffer,
    survival: Buffer,
    /,
) -> None: ...

# csrc/ngram.h, and memory/ngram.py for the arrays of the index. int64 [n] but for
# `fresh`, int32 [n, w], and `proposed`, int64 [n, most]; it and `match` are results.
# ValueError, and nothing written: a slot or a text lies outside of the index.
def ngram_propose(
    last: Buffer,
    tokens: Buffer,
    length: Buffer,
    indexed: Buffer,
    factors: Buffer,
    bits: int,
    most_match: int,
    slots: Buffer,
    known: Buffer,
    count: Buffer,
    fresh: Buffer,
    proposed: Buffer,
    match: Buffer,
    chunk: int,
    /,
) -> None: ...
