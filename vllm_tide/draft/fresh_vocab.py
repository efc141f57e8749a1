"""Which target tokens a fresh head can say, before any traffic was counted.

Byte-pair vocabularies are numbered in the order of their merges, so low ids are the
frequent ones. What lies elsewhere is added: tokens that end or frame a turn (special
tokens, often the highest ids) and single bytes, without which some texts are unsayable.
`prune.py` chooses again once live traffic has been counted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_RESERVED_SHARE = 2  # special tokens and bytes take at most one half


def first_target_ids(target_dir: str | Path, vocab_size: int, size: int) -> Tensor:
    """Target ids of a fresh head's vocabulary, int64 [size], increasing.

    Args:
        target_dir: Directory of the target; a file that is absent is not needed.
        vocab_size: V_t.
        size: V_d, at most V_t.
    """
    if size >= vocab_size:
        return torch.arange(vocab_size)
    reserved = dict.fromkeys(
        i for i in _reserved(Path(target_dir)) if 0 <= i < vocab_size
    )
    kept = set(list(reserved)[: size // _RESERVED_SHARE])
    lowest = (i for i in range(vocab_size) if i not in kept)
    while len(kept) < size:
        kept.add(next(lowest))
    return torch.tensor(sorted(kept), dtype=torch.int64)


def _reserved(folder: Path) -> Iterator[int]:
    """Ids that must be sayable, the most needed first."""
    for name in ("generation_config.json", "config.json"):
        raw = _read(folder / name)
        for part in (raw, raw.get("text_config") or {}):
            for key in ("eos_token_id", "bos_token_id", "pad_token_id"):
                yield from _ids(part.get(key))
    tokenizer = _read(folder / "tokenizer.json")
    vocab = (tokenizer.get("model") or {}).get("vocab") or {}
    if isinstance(vocab, dict):
        yield from _ids(
            i for text, i in vocab.items() if len(text) == 1 or _BYTE.fullmatch(text)
        )
    yield from _ids(
        item.get("id")
        for item in tokenizer.get("added_tokens") or []
        if isinstance(item, dict)
    )
    added = _read(folder / "tokenizer_config.json").get("added_tokens_decoder") or {}
    yield from _ids(int(key) for key in added if str(key).isdigit())


def _ids(value: Any) -> Iterator[int]:
    """The integers of an id, a list of ids, or nothing."""
    items = value if isinstance(value, Iterable) else (value,)
    for item in items:
        if isinstance(item, int) and not isinstance(item, bool):
            yield item


def _read(path: Path) -> dict[str, Any]:
    """A JSON object; an empty one where there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
