"""Time of writing a step's records to the ring, as a server writes them.

Run: python scripts/bench/ring.py [--steps 40]

Records are VERIFY records with three captured layers and a hidden-state teacher in
bfloat16, of a step of Model Runner V2 in which every request verifies 3 drafts. It is
the time that the launching thread spends in `Capture.write`, and that until its records
are written: by the same thread, as on a CPU, and by one of its own, as on a GPU.
"""

import argparse
import platform
import statistics
import time
from concurrent.futures import wait
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from vllm_tide import _shm
from vllm_tide.capture.recorder import Recorder
from vllm_tide.capture.step import Step
from vllm_tide.config import CaptureConfig
from vllm_tide.engine.capture import Capture
from vllm_tide.transport import RingSpec, RingWriter
from vllm_tide.transport.ring import Word

RING_BYTES = 256 << 20
LAYERS = (2, 16, 29)
STEPS = ((256, 64), (64, 4096), (256, 4096))  # requests, hidden size
DRAFTS = 3


class Launcher:
    """A `Capture` whose steps have landed, and whose trainer is never behind."""

    def __init__(self, batch: int, hidden_size: int, threaded: bool) -> None:
        rows = batch * (DRAFTS + 1)
        spec = RingSpec("bench", hidden_size, LAYERS, 100_000, "bfloat16", "hidden", 64)
        self.ring = RingWriter.create(spec, RING_BYTES)
        # Without its staging memory: the rows are here.
        self.capture = object.__new__(Capture)
        Recorder.__init__(self.capture, self.ring, CaptureConfig(), None, threaded)
        self.names = [f"cmpl-{i:032d}-0" for i in range(batch)]
        for name in self.names:
            self.capture._admit(name, None, True)
        self.staged = SimpleNamespace(
            features=np.zeros((rows, len(LAYERS) * hidden_size), np.uint16),
            hidden=np.zeros((rows, hidden_size), np.uint16),
            topk=None,
            release=lambda: None,
        )

    def step(self, number: int) -> Step:
        batch = len(self.names)
        bounds = np.arange(batch + 1, dtype=np.int32) * (DRAFTS + 1)
        step = Step(
            req_ids=self.names,
            bounds=bounds,
            drafts=np.full(batch, DRAFTS, np.int32),
            padding=np.zeros(batch, np.int32),
            logit_ends=bounds[1:],
            num_prompt_tokens=np.full(batch, 50, np.int32),
            version=0,
            buffer=None,  # type: ignore[arg-type]
            steps=DRAFTS,
            full=True,
            staged=self.staged,  # type: ignore[arg-type]
            first=dict(enumerate(bounds[:-1].tolist())),
        )
        step.start = np.full(batch, 100 + 2 * number, np.int64)
        step.emitted = np.full(batch, 2, np.int32)
        step.sampled = np.zeros((batch, DRAFTS + 1), np.int32)
        step.token_ids = np.zeros(batch * (DRAFTS + 1), np.int32)
        return step

    def write(self, number: int) -> tuple[float, float]:
        """Seconds in `write`, and until the records are there."""
        step = self.step(number)
        begin = time.perf_counter()
        self.capture.write(step)
        launched = time.perf_counter() - begin
        wait([done for done, _ in self.capture._under_way])
        written = time.perf_counter() - begin
        self.ring._segment.store(Word.TAIL, self.ring._head)
        return launched, written

    def close(self) -> None:
        Recorder.close(self.capture)
        if self.ring.drops:
            raise SystemExit(f"dropped: {self.ring.drops}")
        self.ring.close()


def measure_step(batch: int, hidden_size: int, steps: int) -> None:
    """Print one line of the table of steps."""
    line = f"{batch:5} {hidden_size:6} "
    for threaded in (False, True):
        launcher = Launcher(batch, hidden_size, threaded)
        times = [launcher.write(number) for number in range(steps + 5)][5:]
        launcher.close()
        for seconds in zip(*times, strict=True):
            line += f" {statistics.median(seconds) * 1e3:9.2f}"
    print(line)


def main() -> None:
    """Measure every size of a step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40, help="per size of a step")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    print(f"{model}, Python {platform.python_version()}, ", end="")
    print(f"CRC-32C in hardware: {_shm.crc32c_is_hardware()}")
    print("milliseconds a step; one thread, then with a thread of its own")
    print("batch hidden    launch   written    launch   written")
    for batch, hidden_size in STEPS:
        measure_step(batch, hidden_size, arguments.steps)


if __name__ == "__main__":
    main()
