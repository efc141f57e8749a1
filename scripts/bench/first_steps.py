"""What the first steps after a shift teach: learning rates, and rows of prompts.

    first_steps.py --target DIR --draft DIR --samples FILE [--part "1 c"] [--json FILE]

Of one part of a stream (`replay_samples.py`) some requests are trained on and others
held out, drawn anew for every seed. Prints what the draft gains on those held out
(tokens of acceptance length, teacher-forced, greedy) and the CPU time of a step.
A case may name the peak learning rate: `adamw@0.003`. With many steps on many requests
it gives a domain's ceiling:

    first_steps.py ... --cases adamw --seeds 0 --train 80 --steps 240
        --batch-tokens 1024 --save DIR
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]
from bench.harness.options import list_of
from bench.harness.samples import load_samples
from json_text import json_text
from vllm_tide.config import TrainConfig
from vllm_tide.draft.checkpoint import load_draft, save_draft
from vllm_tide.draft.target import TargetRows
from vllm_tide.train.evaluate import evaluate, gain
from vllm_tide.train.judgement import cycle_lr_scale
from vllm_tide.train.packing import pack, take_batch
from vllm_tide.train.sample import Sample
from vllm_tide.train.step import TrainStep, compute_dtype

CASES = ("adamw", "adamw@0.002", "adamw+prompts")
CYCLE_STEPS = 8


def measure(
    args: argparse.Namespace, target: TargetRows, samples: list[Sample], seed: int
) -> dict[str, dict[str, Any]]:
    """Figures by case."""
    chosen = random.Random(seed).sample(samples, len(samples))
    train, held = chosen[: args.train], chosen[-args.held_out :]
    how = {"capacity": 1024, "dtype": compute_dtype(torch.device("cpu"))}
    before = evaluate(load_draft(args.draft, target), target, held, args.depth, **how)
    out = {}
    for case in args.cases:
        name, _, rate = case.partition("@")
        draft = load_draft(args.draft, target)
        more = {"learning_rate": float(rate)} if rate else {}
        config = TrainConfig(batch_tokens=args.batch_tokens, **more)
        step = TrainStep(draft, target, config)
        shuffle, queue = random.Random(seed), deque[Sample]()
        began = time.process_time()
        for index in range(args.steps):
            if len(queue) < 3:
                queue.extend(shuffle.sample(train, len(train)))
            batch = take_batch(queue, args.batch_tokens)
            if name.endswith("+prompts"):
                batch = [replace(s, num_prompt_tokens=1) for s in batch]
            step.run(pack(batch), cycle_lr_scale(index % CYCLE_STEPS, CYCLE_STEPS))
        spent = (time.process_time() - began) / args.steps
        after = evaluate(draft, target, held, args.depth, **how)
        difference, error = gain(after, before, "greedy")
        if args.save is not None:
            save_draft(draft, args.save, torch.bfloat16)
        out[case] = {
            "before": round(before.acceptance("greedy"), 4),
            "gain": round(difference, 4),
            "error": round(error, 4),
            "step_cpu_s": round(spent, 4),
        }
        print(f"seed {seed} {case:16} {out[case]}", flush=True)
    return out


def main() -> None:
    """Run all cases on all seeds."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    for name in ("--target", "--draft", "--samples"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--part", help="default: the second")
    parser.add_argument("--cases", type=list_of(str), default=CASES)
    parser.add_argument("--seeds", type=list_of(int), default=(0, 1, 2))
    parser.add_argument("--train", type=int, default=12, help="requests")
    parser.add_argument("--held-out", type=int, default=20, help="requests")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--batch-tokens", type=int, default=512)
    parser.add_argument("--depth", type=int, default=5)
    parser.add_argument("--save", type=Path, help="folder for the last case's draft")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    parts, _ = load_samples(args.samples)
    target = TargetRows.load(args.target)
    samples = parts[args.part or list(parts)[1]]
    found = {seed: measure(args, target, samples, seed) for seed in args.seeds}
    for case in args.cases:
        gains = [figures[case]["gain"] for figures in found.values()]
        print(f"{case:16} mean gain {statistics.fmean(gains):+.3f}")
    if args.json is not None:
        args.json.write_text(json_text(found), encoding="utf-8")


if __name__ == "__main__":
    main()
