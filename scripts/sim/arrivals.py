"""Traces: arrival times, prompt lengths and output lengths of requests."""

from __future__ import annotations

import csv
import gzip
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

COLUMNS = ["arrival_s", "input_tokens", "output_tokens"]
PATTERNS = ("rate_drop", "periodic", "fluctuating")

# AdaSpec's evaluation drops prompts beyond 1024 tokens. Clipping them instead keeps
# the arrival pattern.
MAX_INPUT = 1024


class SimError(ValueError):
    """Invalid options or input of the simulator."""


@dataclass(frozen=True, eq=False)
class Trace:
    """Requests in order of arrival.

    Attributes:
        name: Name in the results.
        arrival: [R] float64 seconds from the trace's start, ascending.
        prompt: [R] int64 tokens, at least 1.
        output: [R] int64 tokens, at least 1.
    """

    name: str
    arrival: np.ndarray
    prompt: np.ndarray
    output: np.ndarray

    def __len__(self) -> int:
        return len(self.arrival)

    def window(self, seconds: float) -> Trace:
        """Return the requests of the first `seconds`."""
        return self._pick(self.arrival < seconds)

    def clipped(self, max_input: int) -> Trace:
        """Return the trace with prompts of at most `max_input` tokens."""
        prompt = np.minimum(self.prompt, max_input)
        return Trace(self.name, self.arrival, prompt, self.output)

    def _pick(self, keep: np.ndarray) -> Trace:
        return Trace(
            self.name, self.arrival[keep], self.prompt[keep], self.output[keep]
        )


def load(path: Path) -> Trace:
    """Read a CSV file, or a gzipped one, with the columns `COLUMNS`.

    Raises:
        SimError: The file is missing or not a trace.
    """
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8", newline="") as lines:
            reader = csv.reader(lines)
            header = next(reader, [])
            if header != COLUMNS:
                raise SimError(
                    f"{path}: not a trace: its first line must be {','.join(COLUMNS)}"
                )
            rows = np.array([[float(cell) for cell in row] for row in reader])
    except OSError as error:
        raise SimError(f"cannot read trace {path}: {error.strerror}") from error
    except (ValueError, EOFError, zlib.error) as error:
        if isinstance(error, SimError):
            raise
        raise SimError(f"{path}: not a trace: {error}") from error
    if rows.ndim != 2 or rows.shape[1] != len(COLUMNS):
        raise SimError(f"{path}: a trace needs rows of {len(COLUMNS)} numbers")
    if not np.isfinite(rows).all() or (rows < 0).any():
        raise SimError(f"{path}: a trace's numbers must be finite and not negative")
    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    lengths = np.maximum(rows[:, 1:].astype(np.int64), 1)
    name = path.name.removesuffix(".gz").removesuffix(".csv")
    return Trace(name, rows[:, 0], lengths[:, 0], lengths[:, 1])


def synthetic(pattern: str, seconds: float, rate: float, seed: int) -> Trace:
    """Generate a trace of one of the AdaSpec paper's three arrival patterns.

    Args:
        pattern: `rate_drop` (minute-level swings, then near silence), `periodic`
            (batches on a grid of three seconds), or `fluctuating` (steady minutes,
            noisy seconds).
        seconds: Length of the trace.
        rate: Mean requests per second over the trace.
        seed: Determines the trace.

    Raises:
        SimError: Unknown pattern.
    """
    if pattern not in PATTERNS:
        raise SimError(
            f"unknown pattern {pattern!r}; choose from {', '.join(PATTERNS)}"
        )
    rng = np.random.default_rng([seed, zlib.crc32(pattern.encode())])
    begin = np.arange(0.0, seconds, 1.0)
    if pattern == "rate_drop":
        place = begin / seconds
        weight = 1.0 + 0.5 * np.sin(begin * (2 * np.pi / 120.0))
        weight = np.where(place < 0.7, weight, 0.08)
    elif pattern == "periodic":
        weight = np.where(begin.astype(np.int64) % 3 == 0, 1.0, 0.0)
        weight *= rng.gamma(4.0, 0.25, len(begin))
    else:
        weight = rng.gamma(2.0, 0.5, len(begin))
    count = rng.poisson(weight * (rate * seconds / weight.sum()))
    start = np.repeat(begin, count)
    # A batch arrives at once; arrivals are uniform within other seconds.
    spread = 0.05 if pattern == "periodic" else 1.0
    arrival = np.sort(start + rng.random(len(start)) * spread)
    prompt = _lengths(rng, len(arrival), median=900, spread=0.8, most=8192)
    output = _lengths(rng, len(arrival), median=180, spread=0.8, most=1024)
    return Trace(pattern, arrival, prompt, output)


def _lengths(
    rng: np.random.Generator, count: int, median: int, spread: float, most: int
) -> np.ndarray:
    drawn = np.exp(np.log(median) + spread * rng.standard_normal(count))
    return np.asarray(np.clip(drawn, 1, most).astype(np.int64))
