r"""What old KV of the draft in the prefix cache costs after a swap.

A draft serves a prefix, another one is installed, and requests with that prefix follow:
with the prefix's KV of the draft before (``keep``), and with the cache emptied at the
swap (``reset``). Everything is greedy, so the tokens are the same and the number of
accepted tokens does not depend on the machine's load. Pairs of drafts: the demo's and
itself after some steps of training on a domain (what one or more cycles of the trainer
do), a fresh head and what training made of it, and heads that have nothing in common.

    python scripts/bench/draft_kv.py --json scripts/bench/results/draft_kv.json
"""

import argparse
import json
import os
import statistics
import sys
from collections import defaultdict, deque
from pathlib import Path
from typing import Any

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}

import torch
from vllm import LLM, SamplingParams

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]
from bench.harness.common import commit, write_json
from bench.harness.stream import joined_prompt, load_pool
from vllm_tide.config import TrainConfig
from vllm_tide.draft.checkpoint import export_tensors, load_draft
from vllm_tide.draft.eagle3 import Eagle3Draft
from vllm_tide.draft.target import TargetRows
from vllm_tide.engine.install import install
from vllm_tide.train.packing import pack, take_batch
from vllm_tide.train.sample import Sample
from vllm_tide.train.step import TrainStep

sys.path.insert(0, str(Path(__file__).parent))
from no_prefill import Prefill

DRAFTS, STEPS, PREFIX, SUFFIX, REQUESTS = 3, 32, 512, 24, 8
Tensors = dict[str, torch.Tensor]


class Engine:
    """A real engine, and what each of its steps accepted."""

    def __init__(self, target: Path, draft: Path) -> None:
        off = {"enabled": False}
        tide = {
            "capture": off,
            "train": {"autostart": False},
            "control": {"policy": "static"},
        }
        self.llm = LLM(
            str(target),
            speculative_config={
                "method": "eagle3",
                "model": str(draft),
                "num_speculative_tokens": DRAFTS,
                "tide": tide,
            },
            enforce_eager=True,
            dtype="float32",
            max_model_len=1024,
            enable_prefix_caching=True,
            block_size=32,
            max_num_seqs=REQUESTS,
        )
        core = self.llm.llm_engine.engine_core.engine_core
        self._worker = core.model_executor.driver_worker.worker
        self.accepted: dict[str, list[int]] = defaultdict(list)
        counted = core.scheduler.make_spec_decoding_stats

        def count(stats: Any, **step: Any) -> Any:
            self.accepted[step["request_id"]].append(step["num_accepted_tokens"])
            return counted(stats, **step)

        core.scheduler.make_spec_decoding_stats = count

    def install(self, tensors: Tensors) -> None:
        """Serve with a draft from now on; the prefix cache stays."""
        runner, swapper = self._worker.model_runner, self._worker.tide.swapper
        config = self._worker.vllm_config
        install(runner.get_draft_model(), config, tensors, swapper.shared)

    def reset(self) -> None:
        """Empty the prefix cache."""
        assert self.llm.reset_prefix_cache()

    def serve(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        """Generate greedily; the outputs."""
        self.accepted.clear()
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=tokens)
        ids = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self.llm.generate(ids, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def length(self) -> list[float]:
        """Acceptance length of each request's first steps."""
        rows = [steps[:STEPS] for steps in self.accepted.values()]
        return [1 + sum(row) / len(row) for row in rows]


def train(
    draft: Eagle3Draft, target: TargetRows, samples: list[Sample], stops: list[int]
) -> dict[int, Tensors]:
    """Train as the trainer does by default; the draft's tensors after some steps."""
    config = TrainConfig()
    step = TrainStep(draft, target, config)
    queue: deque[Sample] = deque()
    found = {}
    for index in range(1, max(stops) + 1):
        while sum(s.num_tokens for s in queue) < 2 * config.batch_tokens:
            queue.extend(samples)
        batch = pack(
            take_batch(queue, config.batch_tokens, branches=False),
            branches=False,
        )
        step.run(batch, 1.0)
        if index in stops:
            found[index] = copied(draft)
    return found


def copied(draft: Eagle3Draft) -> Tensors:
    """The draft's tensors as they are now, as they are published."""
    return {k: v.detach().clone() for k, v in export_tensors(draft).items()}


def compare(
    engine: Engine, old: Tensors, new: Tensors, prefix: list[int], ends: list[list[int]]
) -> tuple[list[float], list[float], list[float]]:
    """Acceptance lengths of requests: the old draft's, the new with old KV and new."""
    prompts = [prefix + end for end in ends]
    found, outputs = [], []
    for before, serving in ((old, old), (old, new), (new, new)):
        engine.reset()
        engine.install(before)
        engine.serve([prefix + [1]], 1)
        engine.install(serving)
        outputs.append(engine.serve(prompts, STEPS * (DRAFTS + 1)))
        found.append(engine.length())
    assert outputs[0] == outputs[1] == outputs[2]
    return found[0], found[1], found[2]


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, default=Path("scripts/demo/target"))
    parser.add_argument("--draft", type=Path, default=Path("scripts/demo/draft"))
    parser.add_argument("--prompts", type=Path, default=Path("scripts/demo/prompts"))
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--documents", type=int, default=64)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    engine = Engine(args.target, args.draft)
    target = TargetRows.load(args.target)
    pool = load_pool(args.prompts, args.target, ["python", "c", "docs_en"]).prompts
    base = load_draft(args.draft, target)
    prefill = Prefill(args.target, base.config.aux_layer_ids, "float32")
    drafts: dict[str, Tensors] = {"demo": copied(base)}
    samples = {}
    for domain in ("python", "c"):
        half = pool[domain][: len(pool[domain]) // 2]
        prompts = [list(joined_prompt(half, i, 96)) for i in range(args.documents)]
        tokens = [
            p + o for p, o in zip(prompts, engine.serve(prompts, 128), strict=True)
        ]
        empty = torch.empty(0)
        samples[domain] = prefill(
            [
                Sample.offline(
                    torch.tensor(ids), empty, empty, num_prompt_tokens=96, key=key
                )
                for key, ids in enumerate(tokens)
            ]
        )
        print(domain, "captured", flush=True)
    stops = [8, 32, 128]
    for domain in samples:
        made = train(load_draft(args.draft, target), target, samples[domain], stops)
        drafts |= {f"demo+{n} {domain}": t for n, t in made.items()}
        print(domain, "trained", flush=True)
    fresh = Eagle3Draft.initialise(
        base.config, target.embed_tokens, target.lm_head, base.vocab, 0
    )
    drafts["fresh"] = copied(fresh)
    made = train(fresh, target, samples["python"], stops)
    drafts |= {f"fresh+{n} python": t for n, t in made.items()}
    generator = torch.Generator().manual_seed(0)
    for part in ("k", "v"):
        name = f"midlayer.self_attn.{part}_proj.weight"
        order = torch.randperm(len(drafts["demo"][name]), generator=generator)
        drafts[f"demo, {part} permuted"] = drafts["demo"] | {
            name: drafts["demo"][name][order]
        }
    pairs = [
        ("demo", "demo+8 python", "python"),
        ("demo", "demo+32 python", "python"),
        ("demo", "demo+128 python", "python"),
        ("demo", "demo+8 c", "c"),
        ("demo", "demo+32 c", "c"),
        ("demo", "demo+128 c", "c"),
        ("demo+8 c", "demo+32 c", "c"),
        ("demo+32 c", "demo+128 c", "c"),
        ("fresh", "fresh+8 python", "python"),
        ("fresh+8 python", "fresh+32 python", "python"),
        ("fresh+32 python", "fresh+128 python", "python"),
        ("fresh", "fresh+128 python", "python"),
        ("fresh", "demo", "python"),
        ("fresh+128 python", "demo", "python"),
        ("demo, k permuted", "demo", "python"),
        ("demo, v permuted", "demo", "python"),
    ]
    rows = []
    for old, new, domain in pairs:
        half = pool[domain][len(pool[domain]) // 2 :]
        every: list[list[float]] = [[], [], []]
        losses = []
        for seed in range(args.seeds):
            prefix = list(joined_prompt(half, 11 * seed, PREFIX))
            ends = [
                list(joined_prompt(half, 11 * seed + 20 + i, SUFFIX))
                for i in range(REQUESTS)
            ]
            got = compare(engine, drafts[old], drafts[new], prefix, ends)
            for into, lengths in zip(every, got, strict=True):
                into += lengths
            losses.append(statistics.fmean(got[2]) - statistics.fmean(got[1]))
        was, kept, reset = (statistics.fmean(lengths) for lengths in every)
        row = {
            "old": old,
            "new": new,
            "traffic": domain,
            "length_before": round(was, 3),
            "length_keep": round(kept, 3),
            "length_reset": round(reset, 3),
            "lost": round(reset - kept, 4),
            "lost_by_prefix": [round(loss, 4) for loss in losses],
            "standard_error": round(statistics.stdev(losses) / len(losses) ** 0.5, 4),
        }
        rows.append(row)
        print(json.dumps(row), flush=True)
    if args.json:
        write_json(args.json, {"commit": commit(), "rows": rows})


if __name__ == "__main__":
    main()
