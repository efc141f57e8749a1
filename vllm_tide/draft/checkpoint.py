"""Draft checkpoints in their kind's own form, with strict names and shapes.

Also reads speculators' form (another `config.json`); `speculators.py` writes it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from vllm_tide.draft.config import (
    DraftConfig,
    DraftError,
    bin_files,
    read_config,
    regular_file,
)
from vllm_tide.draft.kind import KINDS, canonical, draft_config
from vllm_tide.draft.module import Draft
from vllm_tide.draft.target import TargetRows, open_safetensors
from vllm_tide.draft.vocab import VocabMap
from vllm_tide.transport.rendezvous import write_private

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_OPTIONAL = ("lm_head.weight", "embed_tokens.weight", "d2t", "t2d")


def read_tensors(directory: str | Path) -> dict[str, Tensor]:
    """Read all tensors of a draft directory by their stored names.

    Raises:
        DraftError: No safetensors file, or an unreadable one.
    """
    files = sorted(Path(directory).glob("*.safetensors"))
    if not files:
        raise DraftError(f"{directory}: no .safetensors file.")
    out: dict[str, Tensor] = {}
    for path in files:
        with open_safetensors(path) as archive:
            for name in archive.keys():  # noqa: SIM118 - not a mapping
                out[name] = archive.get_tensor(name)
    return out


def read_bin(path: Path) -> dict[str, Tensor]:
    """Map the tensors of a file of `torch.save` into memory; it cannot run code.

    Raises:
        DraftError: It is not a regular file, is damaged, or has other contents.
    """
    try:
        stored = torch.load(
            regular_file(path), map_location="cpu", weights_only=True, mmap=True
        )
    except DraftError:
        raise
    except Exception as error:  # noqa: BLE001 - any bytes
        raise DraftError(
            f"{path.name} is missing, damaged, or no file of tensors "
            f"({type(error).__name__})."
        ) from None
    entries = stored.items() if isinstance(stored, dict) else [("its content", stored)]
    for name, value in entries:
        if not isinstance(value, Tensor) or value.layout != torch.strided:
            raise DraftError(f"{path.name}: {name!s:.60} is no dense tensor.")
    return {str(name): tensor.detach() for name, tensor in entries}


def stored_shapes(directory: str | Path) -> dict[str, tuple[int, ...]]:
    """Read the shapes of a directory's tensors, which are not loaded.

    Raises:
        DraftError: A file cannot be read.
    """
    out: dict[str, tuple[int, ...]] = {}
    for path in bin_files(Path(directory)):
        out |= {name: tuple(tensor.shape) for name, tensor in read_bin(path).items()}
    for path in sorted(Path(directory).glob("*.safetensors")):
        with open_safetensors(path) as archive:
            for name in archive.keys():  # noqa: SIM118 - not a mapping
                out[name] = tuple(archive.get_slice(name).get_shape())
    return out


def check_shapes(config: DraftConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise DraftError if a tensor's shape does not match the config."""
    hidden = config.hidden_size
    expected = config.parameter_shapes() | {
        "lm_head.weight": (config.draft_vocab_size, hidden),
        "embed_tokens.weight": (config.vocab_size, hidden),
        "d2t": (config.draft_vocab_size,),
        "t2d": (config.vocab_size,),
    }
    for name, shape in shapes.items():
        if shape != expected.get(name, shape):
            raise DraftError(
                f"draft checkpoint: {name} has shape {shape}, "
                f"the config requires {expected[name]}."
            )


def check_tensors(config: DraftConfig, tensors: dict[str, Tensor]) -> None:
    """Raise DraftError if names, shapes or dtypes do not match `config`."""
    expected = config.parameter_shapes()
    missing = sorted(set(expected) - set(tensors))
    if missing:
        raise DraftError(f"draft checkpoint: missing {_some(missing)}.")
    extra = sorted(set(tensors) - set(expected) - set(_OPTIONAL))
    if extra:
        raise DraftError(f"draft checkpoint: unexpected {_some(extra)}.")
    check_shapes(config, {name: tuple(t.shape) for name, t in tensors.items()})
    for name, tensor in tensors.items():
        if name not in ("d2t", "t2d") and tensor.dtype not in _DTYPES:
            raise DraftError(
                f"draft checkpoint: {name} has dtype {tensor.dtype}; quantised "
                "drafts are not supported."
            )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(f"{name:.60}" for name in names[:3]) + more


def stored_vocab(config: DraftConfig, tensors: Mapping[str, Tensor]) -> VocabMap:
    """Return the draft vocabulary of a checkpoint's tensors.

    Raises:
        DraftError: `d2t` is missing, or `d2t` and `t2d` differ.
    """
    if "d2t" in tensors:
        vocab = VocabMap.from_d2t(tensors["d2t"], config.vocab_size)
        if "t2d" in tensors:
            vocab.check_t2d(tensors["t2d"])
        return vocab
    if config.draft_vocab_size != config.vocab_size:
        raise DraftError("draft checkpoint: d2t is missing for a pruned vocabulary.")
    return VocabMap.identity(config.vocab_size)


def build_draft(
    config: DraftConfig,
    stored: dict[str, Tensor],
    target: TargetRows,
    shared: Collection[str] = (),
) -> Draft:
    """Build a draft from stored tensors; the target's replace absent ones.

    Args:
        shared: Stored names for which the server uses the target's tensors; neither
            trained nor exported.

    Raises:
        DraftError: A name or shape is wrong, or draft and target do not match.
    """
    names = canonical({name: name for name in stored})
    tensors = canonical(stored)
    check_tensors(config, tensors)
    tensors = {name: t for name, t in tensors.items() if name not in shared}
    if config.vocab_size != target.vocab_size:
        raise DraftError(
            f"draft config: vocab_size {config.vocab_size} is not the target's "
            f"{target.vocab_size}."
        )
    if config.target_hidden_size != target.hidden_size:
        raise DraftError(
            f"draft config: target_hidden_size {config.target_hidden_size} is not the "
            f"target's {target.hidden_size}."
        )
    pruned = config.draft_vocab_size != config.vocab_size
    vocab = stored_vocab(config, tensors)
    values = dict(tensors)
    owns_lm_head = "lm_head.weight" in values
    owns_embed = "embed_tokens.weight" in values
    if config.hidden_size != target.hidden_size and not (owns_lm_head and owns_embed):
        raise DraftError(
            "draft checkpoint: lm_head.weight and embed_tokens.weight are required if "
            "hidden_size differs from the target's."
        )
    if not owns_lm_head:
        if pruned:
            raise DraftError(
                "draft checkpoint: lm_head.weight is missing for a pruned vocabulary."
            )
        values["lm_head.weight"] = target.lm_head
    embed = values.get("embed_tokens.weight", target.embed_tokens)
    return KINDS[config.method].module(
        config,
        values,
        vocab,
        embed.to(target.embed_tokens.device),
        owns_lm_head=owns_lm_head,
        owns_embed=owns_embed,
        dtype=tensors["fc.weight"].dtype,
        constants={n: tensors[n] for n in ("d2t", "t2d") if n in tensors},
        stored_names={a: b for a, b in names.items() if a != b},
    )


def load_draft(
    directory: str | Path,
    target: TargetRows | str | Path,
    shared: Collection[str] = (),
) -> Draft:
    rows = target if isinstance(target, TargetRows) else TargetRows.load(target)
    config = draft_config(read_config(directory), rows.config)
    return build_draft(config, read_tensors(directory), rows, shared)


def export_tensors(
    draft: Draft, dtype: torch.dtype | None = None, *, stored_names: bool = False
) -> dict[str, Tensor]:
    """Return contiguous CPU copies of the checkpoint's tensors.

    Args:
        dtype: Floating dtype; None: the checkpoint's.
        stored_names: Use the names of the loaded checkpoint, not of the parameters; a
            server compares publications by them.
    """
    dtype = dtype or draft.checkpoint_dtype
    out = {
        name: value.detach().to("cpu", dtype, copy=True).contiguous()
        for name, value in draft.named_tensors().items()
        if name != "lm_head.weight" or draft.owns_lm_head
    }
    out |= {name: value.clone() for name, value in draft.constants.items()}
    if draft.owns_embed:
        out["embed_tokens.weight"] = draft.embed.detach().to("cpu", dtype, copy=True)
    if stored_names:
        out = {draft.stored_names.get(name, name): t for name, t in out.items()}
    return out


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Return the BLAKE2b of names and values (hexadecimal), sorted by name."""
    hasher = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(tensors.items()):
        hasher.update(name.encode())
        hasher.update(tensor.contiguous().flatten().view(torch.uint8).numpy())
    return hasher.hexdigest()


def save_draft(
    draft: Draft, directory: str | Path, dtype: torch.dtype | None = None
) -> None:
    tensors = export_tensors(draft, dtype)
    write_checkpoint(directory, hf_config(draft.config, tensors), tensors)


def hf_config(config: DraftConfig, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the `config.json` of the kind's own form, with the tensors' dtype."""
    return config.to_json() | {"torch_dtype": dtype_name(tensors)}


def dtype_name(tensors: Mapping[str, Tensor]) -> str:
    """Return torch's name of the checkpoint's dtype, that of `fc.weight`."""
    return str(tensors["fc.weight"].dtype).removeprefix("torch.")


def write_checkpoint(
    directory: str | Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    """Write a model directory: `model.safetensors` and `config.json`.

    Each file is flushed to disk and replaced atomically.
    """
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    data = save(contiguous, metadata={"format": "pt"})
    write_private(folder / "model.safetensors", data, durable=True)
    text = json.dumps(config, indent=2) + "\n"
    write_private(folder / "config.json", text, durable=True)
