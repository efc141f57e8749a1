#!/usr/bin/env python
"""Look for reads before their copies have landed, on the null GPU.

The null GPU delays copies at random (NULL_GPU_LATE), so a buffer that is read, reused
or overwritten too early has wrong contents. Steps with known numbers pass through the
code that copies a step's numbers and rows to the host, and drafts through the upload.
Then the same with planted faults, each of which must be found.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from json_text import json_text
from vllm_tide.engine import device_stage, staged_draft, staging, steps
from vllm_tide.engine.device_stage import DeviceRows, DeviceStage
from vllm_tide.engine.staging import RunLayout, RunRing
from vllm_tide.engine.steps import StepBuffer, StepLog

DEVICE = torch.device("cuda:0")
REQUESTS, DEPTH, ROWS, WIDTH = 4, 3, 64, 32
PLACES = 6


def gather(parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Do what `gather_step` does by copies, as kernels do nothing here."""
    at = 0
    for part in parts:
        flat = part.reshape(-1).view(torch.int32)
        out[at : at + len(flat)].copy_(flat)
        at += len(flat)


def pack(layers: Sequence[torch.Tensor], rows: torch.Tensor, out: torch.Tensor) -> None:
    """Copy row 0 of a layer, and the row numbers behind it."""
    out[0, : layers[0].shape[1]].copy_(layers[0][0])
    count = min(len(rows), out.shape[1] // 2 - WIDTH)
    out[0].view(torch.int32)[WIDTH // 2 : WIDTH // 2 + count].copy_(rows[:count])


def on_device(value: int, count: int, alive: list[torch.Tensor]) -> torch.Tensor:
    """Return [count] filled with a value by a copy; `alive` holds its source."""
    alive.append(torch.full((count,), value, dtype=torch.int32).pin_memory())
    result = torch.empty(count, dtype=torch.int32, device=DEVICE)
    return result.copy_(alive[-1], non_blocking=True)


def traffic(count: int) -> int:
    """Pass steps through log and stage; return the number of wrong ones."""
    log = StepLog(ROWS, REQUESTS, DEPTH, DEVICE)
    layout = RunLayout(ROWS, 0, 3, WIDTH, torch.bfloat16, False, 0)
    stage = DeviceStage(PLACES, layout, DEVICE, 1 << 14)
    # The model's buffers, overwritten by each step.
    tokens = torch.empty(ROWS, dtype=torch.int32, device=DEVICE)
    hidden = torch.empty(ROWS, WIDTH, dtype=torch.bfloat16, device=DEVICE)
    wrong, numbers, alive = 0, {}, []  # type: ignore[var-annotated]
    prompt_len = np.full(REQUESTS, 5, np.int32)
    for number in range(1, count + 1):
        source = on_device(number, ROWS * WIDTH // 2, alive)
        tokens.copy_(source[:ROWS])
        hidden.copy_(source.view(torch.bfloat16).view(ROWS, WIDTH))
        batch = batch_of(number, tokens)
        step = log.open(batch, prompt_len, 0)
        if step is not None:
            numbers[id(step)] = number
            rows = np.arange(number % 3, number % 3 + 2 * REQUESTS, dtype=np.int32)
            step.staged = stage.fill([hidden] * 3, hidden, rows, None)
            sampled = tokens[: REQUESTS * (DEPTH + 1)].view(REQUESTS, DEPTH + 1)
            output = SimpleNamespace(
                num_sampled=tokens[:REQUESTS], sampled_token_ids=sampled
            )
            confidence = tokens[: REQUESTS * DEPTH].view(torch.float32)
            drafts = tokens[:REQUESTS].view(REQUESTS, 1)
            log.fill(step, batch, output, confidence.view(REQUESTS, DEPTH), drafts)
        log.begin(())
        wrong += finish(log, numbers)
    torch.cuda.synchronize()
    wrong += finish(log, numbers)
    stage.close()
    return wrong


def batch_of(number: int, tokens: torch.Tensor) -> Any:
    """Return a batch of two rows for each request."""
    bounds = np.arange(REQUESTS + 1, dtype=np.int32) * 2
    names = [f"{number}-{i}" for i in range(REQUESTS)]
    return SimpleNamespace(
        req_ids=names,
        num_reqs=REQUESTS,
        num_tokens=2 * REQUESTS,
        max_query_len=None,
        query_start_loc_np=bounds,
        cu_num_logits_np=bounds,
        num_draft_tokens_per_req=None,
        is_prefilling_np=np.zeros(REQUESTS, bool),
        idx_mapping_np=np.arange(REQUESTS),
        seq_lens=tokens[:REQUESTS],
        input_ids=tokens[: 2 * REQUESTS],
    )


def finish(log: StepLog, numbers: dict[int, int]) -> int:
    """Read the steps that have landed; return the number of wrong ones."""
    wrong = 0
    for step in log.landed():
        number = numbers[id(step)]
        token_ids, sampled = np.asarray(step.token_ids), np.asarray(step.sampled)
        wrong += not ((token_ids == number).all() and (sampled == number).all())
    for step in log.done(wait_for_next=True):
        number = numbers.pop(id(step))
        if step.staged is None:
            continue
        ints = step.staged.layout.features(step.staged.host)[0].view(torch.int32)
        rows = np.arange(number % 3, number % 3 + 2 * REQUESTS)
        good = (ints[: WIDTH // 2] == number).all()
        if number % 3:
            packed = ints[WIDTH // 2 : WIDTH // 2 + 2 * REQUESTS].numpy()
            good = good and (packed == rows[: len(packed)]).all()
        wrong += not good
    return wrong


def uploads(count: int) -> int:
    """Upload drafts and install them; return the number of wrong ones."""
    size, wrong = 3000, 0
    reference = {"w": torch.zeros(size, dtype=torch.int64)}
    buffer = staged_draft.DeviceBuffer(reference, frozenset(), torch.bfloat16, DEVICE)
    model = torch.empty(size, dtype=torch.int64, device=DEVICE)
    host = torch.empty(size, dtype=torch.int64)
    for number in range(1, count + 1):
        draft = {"w": torch.full((size,), number, dtype=torch.int64)}
        on_gpu = buffer.upload(draft)
        if number > 1:  # the model still has the previous draft
            host.copy_(model)
            wrong += not bool((host == number - 1).all())
        model.copy_(on_gpu["w"])
        buffer.installed()
    torch.cuda.synchronize()
    buffer.close()
    return wrong


# Planted faults


def early(owner: type, name: str) -> contextlib.AbstractContextManager[Any]:
    """Count a copy as complete at once."""
    return patch.object(owner, name, lambda *_: True)


@contextlib.contextmanager
def without_wait(module: Any) -> Iterator[None]:
    """Let a module's copies not wait for what they copy."""

    class Stream(torch.cuda.Stream):
        def wait_event(self, event: Any) -> None:
            del event

    with patch.object(module.torch.cuda, "Stream", Stream):
        yield


@contextlib.contextmanager
def recorded_before(owner: type, name: str) -> Iterator[None]:
    """Record the event of a copy before the copy."""
    inner = getattr(owner, name)

    def first(self: Any, *args: Any) -> None:
        event = self._event if owner is StepBuffer else args[0].landed
        event.record()
        with patch.object(type(event), "record", lambda *_: None):
            inner(self, *args)

    with patch.object(owner, name, first):
        yield


@contextlib.contextmanager
def freed_when_sent() -> Iterator[None]:
    """Free a run of rows before its copy has landed."""
    send, give_back = DeviceStage.send, RunRing.give_back

    def sent(self: DeviceStage, staged: DeviceRows, rows: torch.Tensor) -> None:
        send(self, staged, rows)
        give_back(self._ring, staged.run)

    with (
        patch.object(DeviceStage, "send", sent),
        patch.object(RunRing, "give_back", lambda *_: None),
    ):
        yield


@contextlib.contextmanager
def one_buffer() -> Iterator[None]:
    """Share one buffer of numbers between all steps."""
    init = StepLog.__init__

    def made(self: StepLog, *args: Any) -> None:
        init(self, *args)
        self._free = [self.buffers[0]] * len(self.buffers)

    with patch.object(StepLog, "__init__", made):
        yield


@contextlib.contextmanager
def one_index() -> Iterator[None]:
    """Share one array of row numbers on the host between all steps."""
    init = DeviceStage.__init__

    def made(self: DeviceStage, *args: Any) -> None:
        init(self, *args)
        for rows in self._free:
            rows.indices = self._free[0].indices

    with patch.object(DeviceStage, "__init__", made):
        yield


@contextlib.contextmanager
def unsent_rows() -> Iterator[None]:
    """Read rows although their copy was not enqueued."""
    with patch.object(DeviceRows, "send", lambda _: None):
        yield


class Done:
    """An event that is complete at once."""

    def record(self, *_: Any) -> None:
        pass

    def query(self) -> bool:
        return True


def no_event(name: str) -> Callable[[], Any]:
    """Let an upload not wait for its event."""

    @contextlib.contextmanager
    def planted() -> Iterator[None]:
        init = staged_draft.DeviceBuffer.__init__

        def made(self: Any, *args: Any) -> None:
            init(self, *args)
            if name == "_installed":
                self._stream.wait_event = lambda _: None
            else:
                self._copied = Done()

        with patch.object(staged_draft.DeviceBuffer, "__init__", made):
            yield

    return planted


PLANTED: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "numbers are read before the event": lambda: early(StepBuffer, "filled"),
    "rows are read before the event": lambda: early(DeviceRows, "filled"),
    "numbers: the copy does not wait": lambda: without_wait(steps),
    "rows: the copy does not wait": lambda: without_wait(device_stage),
    "numbers: event before copy": lambda: recorded_before(StepBuffer, "_enqueue"),
    "rows: event before copy": lambda: recorded_before(DeviceStage, "send"),
    "rows: run reused before the copy": freed_when_sent,
    "numbers: one buffer for all steps": one_buffer,
    "rows: one index array for all steps": one_index,
    "rows: never sent": unsent_rows,
    "draft: pieces overwritten while copied": no_event("_copied"),
    "draft: overwritten while installed": no_event("_installed"),
}


def check(name: str, count: int) -> int:
    """Run everything, with a planted fault if named; return the wrong results."""
    planted = PLANTED[name]() if name else contextlib.nullcontext()
    with (
        planted,
        patch.object(steps, "gather_step", gather),
        patch.object(StepBuffer, "warm_up", lambda _: None),
        patch.object(staging, "pack_rows", pack),
        patch.object(staged_draft, "PIECE_BYTES", 4096),
    ):
        return traffic(count) + uploads(count // 10)


def run(name: str, seed: int, options: argparse.Namespace) -> int:
    """Run `check` in a separate process, as the delays are read at its start."""
    env = os.environ | {"NULL_GPU_LATE": "20", "NULL_GPU_SEED": str(seed)}
    command = [sys.executable, __file__, "--case", name, "--steps", str(options.steps)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return int(done.stdout.split()[-1])


def main() -> int:
    """Return 0 if the code has no race and every planted one was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case is not None:
        print(check(options.case, options.steps))
        return 0
    seeds = range(options.seeds)
    clean = [run("", seed, options) for seed in seeds]
    print(f"wrong results by seed: {clean}", flush=True)
    wrong = {}
    for name in PLANTED:
        wrong[name] = run(name, 0, options)
        print(f"planted, {name}: {wrong[name]} wrong results", flush=True)
    result = {"steps": options.steps, "clean": clean, "planted": wrong}
    if options.json:
        options.json.write_text(json_text(result), encoding="utf-8")
    print(json.dumps({"found": sum(map(bool, wrong.values())), "planted": len(wrong)}))
    return int(any(clean) or not all(wrong.values()))


if __name__ == "__main__":
    sys.exit(main())
