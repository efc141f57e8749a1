"""What a client can tell about a shared draft: was this request trained on?

Some requests of the demo are trained on by the trainer's own step, as many are not.
After N passes both are scored as a client sees them: accepted tokens of each answer.
The AUC is the chance that a request that was trained on is accepted better than one
that was not; 0.5 is a guess. A small buffer is the worst case: more requests dilute
each other.

    membership.py [--passes 0,1,2,4,8,15] [--requests 40] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]
from bench.harness.stream import load_pool
from vllm_tide.config import TrainConfig
from vllm_tide.draft.checkpoint import load_draft
from vllm_tide.draft.target import TargetRows
from vllm_tide.train.evaluate import evaluate
from vllm_tide.train.packing import take_batch
from vllm_tide.train.sample import Sample
from vllm_tide.train.trainer import Trainer

DEMO = Path(__file__).parents[1] / "demo"
DEPTH = 3


def documents(
    target: Path, prompts: Sequence[Sequence[int]], layers: Sequence[int], new: int
) -> list[Sample]:
    """Greedy answers of the target with what an engine captures of them."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    with torch.inference_mode():
        tokens = model.generate(
            torch.tensor(prompts),
            attention_mask=torch.ones(len(prompts), len(prompts[0])),
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            pad_token_id=0,
        )
        states = model(tokens, output_hidden_states=True).hidden_states
    features = torch.cat([states[layer] for layer in layers], dim=-1)
    return [
        Sample.offline(
            tokens[row].clone(),
            features[row].clone(),
            states[-1][row].clone(),  # after the final norm
            num_prompt_tokens=len(prompts[row]),
            key=row,
        )
        for row in range(len(prompts))
    ]


def auc(members: Sequence[float], others: Sequence[float]) -> float:
    """Chance that a member scores higher than another; a tie is half."""
    wins = sum((a > b) + 0.5 * (a == b) for a in members for b in others)
    return wins / (len(members) * len(others))


def lengths(trainer: Trainer, samples: Sequence[Sample]) -> list[float]:
    """Acceptance length of each request under greedy decoding (tokens per step)."""
    found = evaluate(trainer.draft, trainer.target, samples, DEPTH)
    return [1 + row[1] / row[0] for row in found.requests.values()]


def measure(args: argparse.Namespace) -> list[dict[str, float]]:
    """Rows: passes, steps, mean acceptance of both halves, AUC."""
    pool = load_pool(args.prompts, args.target, (args.domain,)).prompts[args.domain]
    ids = sorted({tuple(p[: args.prompt_tokens]) for p in pool})
    ids = [p for p in ids if len(p) == args.prompt_tokens]
    random.Random(args.seed).shuffle(ids)  # noqa: S311 - not cryptographic
    if len(ids) < 2 * args.requests:
        raise SystemExit(f"error: --requests: only {len(ids)} prompts; ask for fewer")
    rows = TargetRows.load(args.target)
    draft = load_draft(args.draft, rows, frozenset())
    layers = draft.config.aux_layer_ids
    made = documents(args.target, ids[: 2 * args.requests], layers, args.new_tokens)
    members, others = made[: args.requests], made[args.requests :]
    config = TrainConfig()
    trainer = Trainer(draft, rows, config, num_speculative_tokens=DEPTH)
    found, steps, order = [], 0, random.Random(args.seed)  # noqa: S311
    for passes in range(max(args.passes) + 1):
        if passes in args.passes:
            seen, unseen = lengths(trainer, members), lengths(trainer, others)
            row = {
                "passes": passes,
                "steps": steps,
                "members": round(sum(seen) / len(seen), 3),
                "others": round(sum(unseen) / len(unseen), 3),
                "auc": round(auc(seen, unseen), 3),
            }
            found.append(row)
            print(json.dumps(row), flush=True)
        queue = deque(order.sample(members, len(members)))
        while queue and passes < max(args.passes):
            batch = take_batch(queue, args.batch_tokens)
            trainer.stepper.run(batch, args.batch_tokens, 1.0)
            steps += 1
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--target", type=Path, default=DEMO / "target")
    parser.add_argument("--draft", type=Path, default=DEMO / "draft")
    parser.add_argument("--prompts", type=Path, default=DEMO / "prompts")
    parser.add_argument("--domain", default="c")
    parser.add_argument("--requests", type=int, default=40, help="of each kind")
    parser.add_argument("--prompt-tokens", type=int, default=48)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--batch-tokens", type=int, default=2304)
    parser.add_argument(
        "--passes",
        type=lambda text: [int(part) for part in text.split(",")],
        default=[0, 1, 2, 4, 8, 15],
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    began = time.monotonic()
    found = measure(args)
    if args.json is not None:
        facts = {
            "domain": args.domain,
            "requests": args.requests,
            "prompt_tokens": args.prompt_tokens,
            "new_tokens": args.new_tokens,
            "seconds": round(time.monotonic() - began),
        }
        args.json.write_text(json.dumps({**facts, "rows": found}, indent=1))


if __name__ == "__main__":
    main()
