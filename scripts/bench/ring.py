"""Time of a write to the ring and of a read from it, by record size.

Run: python scripts/bench/ring.py [--seconds 2]

Records are VERIFY records with three captured layers and a hidden-state teacher in
bfloat16. The median is over single calls. The reader drains between batches, outside
of the timed writes, as on another core.
"""

import argparse
import platform
import statistics
import sys
import time
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]
from bench.harness.common import cpu_model
from vllm_tide import _shm
from vllm_tide.transport import Phase, RingReader, RingSpec, RingWriter
from vllm_tide.transport.record import (
    DTYPE_CODES,
    FORMAT_VERSION,
    HIDDEN,
    META,
    Frames,
)

SIZES = ((256, 1), (256, 4), (1024, 8), (4096, 4), (4096, 64), (8192, 512))
RING_BYTES = 256 << 20
LAYERS = (2, 16, 29)


def make_frames(hidden_size: int, num_rows: int) -> Frames:
    """Return the frames of one VERIFY record of random bits, as capture makes them."""
    rng = np.random.default_rng(0)
    sources = (
        rng.integers(1000, size=num_rows, dtype=np.int32),
        rng.integers(
            2**16, size=(num_rows, len(LAYERS) * hidden_size), dtype=np.uint16
        ),
        rng.integers(2**16, size=(num_rows, hidden_size), dtype=np.uint16),
    )
    meta = np.zeros(1, META)
    meta["key"], meta["phase"], meta["rows"] = 1, Phase.VERIFY, num_rows
    meta["num_accepted"], meta["flags"] = num_rows - 1, HIDDEN
    meta["feature_width"], meta["hidden_width"] = len(LAYERS) * hidden_size, hidden_size
    meta["dtype"], meta["format"] = DTYPE_CODES["bfloat16"], FORMAT_VERSION
    return Frames(
        meta,
        np.array([[(0, source.nbytes) for source in sources]], np.int64),
        np.zeros(1, np.bool_),
        sources,
        np.zeros(1, np.uint8),
    )


def measure(hidden_size: int, num_rows: int, seconds: float) -> None:
    """Measure one size and print its line of the table."""
    spec = RingSpec("bench", hidden_size, LAYERS, 100_000, "bfloat16", "hidden", 64)
    frames = make_frames(hidden_size, num_rows)
    writer = RingWriter.create(spec, RING_BYTES)
    reader = RingReader.attach(writer.name)
    writes: list[float] = []
    reads: list[float] = []
    clock = time.perf_counter
    writer.write(frames)
    writer.count(frames)
    size = writer.stats().used_bytes
    batch = max(1, min(32, RING_BYTES // 2 // size))
    end = clock() + seconds
    while clock() < end:
        for _ in range(batch):
            begin = clock()
            writer.write(frames)
            writer.count(frames)
            writes.append(clock() - begin)
            if frames.status[0]:
                raise SystemExit(f"dropped: {writer.drops}")
        while True:
            begin = clock()
            if reader.read() is None:
                break
            reads.append(clock() - begin)
    reader.close()
    writer.close()
    write, read = statistics.median(writes), statistics.median(reads)
    tail = statistics.quantiles(writes, n=100)[98]
    print(
        f"{hidden_size:6} {num_rows:5} {size:10} {write * 1e6:9.1f} {tail * 1e6:9.1f} "
        f"{size / write / 1e9:8.2f} {read * 1e6:9.1f}"
    )


def main() -> None:
    """Measure every size and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.0, help="seconds per size")
    arguments = parser.parse_args()
    print(f"{cpu_model()}, Python {platform.python_version()}, ", end="")
    print(f"CRC-32C in hardware: {_shm.crc32c_is_hardware()}")
    print("hidden  rows      bytes  write us   p99 us     GB/s   read us")
    for hidden_size, num_rows in SIZES:
        measure(hidden_size, num_rows, arguments.seconds)


if __name__ == "__main__":
    main()
