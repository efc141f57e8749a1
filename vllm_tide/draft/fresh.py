"""A fresh draft for a target: served on day 0 with `"model": "fresh"`.

Its layers are random (`Draft.initialise`). `lm_head` is a copy of the target's
output rows, so that logits are meaningful before training; as a copy it can be trained.

Built directories are cached by the fingerprint of all their inputs and do not change:
`~/.cache/vllm_tide/fresh/<fingerprint>`, mode 0700.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vllm_tide.config import FreshConfig
from vllm_tide.draft.checkpoint import (
    export_tensors,
    hf_config,
    write_checkpoint,
)
from vllm_tide.draft.config import (
    DraftConfig,
    DraftError,
    Rope,
    read_config,
    read_rope,
)
from vllm_tide.draft.dflash_config import DFlashConfig
from vllm_tide.draft.eagle3_config import Eagle3Config
from vllm_tide.draft.kind import KINDS, draft_config
from vllm_tide.draft.module import Draft
from vllm_tide.draft.target import TargetRows, rows_fingerprint
from vllm_tide.draft.vocab import VocabMap

SEED = 0  # of the random matrices: every engine builds the same draft
FORMAT = 1  # part of the fingerprint; increase it when the construction changes
VOCAB_SIZES = {"cpu": 4096, "cuda": 32768}
"""Vocabulary size of a fresh draft by the trainer's device, at most the target's: a
larger one has slower steps. The trainer replaces it by the most frequent tokens."""
DFLASH_LAYERS = 1
MARK = "tide_fresh"  # key of config.json that marks a fresh draft
_ABANDONED_S = 3600.0
_DEFAULT_HEAD_DIM = 128


def is_fresh(directory: str | Path) -> bool:
    return MARK in read_config(directory)


def fresh_layer_ids(num_layers: int) -> tuple[int, ...]:
    """Return the aux layers of a fresh draft: early, middle, late (vLLM's default).

    Args:
        num_layers: Layers of the target; id L is the residual stream entering layer L.

    Raises:
        DraftError: The target has fewer than 3 layers.
    """
    if num_layers < 3:
        raise DraftError(f"the target has {num_layers} layers; at least 3 are needed.")
    ids = (2, num_layers // 2, num_layers - 3)
    if ids[0] < ids[1] < ids[2]:
        return ids
    # Too few layers for the default: spread over all of them.
    return (1, num_layers // 2, num_layers - 1) if num_layers > 3 else (0, 1, 2)


def with_vocab_size(settings: FreshConfig, vocab_size: int, device: str) -> FreshConfig:
    """Fill in the default size for the target's vocabulary and `tide.train.device`."""
    default = min(vocab_size, VOCAB_SIZES[device.partition(":")[0]])
    size = settings.draft_vocab_size or default
    return settings.model_copy(update={"draft_vocab_size": size})


def fresh_config(
    target: Mapping[str, Any],
    settings: FreshConfig,
    method: str = Eagle3Config.method,
    depth: int = 3,
    mask_token_id: int | None = None,
) -> DraftConfig:
    """Return the configuration of a fresh draft for a target.

    Args:
        method: vLLM's name of the kind.
        depth: num_speculative_tokens; gives the size of DFlash's block.
        mask_token_id: Of DFlash; None: any.

    Raises:
        DraftError: A knob does not fit, or the target lacks a field.
    """
    text = dict(target.get("text_config") or target)
    hidden, vocab = _need(text, "hidden_size"), _need(text, "vocab_size")
    size = settings.draft_vocab_size or vocab
    if size > vocab:
        raise DraftError(
            f"tide.fresh.draft_vocab_size: {size} is larger than the target's {vocab}; "
            "set a smaller one or null."
        )
    num_heads, num_kv_heads, head_dim = _head_counts(text, hidden)
    fields: dict[str, Any] = {
        "hidden_size": hidden,
        "intermediate_size": text.get("intermediate_size") or 4 * hidden,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "draft_vocab_size": size,
        "aux_layer_ids": fresh_layer_ids(_need(text, "num_hidden_layers")),
        "target_hidden_size": hidden,
        "rms_norm_eps": float(text.get("rms_norm_eps") or 1e-5),
        "rope": _rope(text),
        "max_position_embeddings": int(text.get("max_position_embeddings") or 8192),
    }
    if method == Eagle3Config.method:
        return Eagle3Config(**fields)
    if fields["aux_layer_ids"][0] == 0:  # DFlash reads outputs of layers
        raise DraftError("the target has 3 layers; DFlash needs at least 4.")
    return DFlashConfig(
        **fields,
        num_layers=DFLASH_LAYERS,
        block_size=depth + 1,
        mask_token_id=vocab - 1 if mask_token_id is None else mask_token_id,
    )


def build_fresh(
    target_dir: str | Path,
    settings: FreshConfig,
    dtype: torch.dtype,
    method: str = Eagle3Config.method,
    depth: int = 3,
) -> Draft:
    """Build a fresh draft.

    Args:
        dtype: Floating dtype of the checkpoint; the engine's, see `distinct_copy`.
        method, depth: See `fresh_config`.
    """
    target = TargetRows.load(target_dir)
    mask = mask_token(target_dir, target.vocab_size)
    config = fresh_config(target.config, settings, method, depth, mask)
    vocab = VocabMap.from_target_ids(
        first_target_ids(target_dir, config.vocab_size, config.draft_vocab_size),
        config.vocab_size,
    )
    rows = target.lm_head.to(dtype)
    if vocab.is_identity:
        rows = distinct_copy(rows)
    module = KINDS[method].module
    draft = module.initialise(config, target.embed_tokens, rows, vocab, SEED)
    draft.checkpoint_dtype = dtype
    return draft


def distinct_copy(rows: Tensor) -> Tensor:
    """Copy output rows, with one bit of one small element changed.

    If all elements of the draft's and the target's `lm_head` are equal, vLLM shares the
    target's module, and the draft's could not be trained.

    Args:
        rows: [V, H] in the engine's compute dtype (a wider one would be rounded to
            equal values).
    """
    out = rows.detach().clone(memory_format=torch.contiguous_format)
    tiny = torch.finfo(out.dtype).tiny
    integer = {2: torch.int16, 4: torch.int32}[out.element_size()]
    for row in range(out.shape[0] - 1, -1, -1):  # highest ids are rarest
        size = out[row].abs().float()
        size[size <= tiny * 4] = float("inf")
        column = int(size.argmin())
        if bool(torch.isfinite(size[column])):
            out[row].view(integer)[column] ^= 1
            return out
    raise DraftError("the target's lm_head is all zero.")


def fresh_directory(
    target_dir: str | Path,
    settings: FreshConfig,
    dtype: torch.dtype,
    cache: Path | None = None,
    method: str = Eagle3Config.method,
    depth: int = 3,
) -> Path:
    """Return the directory of a fresh draft, built if it is not cached.

    Concurrent processes build separately; the first rename wins.

    Args:
        dtype: The engine's dtype.
        cache: Cache folder; by default under `$XDG_CACHE_HOME` or `~/.cache`.
        method, depth: See `fresh_config`.

    Raises:
        DraftError: The target has no usable rows, or the cache cannot be written.
    """
    root = cache or default_cache()
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        root.chmod(0o700)
        facts = _facts(target_dir, settings, dtype)
        if method != Eagle3Config.method:
            facts |= {"method": method, "depth": depth}
        folder = root / _fingerprint(facts)
        if _usable(folder):
            return folder
        shutil.rmtree(folder, ignore_errors=True)
        _remove_abandoned(root)
        staged = Path(tempfile.mkdtemp(dir=root, prefix=".building-"))  # mode 0700
        try:
            _write(staged, build_fresh(target_dir, settings, dtype, method, depth))
            try:
                staged.rename(folder)
            except OSError:
                if not _usable(folder):  # else another process was first
                    raise
        finally:
            shutil.rmtree(staged, ignore_errors=True)
    except OSError as error:
        raise DraftError(
            f"the cache {str(root)!r} cannot be used ({error.strerror}); set "
            "XDG_CACHE_HOME to a writable directory."
        ) from None
    return folder


def default_cache(kind: str = "fresh") -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    root = Path(base) if base else Path.home() / ".cache"
    return root / "vllm_tide" / kind


def _facts(
    target_dir: str | Path, settings: FreshConfig, dtype: torch.dtype
) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "target": rows_fingerprint(target_dir),
        "settings": settings.model_dump(),
        "dtype": str(dtype),
    }


def _fingerprint(facts: Mapping[str, Any]) -> str:
    text = json.dumps(facts, sort_keys=True)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:32]


def _write(folder: Path, draft: Draft) -> None:
    tensors = export_tensors(draft)
    mark = {MARK: {"format": FORMAT, "seed": SEED}}
    write_checkpoint(folder, hf_config(draft.config, tensors) | mark, tensors)


def _usable(folder: Path) -> bool:
    """Return whether names and shapes of a directory match its configuration."""
    try:
        config = draft_config(read_config(folder))
        with safe_open(folder / "model.safetensors", framework="pt") as archive:
            names = set(archive.keys())
            shape = archive.get_slice("fc.weight").get_shape()
    except (DraftError, OSError, SafetensorError):
        return False
    complete = {"fc.weight", "lm_head.weight", "norm.weight"} <= names
    return complete and tuple(shape) == (config.hidden_size, config.feature_size)


def _remove_abandoned(root: Path) -> None:
    for path in root.glob(".building-*"):
        try:
            old = time.time() - path.stat().st_mtime > _ABANDONED_S
        except OSError:
            continue
        if old:
            shutil.rmtree(path, ignore_errors=True)


def _need(text: Mapping[str, Any], name: str) -> int:
    value = text.get(name)
    if not isinstance(value, int) or value <= 0:
        raise DraftError(f"the target's config.json has no {name}.")
    return value


def _head_counts(text: Mapping[str, Any], hidden: int) -> tuple[int, int, int]:
    """Return num_heads, num_kv_heads and head_dim: the target's, if supported."""
    num_heads = text.get("num_attention_heads")
    head_dim = text.get("head_dim")
    if isinstance(num_heads, int) and num_heads > 0 and not text.get("kv_lora_rank"):
        head_dim = head_dim or hidden // num_heads
        num_kv_heads = text.get("num_key_value_heads") or num_heads
        if head_dim % 2 == 0 and num_heads % num_kv_heads == 0:
            return num_heads, num_kv_heads, head_dim
    # Defaults for latent attention and other shapes.
    head_dim = min(_DEFAULT_HEAD_DIM, hidden)
    num_heads = max(1, hidden // head_dim)
    num_kv_heads = num_heads // 4 if num_heads % 4 == 0 else num_heads
    return num_heads, num_kv_heads, head_dim


def _rope(text: Mapping[str, Any]) -> Rope:
    """Return the target's theta, and its scaling if the draft's module supports it."""
    given = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if "full_attention" in given:  # one entry per kind of layer
        given = given["full_attention"] or {}
    if (given.get("rope_type") or given.get("type")) in ("linear", "llama3"):
        scaling = {k: v for k, v in given.items() if k != "partial_rotary_factor"}
    else:
        scaling = {"rope_theta": given.get("rope_theta")}
    return read_rope({"rope_parameters": scaling, "rope_theta": text.get("rope_theta")})


_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_RESERVED_SHARE = 2  # special tokens and bytes take at most 1/2


def first_target_ids(target_dir: str | Path, vocab_size: int, size: int) -> Tensor:
    """Return the target ids of a fresh draft's vocabulary, int64 [size], sorted.

    Args:
        target_dir: Directory of the target; its tokenizer files are optional.
        size: V_d, at most V_t.
    """
    if size >= vocab_size:
        return torch.arange(vocab_size)
    reserved = dict.fromkeys(
        i for i in _reserved(Path(target_dir)) if 0 <= i < vocab_size
    )
    ids = set(list(reserved)[: size // _RESERVED_SHARE])
    lowest = (i for i in range(vocab_size) if i not in ids)
    while len(ids) < size:
        ids.add(next(lowest))
    return torch.tensor(sorted(ids), dtype=torch.int64)


def _reserved(folder: Path) -> Iterator[int]:
    """Yield ids that the vocabulary should include, most important first."""
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


def mask_token(target_dir: str | Path, vocab_size: int) -> int:
    """Return the token of DFlash's masked slots: one that texts do not contain.

    The last special token, or the last id without a tokenizer.
    """
    added = _read(Path(target_dir) / "tokenizer.json").get("added_tokens") or []
    special = [
        item["id"]
        for item in added
        if isinstance(item, dict) and item.get("special") and "id" in item
    ]
    return max((i for i in special if 0 <= i < vocab_size), default=vocab_size - 1)


def _ids(value: Any) -> Iterator[int]:
    items = value if isinstance(value, Iterable) else (value,)
    for item in items:
        if isinstance(item, int) and not isinstance(item, bool):
            yield item


def _read(path: Path) -> dict[str, Any]:
    """Read a JSON object; empty if absent or invalid."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
