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
def compare_exchange(
    buffer: Buffer, offset: int, expected: int, desired: int, /
) -> bool: ...
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

# csrc/control.h and its callers, for the arrays: float64, but `survival` and `order`
# float32, slots, lengths, rooms and classes int64. `values`: [3, steps, n], whose rows
# `step - 1` are written. The first table begins at `(step - 1) * num_nodes` in `value`
# and `rise`, the others `stride` behind each other. ValueError, and nothing written: an
# array is not as long as the others say.
def table_chances(
    values: Buffer,
    step: int,
    confidence: Buffer,
    table_of: Buffer,
    offset: Buffer,
    value: Buffer,
    rise: Buffer,
    num_nodes: int,
    stride: int,
    first: float,
    per_node: float,
    least: float,
    /,
) -> None: ...

# Steps, tokens, seconds, free, loosened.
def forecast(
    target: Buffer,
    draft: Buffer,
    extra: float,
    limit: float,
    loose: float,
    chance: Buffer,
    class_of: Buffer,
    share: Buffer,
    slots: Buffer,
    place: Buffer,
    mean: float,
    keep: float,
    room: Buffer,
    sets: Buffer,
    k: int,
    whole: bool,
    client_share: float,
    /,
) -> tuple[int, float, float, float, int]: ...
def draft_on(
    target: Buffer,
    draft: Buffer,
    limit: float,
    chance: Buffer,
    class_of: Buffer,
    share: Buffer,
    step: int,
    values: Buffer,
    depth: Buffer,
    survival: Buffer,
    room: Buffer,
    wanted: Buffer,
    drafted: Buffer,
    gained: Buffer,
    k: int,
    per_bin: float,
    bar: float,
    whole: bool,
    /,
) -> bool: ...
def convolve(single: Buffer, gained: Buffer, k: int, num_bins: int, /) -> None: ...

# `drafted`: bool [steps, n]; `knobs`: as in `Filter`, from `half_life` on. The level of
# the workload, and whether there was a token.
def learn_levels(
    slots: Buffer,
    logits: Buffer,
    chances: Buffer,
    drafted: Buffer,
    level: Buffer,
    place: Buffer,
    variance: Buffer,
    fall: Buffer,
    counts: Buffer,
    chance: Buffer,
    mean: float,
    keep: float,
    knobs: Buffer,
    /,
) -> tuple[float, int]: ...

# `where`: int64 [2, steps * n], positions and rows; `labels`: [3, steps * n], z, what
# was predicted, what came. How many there are, and the tokens that were expected.
def judge(
    values: Buffer,
    survival: Buffer,
    steps: int,
    rows: Buffer,
    verified: Buffer,
    accepted: Buffer,
    slots: Buffer,
    offset: Buffer,
    precision: Buffer,
    keep: float,
    prior: float,
    limit: float,
    where: Buffer,
    labels: Buffer,
    /,
) -> tuple[int, float]: ...

# Tokens of the set, those that are expected, seconds.
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
