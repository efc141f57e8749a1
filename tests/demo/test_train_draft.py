"""Training data of the draft of a published model, and their order."""

import gzip
import json
import random
from pathlib import Path

import torch

from scripts.demo import train_draft
from scripts.demo.train_draft import batches, read_prompts, split, without
from tests.train.toys import documents_of


def test_prompts_have_a_seeded_order_and_only_the_named_domains(tmp_path):
    file = tmp_path / "prompts.jsonl.gz"
    rows = [{"id": f"{name}-{i}", "prompt": str(i)} for name in "ab" for i in range(20)]
    with gzip.open(file, "wt") as out:
        out.writelines(json.dumps(row) + "\n" for row in rows)
    prompts = read_prompts([file], ("a-",), 1)
    assert sorted(r["prompt"] for r in prompts) == sorted(str(i) for i in range(20))
    assert (
        prompts == read_prompts([file], ("a-",), 1) != read_prompts([file], ("a-",), 2)
    )
    every = read_prompts([file], (), 1)
    assert len(every) == 40
    some = tmp_path / "some.jsonl.gz"
    with gzip.open(some, "wt") as out:
        out.writelines(json.dumps(row) + "\n" for row in rows[:7])
    assert without(every, [some]) == [r for r in every if r not in rows[:7]]


def test_the_committed_draft_has_no_prompt_of_the_quickstart():
    folder = Path(train_draft.__file__).parent
    rows = read_prompts(sorted((folder / "chat_prompts").glob("*.gz")), (), 0)
    assert len({row["id"] for row in rows}) == len(rows) == 600
    facts = json.loads((folder / "smollm2_draft" / "provenance.json").read_text())
    only = tuple(facts["capture"]["only"])
    # Other rows of the source of `math` were used: --exclude.
    shared = {r["id"].split("-")[0] for r in rows if r["id"].startswith(only)}
    assert shared == {"gsm8k"}


def test_a_pass_has_every_document_once_and_no_holdout(tmp_path):
    files = [tmp_path / f"documents-{i}.pt" for i in range(2)]
    rng = random.Random(0)
    every = [documents_of(rng, 120) for _ in files]
    for file, documents in zip(files, every, strict=True):
        torch.save(documents, file)
    holdout = {d.key for documents in every for d in split(documents)[1]}
    train = {d.key for documents in every for d in documents} - holdout
    assert holdout
    passes = [[], []]
    for number, batch in batches(files, 100, 0):
        if number == 2:
            break
        assert sum(d.num_tokens for d in batch) <= 100 and number % 0.5 == 0
        passes[int(number)] += [d.key for d in batch]
    first, second = passes
    assert sorted(first) == sorted(second) == sorted(train) and first != second
