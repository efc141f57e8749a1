r"""What it saves that features come from serving: time and storage (TIDE, tables 1, 2).

The same documents, the same training steps, three sources of the target's features:

* ``serving``: they lie in memory as captured rows do; nothing is computed for training;
* ``offline``: one forward of the target over every document beforehand, all stored;
* ``online``: a forward of the target over the documents of each step, nothing stored.

Every time is measured, the online one by really computing the features of every step.
The target runs with Transformers in the dtype given, on the same threads as the
training.  Documents are tokens of the demo's prompts joined; what they say does not
matter for time.  Example::

    python scripts/bench/no_prefill.py --target build/.../target-X --steps 60 \
        --json scripts/bench/results/no_prefill.json
"""

import argparse
import json
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from bench.harness.common import environment, write_json
from bench.harness.models import DEMO
from bench.harness.samples import rate
from bench.harness.stream import joined_prompt, load_pool
from vllm_tide.config import TideConfig, TrainConfig
from vllm_tide.draft.checkpoint import load_draft
from vllm_tide.draft.eagle3 import Eagle3Draft
from vllm_tide.draft.target import TargetRows
from vllm_tide.train.packing import pack, take_batch
from vllm_tide.train.reservoir import HOLDOUT_TOKENS
from vllm_tide.train.sample import Sample
from vllm_tide.train.step import TrainStep, compute_dtype

FEATURE_BYTES = 2  # captured and stored in bfloat16
PREFILL_DOCUMENTS = 16
Fill = Callable[[list[Sample]], list[Sample]]


class Prefill:
    """Computes features of documents with the target.

    Args:
        folder: The target.
        layer_ids: Layers whose input is wanted.
        dtype: Of the forward pass.
    """

    def __init__(self, folder: Path, layer_ids: Sequence[int], dtype: str) -> None:
        kind = getattr(torch, dtype)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=kind).eval()
        self.layer_ids = tuple(layer_ids)

    @property
    def num_bytes(self) -> int:
        """Bytes of its weights."""
        return sum(p.numel() * p.element_size() for p in self.model.parameters())

    def __call__(self, documents: list[Sample]) -> list[Sample]:
        """Return the documents with features and teacher; all are equally long."""
        out: list[Sample] = []
        for place in range(0, len(documents), PREFILL_DOCUMENTS):
            part = documents[place : place + PREFILL_DOCUMENTS]
            ids = torch.stack([document.tokens for document in part]).long()
            with torch.no_grad():
                # The base model: nobody needs the logits of every position.
                states = self.model.base_model(
                    ids, use_cache=False, output_hidden_states=True
                ).hidden_states
            features = torch.cat([states[i] for i in self.layer_ids], -1).bfloat16()
            hidden = states[-1].bfloat16()
            out += [
                replace(document, features=features[i], teacher_hidden=hidden[i])
                for i, document in enumerate(part)
            ]
        return out


def documents_of(args: argparse.Namespace, empty: Tensor) -> list[Sample]:
    """Return documents without features."""
    prompts = load_pool(args.prompts, args.target, [args.domain]).prompts[args.domain]
    return [
        Sample.offline(
            torch.tensor(joined_prompt(prompts, 7 * key, args.doc_tokens)),
            empty,
            empty,
            num_prompt_tokens=args.prompt_tokens,
            key=key,
        )
        for key in range(args.documents)
    ]


def train(
    draft: Eagle3Draft,
    target: TargetRows,
    documents: list[Sample],
    config: TrainConfig,
    steps: int,
    fill: Fill,
) -> dict[str, float]:
    """Train; return the seconds spent on features and on steps."""
    step = TrainStep(draft, target, config)
    queue: deque[Sample] = deque()
    fill_s = step_s = 0.0
    tokens = 0
    for index in range(steps):
        while sum(s.num_tokens for s in queue) < config.batch_tokens:
            queue.extend(documents)
        chosen = take_batch(queue, config.batch_tokens, branches=False)
        began = time.perf_counter()
        chosen = fill(chosen)
        filled = time.perf_counter()
        batch = pack(chosen, branches=False)
        result = step.run(batch, rate(index, steps))
        if result is None:
            raise SystemExit("error: the documents have nothing to train on")
        fill_s += filled - began
        step_s += time.perf_counter() - filled
        tokens += batch.num_tokens
    return {"features_s": fill_s, "train_s": step_s, "tokens": tokens}


def as_row(prefill_s: float, train_s: float, baseline_s: float) -> dict[str, float]:
    """Return a row of TIDE's table 2; the speed-up is over `offline`."""
    total = prefill_s + train_s
    return {
        "prefill_s": round(prefill_s, 3),
        "train_s": round(train_s, 3),
        "total_s": round(total, 3),
        "speedup_over_offline": round(baseline_s / total, 3),
    }


def storage(args: argparse.Namespace, row_bytes: int, model: int) -> dict[str, object]:
    """Return the bytes each way holds (TIDE's table 1).

    Args:
        args: Of the command line.
        row_bytes: Features and teacher of one token.
        model: Weights of the target.
    """
    tide = TideConfig.model_validate({})
    rows = tide.train.buffer_tokens + HOLDOUT_TOKENS
    ring = tide.capture.ring_mib << 20
    bound = ring + rows * row_bytes
    return {
        "bytes_per_token": row_bytes,
        "these_documents": args.documents * args.doc_tokens * row_bytes,
        "data_set_tokens": args.data_set_tokens,
        "offline": args.data_set_tokens * row_bytes,
        "online": 0,
        "online_weights_in_the_trainer": model,
        "serving_at_most": bound,
        "serving_at_most_is": "ring, training buffer and held-out buffer, all full",
        "offline_over_serving": round(args.data_set_tokens * row_bytes / bound, 2),
    }


def measure(args: argparse.Namespace) -> dict[str, object]:
    """Measure the three ways, one after the other."""
    target = TargetRows.load(args.target)
    config = TrainConfig(batch_tokens=args.batch_tokens, ttt_steps=args.ttt_steps)
    layer_ids = load_draft(args.draft, target).config.aux_layer_ids
    prefill = Prefill(args.target, layer_ids, args.dtype)
    bare = documents_of(args, torch.empty(0))
    prefill(bare[:1])  # warm up
    began = time.perf_counter()
    stored = prefill(bare)
    prefill_s = time.perf_counter() - began

    def run(documents: list[Sample], steps: int, fill: Fill) -> dict[str, float]:
        draft = load_draft(args.draft, target)
        return train(draft, target, documents, config, steps, fill)

    run(stored, 2, lambda chosen: chosen)  # warm up
    held = run(stored, args.steps, lambda chosen: chosen)
    online = run(bare, args.steps, prefill)
    passes = held["tokens"] / (args.documents * args.doc_tokens)
    offline_s = prefill_s + held["train_s"]
    row_bytes = FEATURE_BYTES * target.hidden_size * (len(layer_ids) + 1)
    return {
        "what": "time and storage of training with features from serving, from one "
        "prefill beforehand, and from a prefill in each step",
        "documents": args.documents,
        "doc_tokens": args.doc_tokens,
        "tokens": args.documents * args.doc_tokens,
        "steps": args.steps,
        "batch_tokens": args.batch_tokens,
        "passes": round(passes, 3),
        "compute_dtype": str(compute_dtype(target.lm_head.device)).split(".")[1],
        "prefill_dtype": args.dtype,
        "time": {
            "offline": as_row(prefill_s, held["train_s"], offline_s),
            "online": as_row(online["features_s"], online["train_s"], offline_s),
            "serving": as_row(0.0, held["train_s"], offline_s),
        },
        "prefill_tokens_per_s": round(args.documents * args.doc_tokens / prefill_s, 1),
        "train_tokens_per_s": round(held["tokens"] / held["train_s"], 1),
        "storage": storage(args, row_bytes, prefill.num_bytes),
    }


def _parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    p.add_argument("--target", type=Path, default=DEMO / "target")
    p.add_argument("--draft", type=Path, default=DEMO / "draft")
    p.add_argument("--prompts", type=Path, default=DEMO / "prompts")
    p.add_argument("--domain", default="python")
    p.add_argument("--documents", type=int, default=128)
    p.add_argument("--doc-tokens", type=int, default=192)
    p.add_argument("--prompt-tokens", type=int, default=64)
    p.add_argument("--steps", type=int, help="default: --passes over the documents")
    p.add_argument("--passes", type=float, default=3.0, help="as in TIDE's table 2")
    p.add_argument("--batch-tokens", type=int, default=1024)
    p.add_argument("--ttt-steps", type=int, default=3)
    p.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    p.add_argument("--threads", type=int, default=1)
    p.add_argument(
        "--data-set-tokens",
        type=int,
        default=100_000_000,
        help="tokens whose storage is compared",
    )
    p.add_argument("--json", type=Path)
    return p


def main() -> int:
    """Measure, print, write."""
    args = _parser().parse_args()
    torch.set_num_threads(args.threads)
    if args.steps is None:
        tokens = args.documents * args.doc_tokens
        args.steps = max(1, math.ceil(args.passes * tokens / args.batch_tokens))
    report = measure(args)
    facts = {"threads": args.threads, "target": args.target.name}
    report["environment"] = environment(facts)
    print(json.dumps({k: v for k, v in report.items() if k != "environment"}, indent=1))
    if args.json is not None:
        write_json(args.json, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
