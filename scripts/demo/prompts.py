"""Prompts stage: short real prompts of each domain, held-out text first.

The domains of the demo draft come from the held-out part only.  The draft has
seen no other domain, so small ones are topped up from the part the *target* was
trained on; ``split`` of each row says which.

A prompt is a run of whole lines, so a continuation starts at a line start.  The
prompts of one domain come from as many documents as there are, in turn, and
never overlap.  Prompts whose greedy continuation by the demo target is a loop
from the start are left out: any draft predicts a loop, so they would flatter it.
"""

import gzip
import hashlib
import json
import re
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from statistics import fmean

from . import corpus, tokens

# Not `decimal_tests`: those files carry a licence of their own (IBM, ICU).
BUNDLED_DOMAINS = (
    *("python", "docs_en", "c", "markup", "charmaps", "tests"),
    *("json", "sql", "logs", "diffs"),
)
MIN_TOKENS = 48
MAX_TOKENS = 96
# The domains the demo draft is trained on: held-out prompts only.
DRAFT_DOMAINS = ("python", "json", "diffs")
# Tokens between two prompts of a document, so one is not the answer to another.
GAP_TOKENS = 96
# Below this share of distinct 4-grams a continuation counts as a loop.
LOOP_DISTINCT_4GRAMS = 0.35
LOOP_WINDOW_TOKENS = 96


def _length_wanted(text: str) -> int:
    digest = hashlib.sha256(text.encode("utf-8", "replace")).digest()
    span = MAX_TOKENS - MIN_TOKENS - 16
    return MIN_TOKENS + int.from_bytes(digest[:4], "big") % span


def _is_informative(text: str) -> bool:
    """Leave out tables of numbers and runs of punctuation."""
    words = re.findall(r"[A-Za-z_]{2,}", text)
    return len(set(words)) >= 8


def cut(document: corpus.Document, tokenizer: tokens.Tokenizer) -> Iterator[str]:
    """Yield the prompts of one document, in order."""
    lines: list[str] = []
    num_tokens, gap = 0, 0
    wanted = MIN_TOKENS
    for line in document.text.splitlines(keepends=True):
        length = len(tokenizer.encode(line).ids)
        if gap > 0:
            gap -= length
            continue
        if not lines:
            if not line.strip():
                continue
            wanted = _length_wanted(line)
        lines.append(line)
        num_tokens += length
        if num_tokens >= wanted:
            text = "".join(lines)
            if num_tokens <= MAX_TOKENS and _is_informative(text):
                yield text
                gap = GAP_TOKENS
            lines, num_tokens = [], 0


def candidates(work: Path, domain: str, split: str) -> Iterator[tuple[str, str]]:
    """Yield (source, prompt), one from each document in turn."""
    tokenizer = tokens.load(work)
    documents = sorted(
        corpus.read(work, domain, split),
        key=lambda d: hashlib.sha256(d.source.encode()).digest(),
    )
    cuts = [(d.source, cut(d, tokenizer)) for d in documents]
    seen: set[str] = set()
    while cuts:
        left = []
        for source, prompts in cuts:
            text = next(prompts, None)
            if text is None:
                continue
            left.append((source, prompts))
            if text not in seen:
                seen.add(text)
                yield source, text
        cuts = left


def distinct_4grams(ids: list[int]) -> float:
    """Return the share of 4-grams that are distinct; 1.0 for a short list."""
    grams = [tuple(ids[i : i + 4]) for i in range(len(ids) - 3)]
    return len(set(grams)) / len(grams) if grams else 1.0


def write(
    work: Path, model_folder: Path, output: Path, per_domain: int
) -> dict[str, dict[str, float]]:
    """Write ``<domain>.jsonl.gz`` files; return what was kept and left out."""
    from .generate import Generator

    generator = Generator(model_folder)
    output.mkdir(parents=True, exist_ok=True)
    report = {}
    for domain in BUNDLED_DOMAINS:
        rows: list[dict[str, str]] = []
        shares: list[float] = []
        num_loops = 0
        splits = ("held_out",) if domain in DRAFT_DOMAINS else ("held_out", "train")
        stream = chain.from_iterable(
            ((split, source, text) for source, text in candidates(work, domain, split))
            for split in splits
        )
        while len(rows) < per_domain:
            batch = list(islice(stream, 256))
            if not batch:
                break
            prompts = generator.ids([text for _, _, text in batch])
            continuations = generator.continue_ids(prompts, LOOP_WINDOW_TOKENS)
            for (split, source, text), ids in zip(batch, continuations, strict=True):
                share = distinct_4grams(ids)
                if share < LOOP_DISTINCT_4GRAMS:
                    num_loops += 1
                    continue
                shares.append(share)
                rows.append(
                    {
                        "id": f"{domain}-{len(rows):04d}",
                        "domain": domain,
                        "split": split,
                        "source": source,
                        "prompt": text,
                    }
                )
        rows = rows[:per_domain]
        body = "".join(json.dumps(row) + "\n" for row in rows)
        path = output / f"{domain}.jsonl.gz"
        # No time stamp: the same prompts make the same bytes.
        path.write_bytes(gzip.compress(body.encode(), mtime=0))
        report[domain] = {
            "prompts": len(rows),
            "held_out": sum(row["split"] == "held_out" for row in rows),
            "documents": len({row["source"] for row in rows}),
            "distinct_4grams": round(fmean(shares[:per_domain]), 3),
            "loops_left_out": num_loops,
            "bytes": path.stat().st_size,
        }
    (output / "README.md").write_text(_card(report), encoding="utf-8")
    return report


def _card(report: dict[str, dict[str, float]]) -> str:
    heads = list(next(iter(report.values())))
    lines = [
        "# Prompts",
        "",
        "Made by `python scripts/make_demo_model.py prompts` of text of CPython itself",
        "(licence: `../target/README.md`). Distinct 4-grams: their share of all those",
        f"in the target's greedy continuations of {LOOP_WINDOW_TOKENS} tokens. Where",
        f"that is below {LOOP_DISTINCT_4GRAMS} it is a loop, and left out.",
        "",
        "| domain | " + " | ".join(head.replace("_", " ") for head in heads) + " |",
        "| --- |" + " --- |" * len(heads),
    ]
    for domain, row in report.items():
        lines.append(f"| {domain} | " + " | ".join(str(row[h]) for h in heads) + " |")
    return "\n".join(lines) + "\n"
