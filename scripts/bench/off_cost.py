#!/usr/bin/env python
"""What control costs while it keeps speculation off, step by step.

Two engines live in one process on the same target, one plain, one with a draft and
`tide.control` that never finds speculation worth it. They step in turns, on the same
requests, so a change of the machine's speed falls on both alike. Where an engine's
weights come to lie in memory changes its speed by more than control does, so engines
are built several times, the plain one first and last in turn; the figure is over all
of these.

    scripts/bench/off_cost.py --target DIR [--batches 1,4,16] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

HERE = Path(__file__).resolve().parents[1]


def engine(target: str, draft: str | None, batch: int, run_dir: str):
    """A plain engine, or one with a draft that is never used."""
    from vllm import LLM

    speculation = {}
    if draft is not None:
        speculation["speculative_config"] = {
            "method": "eagle3",
            "model": draft,
            "num_speculative_tokens": 7,
            "tide": {
                "run_dir": run_dir,
                "capture": {"enabled": False},
                "swap": {"enabled": False},
                # A gain that no draft reaches, and no probing: off for good.
                "control": {"policy": "adaspec", "min_gain": 10.0, "probe_share": 0.0},
            },
        }
    return LLM(
        target,
        dtype="float32",
        max_model_len=1024,
        enforce_eager=True,
        enable_prefix_caching=False,
        max_num_seqs=batch,
        kv_cache_memory_bytes=1 << 27,
        disable_log_stats=False,
        **speculation,
    ).llm_engine


def begin(engine, batch: int, tokens: int) -> None:
    """Queue `batch` greedy requests of 40 tokens that generate `tokens` more."""
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0)
    for i in range(batch):
        prompt = list(range(5 + i, 45 + i))
        engine.add_request(f"{i}", {"prompt_token_ids": prompt}, sampling)


def finish(engine) -> None:
    """Step until nothing is left."""
    while engine.has_unfinished_requests():
        engine.step()


def measure(plain, off, batch: int, steps: int, warm_up: int) -> dict[str, float]:
    """Median milliseconds per step of both, and the median ratio of adjacent pairs."""
    for each in (plain, off):
        begin(each, batch, steps + warm_up + 8)
        for _ in range(warm_up):
            each.step()
    seconds: dict[str, list[float]] = {"plain": [], "off": []}
    for turn in range(steps):
        order = [("plain", plain), ("off", off)]
        for name, each in order if turn % 2 else order[::-1]:
            began = time.perf_counter()
            each.step()
            seconds[name].append(time.perf_counter() - began)
    finish(plain)
    finish(off)
    return {
        "batch": batch,
        "plain_ms": 1e3 * statistics.median(seconds["plain"]),
        "off_ms": 1e3 * statistics.median(seconds["off"]),
        "ratio": statistics.median(
            o / p for o, p in zip(seconds["off"], seconds["plain"], strict=True)
        ),
    }


def one_build(
    options: argparse.Namespace, batches: list[int]
) -> list[dict[str, float]]:
    """Build both engines and measure each batch size."""
    with tempfile.TemporaryDirectory() as run_dir:
        drafts = {"plain": None, "off": options.draft}
        names = ["plain", "off"] if options.build % 2 == 0 else ["off", "plain"]
        engines = {
            n: engine(options.target, drafts[n], max(batches), run_dir) for n in names
        }
        return [
            measure(engines["plain"], engines["off"], b, options.steps, options.warm_up)
            for b in batches
        ]


def over_builds(builds: list[list[dict[str, float]]]) -> list[dict[str, float]]:
    """Medians of times, the geometric mean of the ratios and their extremes."""
    rows = []
    for same in zip(*builds, strict=True):
        ratios = [row["ratio"] for row in same]
        rows.append(
            {
                "batch": same[0]["batch"],
                "builds": len(same),
                "plain_ms": statistics.median(row["plain_ms"] for row in same),
                "off_ms": statistics.median(row["off_ms"] for row in same),
                "ratio": statistics.geometric_mean(ratios),
                "ratio_low": min(ratios),
                "ratio_high": max(ratios),
            }
        )
    return rows


def main() -> int:
    """Run the builds and print; the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", default=str(HERE / "demo" / "target"))
    parser.add_argument("--draft", default=str(HERE / "demo" / "draft"))
    parser.add_argument("--batches", default="1,4,16", help="default: %(default)s")
    parser.add_argument(
        "--steps", type=int, default=150, help="pairs, default: %(default)s"
    )
    parser.add_argument("--warm-up", type=int, default=30)
    parser.add_argument("--builds", type=int, default=6, help="default: %(default)s")
    parser.add_argument("--build", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--json", help="write the figures here")
    options = parser.parse_args()
    batches = [int(b) for b in options.batches.split(",")]

    if options.build is not None:
        print(json.dumps(one_build(options, batches)))
        return 0
    builds = []
    for number in range(options.builds):
        command = [sys.executable, *sys.argv, "--build", str(number)]
        ran = subprocess.run(command, capture_output=True, text=True)
        if ran.returncode:
            print(ran.stderr, file=sys.stderr)
            return 1
        builds.append(json.loads(ran.stdout.splitlines()[-1]))
        print(f"build {number + 1}/{options.builds}:", end="")
        print(
            "".join(f"  batch {r['batch']} {r['ratio']:.4f}" for r in builds[-1]),
            flush=True,
        )
    rows = over_builds(builds)
    for row in rows:
        print(
            f"batch {row['batch']:3d}: plain {row['plain_ms']:.2f} ms, off "
            f"{row['off_ms']:.2f} ms a step; ratio {row['ratio']:.4f} "
            f"[{row['ratio_low']:.4f}, {row['ratio_high']:.4f}] "
            f"over {row['builds']} builds"
        )
    if options.json:
        from bench.harness.common import environment
        from json_text import json_text

        document = {
            "rows": rows,
            "builds": builds,
            "environment": environment({"target": Path(options.target).name}),
        }
        Path(options.json).write_text(json_text(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
