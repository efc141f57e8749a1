#!/usr/bin/env python
"""Makes more prompts of one domain from files of this machine, for longer streams.

The bundled domains are small (96 prompts of C). This cuts prompts of the same lengths
from the files under a folder (CPython's own headers), leaves out those that the demo
target continues with a loop (two of three, so it takes minutes), mixes them with the
bundled ones and copies the other domains, so that `scripts/bench/run.py --prompts DIR`
finds all of them.

    scripts/bench/local_prompts.py --domain c --count 360 --output DIR
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(SCRIPTS), str(SCRIPTS.parent)]

BUNDLED = SCRIPTS / "demo" / "prompts"
TARGET = SCRIPTS / "demo" / "target"
FIRST_LINES = (0, 9, 17, 26)
"""Where cutting begins: prompts of a later one overlap those before, as do requests
that complete one file at several places."""


def texts_of(folder: Path, suffix: str, domain: str) -> Iterator[tuple[str, str]]:
    """Yield (source, prompt), one of each file in turn, then from a later line on."""
    from tokenizers import Tokenizer

    from demo.corpus import Document
    from demo.prompts import cut

    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    names = [path for path in folder.rglob(f"*{suffix}") if path.is_file()]
    names.sort(
        key=lambda p: hashlib.sha256(str(p.relative_to(folder)).encode()).digest()
    )
    for first_line in FIRST_LINES:
        cuts = []
        for path in names:
            try:
                lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
            except UnicodeDecodeError:
                continue
            source = str(path.relative_to(folder))
            text = "".join(lines[first_line:])
            cuts.append((source, cut(Document(domain, source, text), tokenizer)))
        while cuts:
            left = []
            for source, prompts in cuts:
                if (text := next(prompts, None)) is not None:
                    left.append((source, prompts))
                    yield source, text
            cuts = left


def main() -> int:
    """Write DIR; the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--domain", default="c")
    parser.add_argument(
        "--folder", type=Path, default=Path(sysconfig.get_paths()["include"])
    )
    parser.add_argument("--suffix", default=".h")
    parser.add_argument("--count", type=int, default=360)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()

    from demo.generate import Generator
    from demo.prompts import (
        LOOP_DISTINCT_4GRAMS,
        LOOP_WINDOW_TOKENS,
        distinct_4grams,
    )

    with gzip.open(BUNDLED / f"{args.domain}.jsonl.gz", "rt") as bundled:
        rows = [json.loads(line) for line in bundled]
    seen = {row["prompt"] for row in rows}
    generator = Generator(TARGET)
    stream = texts_of(args.folder, args.suffix, args.domain)
    loops = 0
    while len(rows) < args.count:
        batch = [item for item, _ in zip(stream, range(64), strict=False)]
        if not batch:
            break
        said = generator.continue_texts([text for _, text in batch], LOOP_WINDOW_TOKENS)
        for (source, text), ids in zip(batch, said, strict=True):
            if distinct_4grams(ids) < LOOP_DISTINCT_4GRAMS:
                loops += 1
            elif text not in seen:
                seen.add(text)
                rows.append({"domain": args.domain, "source": source, "prompt": text})
        print(f"{min(len(rows), args.count)} of {args.count} prompts", flush=True)
    rows = rows[: args.count]
    rows.sort(key=lambda row: hashlib.sha256(row["prompt"].encode()).digest())
    args.output.mkdir(parents=True, exist_ok=True)
    for path in BUNDLED.glob("*.jsonl.gz"):
        shutil.copy(path, args.output / path.name)
    body = "".join(
        json.dumps({**row, "id": f"{args.domain}-{number:04d}"}) + "\n"
        for number, row in enumerate(rows)
    )
    # No time stamp: the same prompts make the same bytes.
    packed = gzip.compress(body.encode(), mtime=0)
    (args.output / f"{args.domain}.jsonl.gz").write_bytes(packed)
    print(f"{len(rows)} prompts, {loops} left out as loops: {args.output}")
    return 0 if len(rows) == args.count else 1


if __name__ == "__main__":
    sys.exit(main())
