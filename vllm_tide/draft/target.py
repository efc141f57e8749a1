"""Embedding and `lm_head` of the target, read without loading the model."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vllm_tide.draft.config import DraftError, read_config, regular_file

_EMBED, _HEAD = "embed_tokens.weight", "lm_head.weight"
_SAMPLED_ROWS = 64
CAST_BYTES = 512 << 20
"""Maximum size of a copy of all rows in another dtype (bytes)."""


@dataclass(frozen=True)
class TargetRows:
    """Tensors and settings of the target that the trainer needs.

    Attributes:
        embed_tokens: [V, H] input embedding, checkpoint dtype.
        lm_head: [V, H] output rows (the same tensor when tied).
        config: The target's `config.json` (its text part).
        logit_scale: Factor on the logits (Cohere, Granite).
        logit_softcap: Gemma's `tanh` soft cap, or None.
    """

    embed_tokens: Tensor
    lm_head: Tensor
    config: dict[str, Any] = field(default_factory=dict)
    logit_scale: float = 1.0
    logit_softcap: float | None = None

    @property
    def vocab_size(self) -> int:
        return int(self.lm_head.shape[0])

    @property
    def hidden_size(self) -> int:
        return int(self.lm_head.shape[1])

    def rows_in(self, dtype: torch.dtype) -> Tensor:
        """Return output rows [V, H] in `dtype`, or as stored if over `CAST_BYTES`."""
        rows = self.lm_head
        return rows.to(dtype) if rows.numel() * dtype.itemsize <= CAST_BYTES else rows

    def logits(self, hidden: Tensor, rows: Tensor | None = None) -> Tensor:
        """Compute target logits of hidden states after the final norm.

        Args:
            hidden: [n, H].
            rows: [m, H] output rows in the dtype of `hidden`; None: all.
        """
        weight = self.lm_head.to(hidden.dtype) if rows is None else rows
        z = F.linear(hidden, weight)
        if self.logit_softcap is not None:
            z = torch.tanh(z / self.logit_softcap) * self.logit_softcap
        return z if self.logit_scale == 1.0 else z * self.logit_scale

    @classmethod
    def load(cls, directory: str | Path, device: str = "cpu") -> TargetRows:
        """Read a target directory: one safetensors file, or shards with an index.

        Raises:
            DraftError: A needed tensor is absent or quantised.
        """
        folder = Path(directory)
        raw = read_config(folder)
        text = raw.get("text_config") or raw
        where = _locate(folder)
        embed = _read_suffix(where, _EMBED)
        if embed is None:
            raise DraftError(f"{folder}: no tensor named *{_EMBED}.")
        tied = bool(text.get("tie_word_embeddings", raw.get("tie_word_embeddings")))
        head = None if tied else _read_suffix(where, _HEAD)
        if head is None:
            head = embed
        size = int(text.get("vocab_size", embed.shape[0]))
        for name, tensor in ((_EMBED, embed), (_HEAD, head)):
            if not tensor.is_floating_point() or tensor.element_size() < 2:
                raise DraftError(f"{folder}: {name} is quantised ({tensor.dtype}).")
        shared, embed = head is embed, embed.to(device)
        head = embed if shared else head.to(device)
        scale = float(text.get("logit_scale") or 1.0)
        scale /= float(text.get("logits_scaling") or 1.0)
        return cls(
            embed_tokens=embed[:size],
            lm_head=head[:size],
            config=raw,
            logit_scale=scale,
            logit_softcap=text.get("final_logit_softcapping"),
        )


def rows_fingerprint(directory: str | Path) -> str:
    """Return the SHA-256 (hexadecimal) of a target's configuration and sampled rows.

    Covers `config.json` and 64 evenly spaced rows of the embedding and of `lm_head`,
    which distinguish trained weights without reading gigabytes.

    Raises:
        DraftError: A needed tensor or file is absent or unreadable.
    """
    folder = Path(directory)
    digest = hashlib.sha256(
        json.dumps(read_config(folder), sort_keys=True).encode("utf-8")
    )
    _sample(digest, _locate(folder), _EMBED, _HEAD)
    return digest.hexdigest()


def weights_fingerprint(directory: str | Path) -> str:
    """Return the SHA-256 (hexadecimal) of sampled rows of a draft's `fc.weight`.

    Raises:
        DraftError: The file is absent or unreadable.
    """
    digest = hashlib.sha256()
    _sample(digest, _locate(Path(directory)), "fc.weight")
    return digest.hexdigest()


def _sample(digest: hashlib._Hash, where: dict[str, Path], *suffixes: str) -> None:
    for suffix in suffixes:
        name = _find_suffix(where, suffix)
        digest.update(repr(name).encode("utf-8"))
        if name is None:
            continue
        with open_safetensors(where[name]) as archive:
            view = archive.get_slice(name)
            shape = view.get_shape()
            digest.update(repr((view.get_dtype(), shape)).encode("utf-8"))
            count = min(_SAMPLED_ROWS, shape[0])
            for i in range(count):
                row = i * shape[0] // count
                raw = view[row : row + 1].contiguous().view(torch.uint8)
                digest.update(raw.numpy().tobytes())


@contextlib.contextmanager
def open_safetensors(path: Path) -> Iterator[Any]:
    """Open a safetensors file for reading.

    Raises:
        DraftError: It cannot be read.
    """
    try:
        with safe_open(regular_file(path), framework="pt") as archive:
            yield archive
    except (OSError, SafetensorError) as error:
        raise DraftError(f"{path}: cannot be read ({error}).") from None


def _locate(folder: Path) -> dict[str, Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            text = regular_file(index).read_text(encoding="utf-8")
            return {
                name: folder / f for name, f in json.loads(text)["weight_map"].items()
            }
        except DraftError:
            raise
        except (AttributeError, LookupError, OSError, TypeError, ValueError) as error:
            raise DraftError(f"{index}: cannot be read ({error!r:.150}).") from None
    where: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with open_safetensors(path) as archive:
            where.update(dict.fromkeys(archive.keys(), path))
    if not where:
        raise DraftError(f"{folder}: no .safetensors file.")
    return where


def _find_suffix(where: dict[str, Path], suffix: str) -> str | None:
    names = [n for n in where if n == suffix or n.endswith("." + suffix)]
    return min(names, key=len) if names else None


def _read_suffix(where: dict[str, Path], suffix: str) -> Tensor | None:
    name = _find_suffix(where, suffix)
    if name is None:
        return None
    with open_safetensors(where[name]) as archive:
        tensor: Tensor = archive.get_tensor(name)
    return tensor
