"""What adaptation inside one generation gains, on equal tokens and without a server.

    long_replay.py --json FILE [--streams 6 --stride 64]
        [--cases frozen,shared,private,memory,both,exact] [--strides 50,20,10,5,1]

The demo target continues held-out prompts once (sampled, temperature 0.7). Every case
drafts for the same tokens, greedily and token by token as served: a drafted token is
accepted if it is the one that was sampled. Tokens per verify step, of each stream, by
position, and over `frozen`; beside each stream its share of distinct 4-grams.

`shared` is the trainer's fast draft on all streams at once, gate included; `private`
the same with one stream at a time and as many updates; `memory` looks the stream's own
text up beside the frozen draft, `both` beside the shared one; `exact` is Test-Time
Speculation on the first `--exact-streams`, at each of `--strides` (verify steps).
Nothing is timed.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]
from bench.harness.options import list_of
from json_text import json_text
from vllm_tide.config import parse_tide
from vllm_tide.deploy.fast_draft import CONTEXT_ROWS, FastDraft
from vllm_tide.draft.checkpoint import load_draft
from vllm_tide.draft.eagle3 import Eagle3Draft
from vllm_tide.draft.rows import RowLayout, StepRows
from vllm_tide.draft.target import TargetRows
from vllm_tide.memory.ngram import Text
from vllm_tide.memory.source import Memory
from vllm_tide.train.trainer import Trainer
from vllm_tide.transport.feeds import EngineVersions
from vllm_tide.transport.record import Phase, Record

DEMO = Path(__file__).resolve().parents[1] / "demo"
DOMAINS = ("python", "c", "docs_en")
CASES = ("frozen", "shared", "private", "memory", "both", "exact")
EDGES = (200, 500, 900, 1300)
DEPTH, TEMPERATURE = 3, 0.7


@dataclass
class Stream:
    """S tokens, the first `prompt` given; what the target had at each of them."""

    domain: str
    prompt: int
    tokens: list[int]
    features: Tensor
    hidden: Tensor

    @property
    def distinct(self) -> float:
        """Share of distinct 4-grams of what was generated."""
        said = self.tokens[self.prompt :]
        grams = list(zip(*(said[i:] for i in range(4)), strict=False))
        return len(set(grams)) / max(1, len(grams))

    def record(self, key: int, lo: int, hi: int) -> Record:
        """Rows [lo, hi), all of them accepted."""
        return _record(
            key, lo, self.prompt, self.tokens[lo:hi], hi - lo - 1,
            self.features[lo:hi], self.hidden[lo:hi],
        )  # fmt: skip


def _record(key, start, prompt, tokens, accepted, features, hidden) -> Record:  # type: ignore[no-untyped-def]
    return Record(
        key, Phase.VERIFY, start, prompt, accepted, -1, 0, np.array(tokens, np.int32),
        features.numpy(), 0, hidden.numpy(), sampled=True,
    )  # fmt: skip


class Target:
    """The demo target, one forward at a time."""

    def __init__(self, layers: tuple[int, ...]) -> None:
        from transformers import LlamaForCausalLM

        self.model = LlamaForCausalLM.from_pretrained(
            DEMO / "target", dtype=torch.float32
        ).eval()
        self.layers, self.cache = layers, None

    @torch.no_grad()
    def run(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Features [b, n, A*H], hidden [b, n, H] (bfloat16 values), last logits."""
        out = self.model(
            ids, past_key_values=self.cache, use_cache=True, output_hidden_states=True
        )
        self.cache = out.past_key_values
        rows = [out.hidden_states[layer] for layer in self.layers]
        features = torch.cat(rows, -1).bfloat16().float()
        hidden = out.hidden_states[-1].bfloat16().float()
        return features, hidden, out.logits[:, -1]


def generate(target: Target, count: int, length: int) -> list[Stream]:
    """So many streams, the domains in turn."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(DEMO / "target" / "tokenizer.json"))
    texts: dict[str, Iterator[list[int]]] = {}
    for domain in DOMAINS:
        with gzip.open(DEMO / "prompts" / f"{domain}.jsonl.gz", "rt") as lines:
            ids = [tokenizer.encode(json.loads(x)["prompt"]).ids for x in lines]
        texts[domain] = iter([prompt for prompt in ids if len(prompt) >= 48])
    named = list(itertools.islice(itertools.cycle(DOMAINS), count))
    prompts = [next(texts[domain]) for domain in named]
    size = min(map(len, prompts))
    ids = torch.tensor([prompt[-size:] for prompt in prompts])
    random, parts, given = torch.Generator().manual_seed(0), [], ids
    for _ in range(length):
        features, hidden, logits = target.run(given)
        parts.append((features, hidden))
        logits[:, 0] = -inf  # it goes on
        chance = (logits / TEMPERATURE).softmax(-1)
        given = torch.multinomial(chance, 1, generator=random)
        ids = torch.cat([ids, given], 1)
    features, hidden = (torch.cat(part, 1) for part in zip(*parts, strict=True))
    target.cache = None
    return [
        Stream(named[i], size, ids[i, :-1].tolist(), features[i], hidden[i])
        for i in range(count)
    ]


@torch.no_grad()
def proposals(
    draft: Eagle3Draft, tokens: list[int], features: Tensor, lo: int, hi: int
) -> Tensor:
    """Target ids [hi - lo, K] that rows [lo, hi) draft, each if those before hold."""
    first = max(0, lo - CONTEXT_ROWS)
    ids = torch.tensor(tokens[first : hi + DEPTH])
    rows = torch.arange(lo - first, hi - first)
    steps = [StepRows(rows, torch.arange(hi - lo))] * DEPTH
    weights = draft.compute_weights(torch.float32)
    padded = features[first : first + len(ids)]
    positions = torch.arange(first, first + len(ids))
    layout = RowLayout([0, len(ids)], [len(ids)], [], [])
    out = draft.forward_ttt(
        ids, padded, positions, layout, steps, torch.float32, weights
    )
    best = torch.stack([draft.logits(o, weights).argmax(-1) for o in out], 1)
    return draft.vocab.target_ids[best]


def adapter(
    args: argparse.Namespace, target: TargetRows, how: str, stride: int
) -> tuple[Trainer, FastDraft]:
    """The trainer's fast draft on an engine that installs at once."""
    section = {"adapt": how, "stride": stride, "min_tokens": 0}
    tide = parse_tide({"test_time": section})
    trainer = Trainer(
        load_draft(DEMO / "draft", target),
        target,
        tide.train,
        num_speculative_tokens=DEPTH,
        feature_dtype="float32",
    )
    told = {"replay": EngineVersions(0, 0, 0, "", 0.0)}
    feed = SimpleNamespace(manifest=SimpleNamespace(tide={"test_time": section}))
    feeds: Any = SimpleNamespace(
        versions=lambda: told,
        feed=lambda _: feed,
        send_fast=lambda *a, **k: None,
    )
    deployment: Any = SimpleNamespace(published=0)
    return trainer, FastDraft(tide, trainer, feeds, deployment, lambda *_, **__: None)


def in_blocks(
    args: argparse.Namespace, target: TargetRows, streams: list[Stream], *, learn: bool
) -> tuple[list[Tensor], int]:
    """What every row of every stream drafts before it is learnt from; the updates."""
    block = max(1, args.stride // args.streams)
    trainer, fast = adapter(args, target, "shared", block * len(streams))
    prompt, size = streams[0].prompt, len(streams[0].tokens)
    out: list[list[Tensor]] = [[] for _ in streams]
    for lo in range(prompt - 1, size - DEPTH - 1, block if learn else 128):
        hi = min(lo + (block if learn else 128), size - DEPTH - 1)
        draft = fast.served or trainer.live
        for key, stream in enumerate(streams):
            out[key].append(proposals(draft, stream.tokens, stream.features, lo, hi))
            if learn:
                first = 0 if lo == prompt - 1 else lo
                trainer.add_records((stream.record(key, first, hi),), 0.0)
        if learn:
            fast.tick(inf, paused=False)
    return [torch.cat(parts) for parts in out], fast.steps


def walk(stream: Stream, drafted: Tensor, *, memory: bool) -> list[tuple[int, int]]:
    """Verify steps: generated tokens before, and tokens of the step."""
    tokens, steps = np.array(stream.tokens), []
    at, before = stream.prompt, 0  # position of the last sampled token, the step before
    recall = Memory(1, len(tokens) + DEPTH, DEPTH) if memory else None
    slot, room = np.zeros(1, np.int64), np.full(1, DEPTH)
    while at - stream.prompt < len(drafted):
        tried = drafted[at - stream.prompt].numpy()
        if recall is not None:
            known, count = np.array([before]), np.array([at + 1 - before])
            text = Text(tokens[None], known, tokens[None, before : at + 1], count)
            found = recall.recall(slot, text, room)
            recall.drafted(slot, tried[None])
            before = at + 1
            if found is not None and found[1].better(found[1].drafted)[0]:
                tried = found[0][0]
        right = tried == tokens[at + 1 : at + 1 + DEPTH]
        made = 1 + int(np.logical_and.accumulate(right).sum())
        steps.append((at - stream.prompt, made))
        at += made
    return steps


def exact(
    args: argparse.Namespace, target: TargetRows, model: Target, stream: Stream, s: int
) -> tuple[list[tuple[int, int]], int]:
    """Test-Time Speculation on one stream, an update every s verify steps; 0: none."""
    trainer, fast = adapter(args, target, "exact", max(s, 1))
    model.cache = None
    model.run(torch.tensor([stream.tokens[: stream.prompt]]))
    trainer.add_records((stream.record(0, 0, stream.prompt),), 0.0)
    at, steps = stream.prompt, []
    while at + DEPTH < len(stream.tokens):
        draft = fast.served or trainer.live
        chain = stream.tokens[: at + 1]
        for i in range(DEPTH):  # a row drafts from what it has drafted
            pad = chain + [0] * DEPTH
            features = torch.cat(
                [stream.features[:at], stream.features[:1].expand(DEPTH + 1, -1)]
            )
            chain.append(int(proposals(draft, pad, features, at - 1, at)[0, i]))
        rows = chain[at:]
        features, hidden, _ = model.run(torch.tensor([rows]))
        follows = stream.tokens[at + 1 : at + 1 + DEPTH]
        right = np.array(rows[1:]) == np.array(follows)
        accepted = int(np.logical_and.accumulate(right).sum())
        if accepted < DEPTH:  # what was rejected
            model.cache.crop(accepted - DEPTH)  # type: ignore[attr-defined]
        record = _record(0, at, stream.prompt, rows, accepted, features[0], hidden[0])
        trainer.add_records((record,), 0.0)
        if s:
            fast.tick(inf, paused=False)
        steps.append((at - stream.prompt, accepted + 1))
        at += accepted + 1
    return steps, fast.steps


def figures(steps: list[list[tuple[int, int]]], updates: int) -> dict[str, Any]:
    """Tokens per verify step: in all, of each stream, by generated position."""

    def mean(some: list[tuple[int, int]]) -> float | None:
        return round(sum(m for _, m in some) / len(some), 4) if some else None

    every = list(itertools.chain(*steps))
    place = [int(np.searchsorted(EDGES, at, "right")) for at, _ in every]
    bins = [
        [x for x, p in zip(every, place, strict=True) if p == b]
        for b in range(len(EDGES) + 1)
    ]
    return {
        "acceptance_length": mean(every),
        "by_stream": [mean(some) for some in steps],
        "by_position": [mean(some) for some in bins],
        "updates": updates,
    }


def replay(args: argparse.Namespace) -> dict[str, Any]:
    """All cases on the same streams."""
    target = TargetRows.load(DEMO / "target")
    layers = load_draft(DEMO / "draft", target).config.aux_layer_ids
    model = Target(layers)
    streams = generate(model, args.streams, args.tokens)
    named = [{"domain": s.domain, "distinct": round(s.distinct, 3)} for s in streams]
    frozen, _ = in_blocks(args, target, streams, learn=False)
    shared, updates = frozen, 0
    if {"shared", "both"} & set(args.cases):
        shared, updates = in_blocks(args, target, streams, learn=True)
    out: dict[str, Any] = {}

    def add(case: str, steps: list[list[tuple[int, int]]], updates: int = 0) -> None:
        out[case] = figures(steps, updates)
        print(f"{case:10} {out[case]}", flush=True)

    def walked(drafted: list[Tensor], *, memory: bool) -> list[list[tuple[int, int]]]:
        pairs = zip(streams, drafted, strict=True)
        return [walk(stream, rows, memory=memory) for stream, rows in pairs]

    add("frozen", walked(frozen, memory=False))
    if "shared" in args.cases:
        add("shared", walked(shared, memory=False), updates)
    if "private" in args.cases:
        alone = [in_blocks(args, target, [s], learn=True) for s in streams]
        rows = [drafted[0] for drafted, _ in alone]
        add("private", walked(rows, memory=False), sum(n for _, n in alone))
    if "memory" in args.cases:
        add("memory", walked(frozen, memory=True))
    if "both" in args.cases:
        add("both", walked(shared, memory=True), updates)
    if "exact" in args.cases:
        for stride in (0, *args.strides):
            few = streams[: args.exact_streams]
            found = [exact(args, target, model, s, stride) for s in few]
            name = f"exact {stride}" if stride else "exact frozen"
            add(name, [steps for steps, _ in found], sum(n for _, n in found))
    for case, entry in out.items():
        base = out["exact frozen" if case.startswith("exact") else "frozen"]
        now, before = entry["acceptance_length"], base["acceptance_length"]
        entry["over_frozen"] = round(now / before, 4) if now and before else None
    return {"streams": named, "cases": out}


def main() -> None:
    """Run the cases and write the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--streams", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=1800, help="of each stream")
    parser.add_argument("--stride", type=int, default=64, help="tokens of all streams")
    parser.add_argument("--cases", type=list_of(str), default=CASES)
    parser.add_argument("--strides", type=list_of(int), default=(50, 20, 10, 5, 1))
    parser.add_argument("--exact-streams", type=int, default=2)
    args = parser.parse_args()
    if unknown := sorted(set(args.cases) - set(CASES)):
        parser.error(f"--cases: {unknown[0]!r} is none of {', '.join(CASES)}")
    torch.set_num_threads(1)
    args.json.write_text(json_text(replay(args)), encoding="utf-8")


if __name__ == "__main__":
    main()
