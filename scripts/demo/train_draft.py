"""Training of a draft for a served model on outputs of that model.

    python scripts/demo/train_draft.py capture --model DIR --prompts FILE ... --work DIR
    python scripts/demo/train_draft.py train --model DIR --work DIR --out DIR

`capture` serves the prompts with vLLM in this process and stores the captured rows of
each answer: one file of documents per `--shard-requests` answers, each prompt twice,
greedy and sampled. Existing files are kept, and `capture` continues after them. `train`
trains on these files in several passes, with vllm_tide's training step, and writes the
draft every `--save-steps` steps. If there is a draft in `--out`, `train` starts from
it, with a new learning rate schedule.

Prompts are JSON lines (gzip) with `id` and `prompt`. `--only` selects ids by prefix,
and `--exclude` excludes the prompts of other files.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]
from bench.harness.common import commit, cpu_model
from vllm_tide.config import FreshConfig, TrainConfig
from vllm_tide.draft import TargetRows, load_draft, save_draft
from vllm_tide.draft.fresh import build_fresh
from vllm_tide.draft.prune import choose_vocab, reprune
from vllm_tide.draft.vocab import VocabMap
from vllm_tide.speculative import METHODS
from vllm_tide.train.assemble import Assembler
from vllm_tide.train.evaluate import evaluate
from vllm_tide.train.packing import pack, take_batch
from vllm_tide.train.sample import Branch, Sample, TopK, split_windows
from vllm_tide.train.step import TrainStep

HOLDOUT_SHARE = 0.02  # share of a file's documents used only for evaluation
TRAINING = ("seed", "vocab", "learning_rate", "batch_tokens", "ttt_steps")  # options
WINDOW = 512  # maximum rows of a document, so that a batch has several


def read_prompts(
    files: Iterable[Path], only: tuple[str, ...], seed: int
) -> list[dict[str, str]]:
    """Return the prompts of all files, shuffled by the seed."""
    rows = []
    for file in files:
        with gzip.open(file, "rt", encoding="utf-8") as lines:
            rows += [json.loads(line) for line in lines]
    rows = [row for row in rows if not only or row["id"].startswith(only)]
    random.Random(seed).shuffle(rows)
    return rows


def without(rows: list[dict[str, str]], files: Iterable[Path]) -> list[dict[str, str]]:
    """Return the prompts that are not in `files`, which are used for evaluation."""
    excluded = {row["id"] for row in read_prompts(files, (), 0)}
    return [row for row in rows if row["id"] not in excluded]


class Capturing:
    """Engine in this process, with a reader of its captured rows.

    Args:
        requests: Maximum number of concurrent requests.
    """

    def __init__(self, model: Path, dtype: str, requests: int, run_dir: str) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        from vllm_tide.transport.rendezvous import read_manifests
        from vllm_tide.transport.ring import RingReader

        tide = {"run_dir": run_dir, "train": {"autostart": False}}
        tide |= {"swap": {"enabled": False}, "control": {"probe_share": 0.0}}
        arguments = EngineArgs(
            model=str(model),
            dtype=dtype,
            enforce_eager=True,
            max_model_len=2048,
            max_num_seqs=requests,
            enable_prefix_caching=False,
            speculative_config={
                "method": "eagle3",
                "model": "fresh",
                "num_speculative_tokens": 1,
                "tide": tide | {"fresh": {"draft_vocab_size": 1024}},
            },
        )
        self._engine: Any = LLMEngine.from_engine_args(arguments)
        [manifest] = read_manifests(Path(run_dir))
        self._reader = RingReader.attach(manifest.ring)
        size = len(manifest.aux_layer_ids) * manifest.hidden_size
        self._assembler = Assembler(size, max_open_rows=1 << 20)
        self._requests = requests

    def answers(
        self,
        prompts: Iterable[tuple[int, dict[str, str]]],
        max_tokens: int,
        temperature: float,
    ) -> Iterator[Sample]:
        """Serve numbered prompts in the model's chat template; yield the answers.

        Answers with an even number are greedy.
        """
        from vllm import SamplingParams

        tokenizer = self._engine.get_tokenizer()
        waiting = iter(prompts)
        following = next(waiting, None)
        while following is not None or self._engine.has_unfinished_requests():
            while following is not None and (
                self._engine.get_num_unfinished_requests() < self._requests
            ):
                number, row = following
                chat = [{"role": "user", "content": row["prompt"]}]
                ids = tokenizer.apply_chat_template(
                    chat, add_generation_prompt=True, tokenize=True, return_dict=False
                )
                params = SamplingParams(
                    max_tokens=max_tokens, temperature=temperature * (number % 2)
                )
                self._engine.add_request(str(number), {"prompt_token_ids": ids}, params)
                following = next(waiting, None)
            self._reader.heartbeat()
            self._engine.step()
            while (record := self._reader.read()) is not None:
                yield from self._assembler.add(record, time.monotonic())
        yield from self._assembler.flush()


def capture(args: argparse.Namespace) -> None:
    rows = read_prompts(args.prompts, tuple(args.only), args.seed)
    rows = without(rows, args.exclude)
    numbered = list(enumerate(rows + rows[1:] + rows[:1]))  # each greedy and sampled
    args.work.mkdir(parents=True, exist_ok=True)
    options = {k: v for k, v in vars(args).items() if isinstance(v, int | float | str)}
    files = [path.name for path in args.prompts]
    facts = {"options": options, "only": args.only, "prompts_of": files}
    text = json.dumps(facts | {"prompts": len(rows)} | commit(), indent=1)
    (args.work / "capture.json").write_text(text + "\n")
    size = args.shard_requests
    number = len(list(args.work.glob("documents-*.pt")))
    with tempfile.TemporaryDirectory(prefix="tide_draft_") as run_dir:
        engine = Capturing(args.model, args.dtype, args.requests, run_dir)
        answers = engine.answers(
            numbered[number * size :], args.max_tokens, args.temperature
        )
        began = time.monotonic()
        while samples := list(itertools.islice(answers, size)):
            path = args.work / f"documents-{number:04d}.pt"
            documents = [d for s in samples for d in split_windows(s, WINDOW)]
            torch.save(documents, path.with_suffix(".part"))
            path.with_suffix(".part").rename(path)
            tokens = sum(d.num_trained for d in documents)
            seconds = time.monotonic() - began
            print(
                f"{path.name}: {len(samples)} answers, {tokens} training rows, "
                f"{tokens / seconds:.0f} rows/s",
                flush=True,
            )
            number, began = number + 1, time.monotonic()


def load_documents(path: Path) -> list[Sample]:
    """Load the documents of a file of `capture`; reject other types of objects."""
    with torch.serialization.safe_globals([Sample, Branch, TopK]):
        documents: list[Sample] = torch.load(path, weights_only=True)
    return documents


def split(documents: list[Sample]) -> tuple[list[Sample], list[Sample]]:
    """Return the training documents and the held-out ones."""
    period = int(1 / HOLDOUT_SHARE)
    return (
        [d for d in documents if d.key % period],
        [d for d in documents if d.key % period == 0],
    )


def _begin(args: argparse.Namespace, files: list[Path], target: TargetRows) -> Any:
    """Return the draft in `--out`, or a fresh one with the most frequent tokens."""
    if (args.out / "model.safetensors").exists():
        return load_draft(args.out, target, frozenset())
    draft = build_fresh(
        args.model,
        FreshConfig(draft_vocab_size=args.vocab),
        torch.bfloat16,
        args.method,
        args.depth,
    )
    counts = torch.zeros(target.lm_head.shape[0], dtype=torch.float64)
    for file in files:
        for document in load_documents(file):
            first = max(document.num_prompt_tokens, document.loss_from) - document.start
            generated = document.tokens[max(first, 0) :]
            counts += torch.bincount(generated, minlength=len(counts))
    counts[draft.vocab.target_ids[: args.vocab // 8]] += 0.1  # special and short tokens
    ids = choose_vocab(counts, args.vocab)
    inside = float(counts[ids].sum() / counts.sum())
    print(f"vocabulary: {args.vocab} tokens, {inside:.4f} of the generated tokens")
    return reprune(draft, VocabMap.from_target_ids(ids, len(counts)), target)


def batches(
    files: list[Path], tokens: int, seed: int
) -> Iterator[tuple[float, list[Sample]]]:
    """Yield batches pass after pass, each with the passes completed before its file."""
    chance, number = random.Random(seed), 0
    while True:
        for done, file in enumerate(chance.sample(files, len(files))):
            train, _ = split(load_documents(file))
            queue = deque(chance.sample(train, len(train)))
            while queue:
                batch = take_batch(queue, tokens, branches=False)
                yield number + done / len(files), batch
        number += 1


def train(args: argparse.Namespace) -> None:
    files = sorted(args.work.glob("documents-*.pt"))
    if not files:
        raise SystemExit(f"--work: {args.work} has no documents; run `capture` first.")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    target = TargetRows.load(args.model)
    draft = _begin(args, files, target)
    config = TrainConfig(
        learning_rate=args.learning_rate,
        batch_tokens=args.batch_tokens,
        ttt_steps=draft.config.num_steps(args.ttt_steps, args.depth),
    )
    step = TrainStep(draft, target, config)
    began, rows, losses = time.monotonic(), 0, []
    steps = 0
    for passed, batch in batches(files, args.batch_tokens, args.seed):
        spent = time.monotonic() - began
        progress = max(spent / (60 * args.minutes), passed / args.passes)
        if progress >= 1:
            break
        scale = min(1.0, (steps + 1) / 50) * (0.02 + 0.98 * (1 - progress))
        known = [document.in_vocabulary(draft.vocab.t2d) for document in batch]
        result = step.run(pack(known, branches=False), scale)
        if result is None:
            continue
        steps += 1
        rows += result.num_tokens
        losses.append(result.step_losses[0])
        if steps % 25 == 0:
            print(
                f"step {steps}, pass {passed:.2f}, {spent:.0f} s, {rows / spent:.0f} "
                f"rows/s, KL of the first token {statistics.fmean(losses):.3f}",
                flush=True,
            )
            losses.clear()
        if steps % args.save_steps == 0:
            save(draft, args)
    save(draft, args)
    holdout = [d for file in files[:8] for d in split(load_documents(file))[1]]
    score = evaluate(draft, target, holdout, args.depth)
    length, error = score.acceptance("greedy"), score.standard_error("greedy")
    print(
        f"{steps} steps, {rows} rows; held-out acceptance length at depth "
        f"{args.depth}: {length:.3f} +- {error:.3f} over {len(score.requests)} answers"
    )
    note(
        args,
        {
            "options": {
                k: v for k, v in vars(args).items() if isinstance(v, int | float)
            },
            "files": len(files),
            "rows_of_files": sum(
                d.num_trained for file in files for d in load_documents(file)
            ),
            "steps": steps,
            "rows_trained": rows,
            "minutes": round((time.monotonic() - began) / 60, 1),
            "held_out": {
                "answers": len(score.requests),
                "depth": args.depth,
                "acceptance_length": round(length, 3),
                "standard_error": round(error, 3),
            },
        },
    )


def note(args: argparse.Namespace, run: dict[str, Any]) -> None:
    """Add a training run to the draft's `provenance.json`."""
    path = args.out / "provenance.json"
    facts = json.loads(path.read_text()) if path.exists() else {"runs": []}
    model, capture = args.model / "model.json", args.work / "capture.json"
    if model.exists():
        made = json.loads(model.read_text())
        facts["model"] = {key: made[key] for key in ("source", "tensors")}
    if capture.exists():
        facts["capture"] = json.loads(capture.read_text())
    machine = {"cpu": cpu_model(), "threads": torch.get_num_threads()}
    facts["runs"].append(run | commit() | machine)
    path.write_text(json.dumps(facts, indent=1) + "\n")


def save(draft: Any, args: argparse.Namespace) -> None:
    staged = Path(tempfile.mkdtemp(dir=args.out.parent))
    save_draft(draft, staged, torch.bfloat16)
    args.out.mkdir(exist_ok=True)
    for path in staged.iterdir():
        path.chmod(0o644)
        path.replace(args.out / path.name)
    staged.rmdir()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=["capture", "train"])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument(
        "--work", type=Path, required=True, help="folder of the documents"
    )
    parser.add_argument("--seed", type=int, default=0)
    text = "`capture`: prompt files, gzipped JSON lines"
    parser.add_argument("--prompts", type=Path, nargs="+", default=[], help=text)
    parser.add_argument("--only", nargs="*", default=[], help="prefixes of ids to use")
    text = "files of prompts to exclude"
    parser.add_argument("--exclude", type=Path, nargs="*", default=[], help=text)
    parser.add_argument("--dtype", default="float32", help="dtype of the served model")
    parser.add_argument(
        "--requests", type=int, default=32, help="maximum concurrent requests"
    )
    parser.add_argument(
        "--max-tokens", type=int, default=384, help="maximum tokens of an answer"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.7,
        help="temperature of every other answer",
    )
    parser.add_argument("--shard-requests", type=int, default=128)
    parser.add_argument("--out", type=Path, help="`train`: directory of the draft")
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--method", choices=METHODS, default=METHODS[0])
    text = "drafted tokens, in the evaluation and of DFlash's blocks"
    parser.add_argument("--depth", type=int, default=5, help=text)
    parser.add_argument("--passes", type=float, default=2.0)
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--batch-tokens", type=int, default=1024)
    parser.add_argument("--ttt-steps", type=int, default=5)
    parser.add_argument("--save-steps", type=int, default=200)
    args = parser.parse_args(argv)
    if args.what == "train" and args.out is None:
        parser.error("train: --out DIR is required")
    {"capture": capture, "train": train}[args.what](args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
