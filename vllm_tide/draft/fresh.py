"""A fresh head for a target: what `"model": "fresh"` serves on day 0.

The layer is random (`Eagle3Draft.initialise`); the LM head is a copy of the target's
output rows, so that its logits mean something before anything was trained. The copy is
the draft's own: a trainer may freeze it to begin with and train it later.

Built directories are cached under the fingerprint of all they depend on, and never
changed: `~/.cache/vllm_tide/fresh/<fingerprint>`, mode 0700.
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
    DraftError,
    Eagle3Config,
    Rope,
    read_config,
    read_rope,
)
from vllm_tide.draft.eagle3 import Eagle3Draft
from vllm_tide.draft.target import TargetRows, rows_fingerprint
from vllm_tide.draft.vocab import VocabMap

SEED = 0  # of the random matrices: every engine builds the same draft
FORMAT = 1  # a change of how a head is built makes another fingerprint
VOCAB_SIZES = {"cpu": 4096, "cuda": 32768}
"""Tokens of a fresh draft by the trainer's device, at most the target's: a step over
more takes longer. The trainer soon puts the most frequent ones of the traffic there."""
MARK = "tide_fresh"  # key of config.json by which a fresh head is known
_ABANDONED_S = 3600.0
_OWN_HEAD_DIM = 128


def is_fresh(directory: str | Path) -> bool:
    return MARK in read_config(directory)


def fresh_layer_ids(num_layers: int) -> tuple[int, ...]:
    """Target layers a fresh head reads: early, middle, late (vLLM's own default).

    Args:
        num_layers: Layers of the target; id L is the residual stream entering layer L.

    Raises:
        DraftError: The target has fewer than 3 layers.
    """
    if num_layers < 3:
        raise DraftError(f"a target of {num_layers} layers is too shallow; it needs 3.")
    ids = (2, num_layers // 2, num_layers - 3)
    if ids[0] < ids[1] < ids[2]:
        return ids
    # Too few layers for the default: spread over what is there.
    return (1, num_layers // 2, num_layers - 1) if num_layers > 3 else (0, 1, 2)


def sized(settings: FreshConfig, vocab_size: int, device: str) -> FreshConfig:
    """Settings with a size, by the target's vocabulary and `tide.train.device`."""
    default = min(vocab_size, VOCAB_SIZES[device.partition(":")[0]])
    size = settings.draft_vocab_size or default
    return settings.model_copy(update={"draft_vocab_size": size})


def fresh_config(target: Mapping[str, Any], settings: FreshConfig) -> Eagle3Config:
    """Shape of a fresh head for a target.

    Raises:
        DraftError: A knob does not fit, or the target lacks a field.
    """
    text = dict(target.get("text_config") or target)
    hidden, vocab = _need(text, "hidden_size"), _need(text, "vocab_size")
    size = settings.draft_vocab_size or vocab
    if size > vocab:
        raise DraftError(
            f"tide.fresh.draft_vocab_size: {size} is more than the target's {vocab} "
            "tokens; give a smaller one or null."
        )
    heads, kv_heads, head_dim = _heads(text, hidden)
    return Eagle3Config(
        hidden_size=hidden,
        intermediate_size=text.get("intermediate_size") or 4 * hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab,
        draft_vocab_size=size,
        aux_layer_ids=fresh_layer_ids(_need(text, "num_hidden_layers")),
        target_hidden_size=hidden,
        rms_norm_eps=float(text.get("rms_norm_eps") or 1e-5),
        rope=_rope(text),
        max_position_embeddings=int(text.get("max_position_embeddings") or 8192),
    )


def build_fresh(
    target_dir: str | Path, settings: FreshConfig, dtype: torch.dtype
) -> Eagle3Draft:
    """Build a head.

    Args:
        dtype: Floating type of the checkpoint; the engine's, see `set_apart`.
    """
    target = TargetRows.load(target_dir)
    config = fresh_config(target.config, settings)
    vocab = VocabMap.from_target_ids(
        first_target_ids(target_dir, config.vocab_size, config.draft_vocab_size),
        config.vocab_size,
    )
    rows = target.lm_head.to(dtype)
    if vocab.is_identity:
        rows = set_apart(rows)
    draft = Eagle3Draft.initialise(config, target.embed_tokens, rows, vocab, SEED)
    draft.checkpoint_dtype = dtype
    return draft


def set_apart(rows: Tensor) -> Tensor:
    """A copy of output rows that differs in the last bit of one small number.

    vLLM compares the draft's LM head with the target's and, where every element is
    equal, serves the target's own module for both: the head could never be trained.

    Args:
        rows: [V, H] in the dtype the engine computes in (a wider one would be rounded
            back to equality).
    """
    out = rows.detach().clone(memory_format=torch.contiguous_format)
    tiny = torch.finfo(out.dtype).tiny
    integer = {2: torch.int16, 4: torch.int32}[out.element_size()]
    for row in range(out.shape[0] - 1, -1, -1):  # the highest ids are the rarest
        size = out[row].abs().float()
        size[size <= tiny * 4] = float("inf")
        column = int(size.argmin())
        if bool(torch.isfinite(size[column])):
            out[row].view(integer)[column] ^= 1
            return out
    raise DraftError("the target's output rows are all zero.")


def fresh_directory(
    target_dir: str | Path,
    settings: FreshConfig,
    dtype: torch.dtype,
    cache: Path | None = None,
) -> Path:
    """Directory of a fresh head, built unless the cache holds it.

    Several processes may ask at once: each builds apart, the first rename wins.

    Args:
        dtype: The engine's floating type.
        cache: Folder of the heads; by default under `$XDG_CACHE_HOME` or `~/.cache`.

    Raises:
        DraftError: The target has no usable rows, or the cache cannot be written.
    """
    root = cache or default_cache()
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        root.chmod(0o700)
        folder = root / _fingerprint(target_dir, settings, dtype)
        if _usable(folder):
            return folder
        shutil.rmtree(folder, ignore_errors=True)
        _drop_abandoned(root)
        staged = Path(tempfile.mkdtemp(dir=root, prefix=".building-"))  # mode 0700
        try:
            _write(staged, build_fresh(target_dir, settings, dtype))
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
            "XDG_CACHE_HOME to a directory that can be written."
        ) from None
    return folder


def default_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    root = Path(base) if base else Path.home() / ".cache"
    return root / "vllm_tide" / "fresh"


def _fingerprint(
    target_dir: str | Path, settings: FreshConfig, dtype: torch.dtype
) -> str:
    facts = {
        "format": FORMAT,
        "target": rows_fingerprint(target_dir),
        "settings": settings.model_dump(),
        "dtype": str(dtype),
    }
    text = json.dumps(facts, sort_keys=True)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:32]


def _write(folder: Path, draft: Eagle3Draft) -> None:
    tensors = export_tensors(draft)
    mark = {MARK: {"format": FORMAT, "seed": SEED}}
    write_checkpoint(folder, hf_config(draft.config, tensors) | mark, tensors)


def _usable(folder: Path) -> bool:
    """True if the directory is whole: its names and shapes fit its configuration."""
    try:
        config = Eagle3Config.from_json(read_config(folder))
        with safe_open(folder / "model.safetensors", framework="pt") as archive:
            names = set(archive.keys())
            shape = archive.get_slice("fc.weight").get_shape()
    except (DraftError, OSError, SafetensorError):
        return False
    whole = {"fc.weight", "lm_head.weight", "norm.weight"} <= names
    return whole and tuple(shape) == (config.hidden_size, config.feature_size)


def _drop_abandoned(root: Path) -> None:
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


def _heads(text: Mapping[str, Any], hidden: int) -> tuple[int, int, int]:
    """Query heads, key-value heads, head dimension: the target's, if plain."""
    heads = text.get("num_attention_heads")
    head_dim = text.get("head_dim")
    if isinstance(heads, int) and heads > 0 and not text.get("kv_lora_rank"):
        head_dim = head_dim or hidden // heads
        kv_heads = text.get("num_key_value_heads") or heads
        if head_dim % 2 == 0 and heads % kv_heads == 0:
            return heads, kv_heads, head_dim
    # Latent attention and other shapes have no such heads: take usual ones.
    head_dim = min(_OWN_HEAD_DIM, hidden)
    heads = max(1, hidden // head_dim)
    return heads, heads // 4 if heads % 4 == 0 else heads, head_dim


def _rope(text: Mapping[str, Any]) -> Rope:
    """The target's base; its scaling too where the draft's module has it."""
    given = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if "full_attention" in given:  # one entry per kind of layer
        given = given["full_attention"] or {}
    if (given.get("rope_type") or given.get("type")) in ("linear", "llama3"):
        scaling = {k: v for k, v in given.items() if k != "partial_rotary_factor"}
    else:
        scaling = {"rope_theta": given.get("rope_theta")}
    return read_rope({"rope_parameters": scaling, "rope_theta": text.get("rope_theta")})


_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_RESERVED_SHARE = 2  # special tokens and bytes take at most one half


def first_target_ids(target_dir: str | Path, vocab_size: int, size: int) -> Tensor:
    """Target ids of a fresh head's vocabulary, int64 [size], increasing.

    Args:
        target_dir: Directory of the target; a file that is absent is not needed.
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
