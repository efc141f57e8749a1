"""Tokenizer stage: byte-level BPE over the training split, and token files.

Saved as a Hugging Face fast tokenizer, which is all vLLM needs.  Token streams
are kept as uint16 arrays; documents are separated by the end token, so the
model learns where a document ends.
"""

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from . import corpus

VOCAB_SIZE = 4096
EOS_TOKEN = "<|endoftext|>"
# A sample suffices for the merges, and keeps test code and tables from
# dominating a vocabulary of 4,096.
SAMPLE_BYTES = {
    "python": 5_000_000,
    "docs_en": 2_500_000,
    "c": 2_000_000,
    "markup": 600_000,
    "decimal_tests": 500_000,
    "charmaps": 300_000,
    "tests": 1_500_000,
    "json": 800_000,
    "sql": 600_000,
    "logs": 600_000,
    "html": 800_000,
    "diffs": 600_000,
}


def _sample(work: Path) -> Iterator[str]:
    for domain, limit in SAMPLE_BYTES.items():
        documents = [d.text for d in corpus.read(work, domain, "train")]
        random.Random(0).shuffle(documents)
        used = 0
        for text in documents:
            yield text
            used += len(text)
            if used > limit:
                break


def train(work: Path) -> Path:
    """Train the tokenizer and write it under ``work/tokenizer``."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[EOS_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sample(work), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS_TOKEN,
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )
    path = work / "tokenizer"
    fast.save_pretrained(path)
    return path


def keep(work: Path, folder: Path) -> None:
    """Take the tokenizer of an earlier target instead."""
    (work / "tokenizer").mkdir(exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy2(folder / name, work / "tokenizer" / name)


def load(work: Path) -> Tokenizer:
    """Load the trained tokenizer."""
    return Tokenizer.from_file(str(work / "tokenizer" / "tokenizer.json"))


def encode_corpus(work: Path) -> dict[str, dict[str, int]]:
    """Tokenize every domain and split; return the token counts."""
    tokenizer = load(work)
    eos = tokenizer.token_to_id(EOS_TOKEN)
    folder = work / "tokens"
    folder.mkdir(exist_ok=True)
    counts: dict[str, dict[str, int]] = {}
    for domain in corpus.DOMAINS:
        counts[domain] = {}
        for split in ("train", "held_out"):
            texts = [d.text for d in corpus.read(work, domain, split)]
            random.Random(1).shuffle(texts)
            ids: list[int] = []
            for encoding in tokenizer.encode_batch(texts):
                ids.extend(encoding.ids)
                ids.append(eos)
            np.save(folder / f"{domain}.{split}.npy", np.array(ids, np.uint16))
            counts[domain][split] = len(ids)
    (folder / "counts.json").write_text(json.dumps(counts, indent=1))
    return counts


def stream(work: Path, domain: str, split: str) -> np.ndarray:
    """Return the token stream of one domain and split."""
    return np.load(work / "tokens" / f"{domain}.{split}.npy")
