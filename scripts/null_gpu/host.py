#!/usr/bin/env python
"""Measure the host's time of each call into vllm_tide, at an 8B's shape.

One engine per arm on the null GPU, all drafting as deep as upstream. What runs before a
step's launches (`begin_step`) delays the GPU if the host is late; `stage` runs between
the target's and the draft's; `on_step` after them: it contains `learn` and `write`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from json_text import json_text

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "gpu"), str(HERE)]
ARMS: dict[str, dict[str, Any]] = {
    "off": {"preset": "observe", "capture": {"enabled": False}},
    "control": {"capture": {"enabled": False}, "train": {"autostart": False}},
    "default": {"capture": {"ring_mib": 1024}, "train": {"autostart": False}},
    "memory": {
        "capture": {"ring_mib": 1024},
        "train": {"autostart": False},
        "test_time": {"memory": "ngram"},
    },
}
BATCHES = (1, 64, 256)


def measure(arm: str, work: Path, steps: int) -> None:
    """Run one engine and print its figures."""
    import adaptive
    import steps as gpu_steps
    from engine import patch_step_results
    from inprocess import Engine, shape

    patch_step_results()
    patch_copies()
    adaptive.patch_acceptance_model()
    adaptive.patch_measured_times()
    adaptive.patch_observations()
    place: Any = argparse.Namespace(dry=False, work=work)
    limits: dict[str, Any] = {"max_num_seqs": 256, "max_num_batched_tokens": 8192}
    limits |= {"load_format": "dummy", "skip_tokenizer_init": True}
    limits |= {"kv_cache_memory_bytes": 64 << 30, "max_model_len": 2048}
    limits["compilation_config"] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    limits["adaptive"] = gpu_steps.ADAPTIVE
    engine = Engine(place, shape(place), gpu_steps.K, ARMS[arm], **limits)
    spent = gpu_steps.timed(engine.tide)
    result = {}
    for batch in BATCHES:
        gpu_steps.load(engine, batch)
        engine.depths.freeze(gpu_steps.K)
        gpu_steps.run(engine, 40)
        for times in spent.values():
            times.clear()
        engine.depths.clear()
        gpu_steps.run(engine, steps)
        engine.depths.check()
        result[batch] = {
            name: gpu_steps.percentiles(of, 1e6) for name, of in spent.items() if of
        }
    print("RESULT " + json.dumps(result), flush=True)


def patch_copies() -> None:
    """Copy few bytes of a step's rows: here the host copies them, not the GPU."""
    import torch

    from vllm_tide.engine.device_stage import DeviceRows, DeviceStage

    def send(stage: DeviceStage, staged: DeviceRows, rows: torch.Tensor) -> None:
        assert staged.host is not None
        staged.ended.record()
        stage._copies.wait_event(staged.ended)
        with torch.cuda.stream(stage._copies):
            staged.host[:64].copy_(rows[:64], non_blocking=True)
            staged.landed.record()

    DeviceStage.send = send  # type: ignore[method-assign]


def main() -> int:
    """Measure all arms; return 0 if every engine ran."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.arm:
        measure(options.arm, options.work, options.steps)
        return 0
    rows, failed = [], 0
    for arm in options.arms.split(","):
        with tempfile.TemporaryDirectory() as work:
            command = [sys.executable, __file__, "--arm", arm, "--work", work]
            command += ["--steps", str(options.steps)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        lines = [x for x in done.stdout.splitlines() if x.startswith("RESULT ")]
        if not lines:
            failed += 1
            print(arm, "failed:", (done.stdout + done.stderr)[-3000:])
            continue
        for batch, calls in json.loads(lines[0].removeprefix("RESULT ")).items():
            for call, times in calls.items():
                rows.append({"arm": arm, "requests": int(batch), "call": call, **times})
                shown = ", ".join(f"{k} {v:.0f}" for k, v in times.items())
                print(f"{arm}, {batch} requests, {call}: {shown} us", flush=True)
        if options.json:
            options.json.write_text(json_text({"unit": "us", "rows": rows}), "utf-8")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
