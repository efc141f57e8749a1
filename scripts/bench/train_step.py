"""Speed of a training step at the demo model's size, by compute dtype, on one thread.

    python scripts/bench/train_step.py [--doc-tokens 256] [--steps 8]

Prints one JSON object per dtype: packed rows per second and peak memory.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time

import torch

from vllm_tide.config import TrainConfig
from vllm_tide.draft.eagle3 import Eagle3Draft
from vllm_tide.draft.eagle3_config import Eagle3Config
from vllm_tide.draft.target import TargetRows
from vllm_tide.train import step as train_step
from vllm_tide.train.packing import pack
from vllm_tide.train.sample import Sample
from vllm_tide.train.step import TrainStep


def _documents(args: argparse.Namespace, hidden: int, vocab: int) -> list[Sample]:
    count = args.batch_tokens // args.doc_tokens
    return [
        Sample(
            key=i,
            start=0,
            num_prompt_tokens=max(1, int(args.doc_tokens * args.prompt_share)),
            tokens=torch.randint(0, vocab, (args.doc_tokens,), dtype=torch.int32),
            features=torch.randn(args.doc_tokens, 3 * hidden).bfloat16(),
            has_teacher=torch.ones(args.doc_tokens, dtype=torch.bool),
            teacher_hidden=(torch.randn(args.doc_tokens, hidden) * 4).bfloat16(),
        )
        for i in range(count)
    ]


def measure(args: argparse.Namespace, dtype: str) -> dict[str, object]:
    """Measure `args.steps` steps after two warm-up steps."""
    torch.manual_seed(0)
    hidden, vocab = 256, 4096
    shape = Eagle3Config(
        hidden_size=hidden,
        intermediate_size=576,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=vocab,
        draft_vocab_size=vocab,
        aux_layer_ids=(2, 3, 4),
        target_hidden_size=hidden,
    )
    rows = torch.randn(vocab, hidden) * hidden**-0.5
    target = TargetRows(rows, rows)
    draft = Eagle3Draft.initialise(shape, rows, rows)
    knobs = TrainConfig(ttt_steps=args.ttt_steps, batch_tokens=args.batch_tokens)
    train_step.COMPUTE_DTYPE = getattr(torch, dtype)
    step = TrainStep(draft, target, knobs)
    batch = pack(_documents(args, hidden, vocab))
    for _ in range(2):
        step.run(batch)
    begin = time.perf_counter()
    cpu = time.process_time()
    for _ in range(args.steps):
        result = step.run(batch)
    assert result is not None
    took = time.perf_counter() - begin
    used = time.process_time() - cpu
    return {
        "compute_dtype": dtype,
        "parameters": sum(p.numel() for p in step.parameters),
        "rows_per_step": batch.layout.num_trunk,
        "loss_rows_per_step": result.num_loss_rows,
        "step_ms": round(1e3 * took / args.steps, 1),
        "step_cpu_ms": round(1e3 * used / args.steps, 1),
        "tokens_per_cpu_s": round(args.steps * batch.layout.num_trunk / used),
        "tokens_per_s": round(args.steps * batch.layout.num_trunk / took),
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def main() -> None:
    """Measure every dtype and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-tokens", type=int, default=2048)
    parser.add_argument("--doc-tokens", type=int, default=256)
    parser.add_argument("--prompt-share", type=float, default=0.0)
    parser.add_argument("--ttt-steps", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for dtype in args.dtypes:
        sys.stdout.write(json.dumps(measure(args, dtype)) + "\n")


if __name__ == "__main__":
    main()
