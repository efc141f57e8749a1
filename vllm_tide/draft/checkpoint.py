"""Draft checkpoints in Hugging Face EAGLE-3 form, strict about names and shapes.

Reads also speculators' form (`layers.0.` for `midlayer.`, another `config.json`);
writes EAGLE-3 names, which vLLM's `llama_eagle3.py` loads. `speculators.py` writes the
other form.
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

from vllm_tide.draft.config import DraftError, Eagle3Config, read_config
from vllm_tide.draft.eagle3 import LAYER, Eagle3Draft, parameter_shapes
from vllm_tide.draft.target import TargetRows, opened
from vllm_tide.draft.vocab import VocabMap
from vllm_tide.transport.rendezvous import write_private

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_OPTIONAL = ("lm_head.weight", "embed_tokens.weight", "d2t", "t2d")


def read_tensors(directory: str | Path) -> dict[str, Tensor]:
    """Read every tensor of a draft directory under the names stored there.

    Raises:
        DraftError: No safetensors file, or an unreadable one.
    """
    files = sorted(Path(directory).glob("*.safetensors"))
    if not files:
        hint = ""
        if any(Path(directory).glob("*.bin")):
            hint = " Convert its .bin file to safetensors first."
        raise DraftError(f"{directory}: holds no .safetensors file.{hint}")
    out: dict[str, Tensor] = {}
    for path in files:
        with opened(path) as archive:
            for name in archive.keys():  # noqa: SIM118 - not a mapping
                out[name] = archive.get_tensor(name)
    return out


def stored_shapes(directory: str | Path) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of a directory, from the headers of its files.

    Raises:
        DraftError: A file cannot be read.
    """
    out: dict[str, tuple[int, ...]] = {}
    for path in sorted(Path(directory).glob("*.safetensors")):
        with opened(path) as archive:
            for name in archive.keys():  # noqa: SIM118 - not a mapping
                out[name] = tuple(archive.get_slice(name).get_shape())
    return out


def canonical_name(name: str) -> str:
    """EAGLE-3 name of a stored tensor."""
    name = name.removeprefix("model.")
    if name.startswith("layers.0."):
        name = f"{LAYER}." + name.removeprefix("layers.0.")
    return name


def check_shapes(config: Eagle3Config, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise DraftError, naming the tensor, unless known names have shapes that fit."""
    hidden = config.hidden_size
    expected = parameter_shapes(config) | {
        "lm_head.weight": (config.draft_vocab_size, hidden),
        "embed_tokens.weight": (config.vocab_size, hidden),
        "d2t": (config.draft_vocab_size,),
        "t2d": (config.vocab_size,),
    }
    for name, shape in shapes.items():
        if shape != expected.get(name, shape):
            raise DraftError(
                f"draft checkpoint: {name} has shape {shape}, "
                f"the config asks for {expected[name]}."
            )


def check_tensors(config: Eagle3Config, tensors: dict[str, Tensor]) -> None:
    """Raise DraftError, naming the tensor, unless names and shapes fit `config`."""
    expected = parameter_shapes(config)
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


def stored_vocab(config: Eagle3Config, tensors: Mapping[str, Tensor]) -> VocabMap:
    """The draft vocabulary that a checkpoint's tensors describe.

    Raises:
        DraftError: They lack it, or contradict themselves.
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
    config: Eagle3Config,
    stored: dict[str, Tensor],
    target: TargetRows,
    shared: Collection[str] = (),
) -> Eagle3Draft:
    """Make a draft of stored tensors, borrowing from the target what is absent.

    Args:
        shared: Names the server takes from the target although they are stored;
            neither trained nor exported.

    Raises:
        DraftError: A name or shape is wrong, or draft and target do not fit.
    """
    names = {canonical_name(name): name for name in stored}
    tensors = {canonical_name(name): tensor for name, tensor in stored.items()}
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
    owns_lm_head, owns_embed = (
        "lm_head.weight" in values,
        "embed_tokens.weight" in values,
    )
    if config.hidden_size != target.hidden_size and not (owns_lm_head and owns_embed):
        raise DraftError(
            "draft checkpoint: a draft narrower than its target needs its own "
            "lm_head.weight and embed_tokens.weight."
        )
    if not owns_lm_head:
        if pruned:
            raise DraftError(
                "draft checkpoint: lm_head.weight is missing for a pruned vocabulary."
            )
        values["lm_head.weight"] = target.lm_head
    embed = values.get("embed_tokens.weight", target.embed_tokens)
    return Eagle3Draft(
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
) -> Eagle3Draft:
    rows = target if isinstance(target, TargetRows) else TargetRows.load(target)
    config = Eagle3Config.from_json(read_config(directory), rows.config)
    return build_draft(config, read_tensors(directory), rows, shared)


def export_tensors(
    draft: Eagle3Draft, dtype: torch.dtype | None = None, *, stored_names: bool = False
) -> dict[str, Tensor]:
    """Tensors of the checkpoint, as contiguous CPU copies.

    Args:
        dtype: Floating type; the checkpoint's own when None.
        stored_names: Use the names of the checkpoint it was loaded from, which a
            server compares publications with, instead of EAGLE-3 names.
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
    """BLAKE2b of names and values (hexadecimal), whatever their order."""
    found = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(tensors.items()):
        found.update(name.encode())
        found.update(tensor.contiguous().flatten().view(torch.uint8).numpy())
    return found.hexdigest()


def save_draft(
    draft: Eagle3Draft, directory: str | Path, dtype: torch.dtype | None = None
) -> None:
    tensors = export_tensors(draft, dtype)
    write_checkpoint(directory, hf_config(draft.config, tensors), tensors)


def hf_config(config: Eagle3Config, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The `config.json` of the Hugging Face form, with the tensors' dtype."""
    return config.to_json() | {"torch_dtype": dtype_name(tensors)}


def dtype_name(tensors: Mapping[str, Tensor]) -> str:
    """The checkpoint's floating type as torch names it: that of `fc.weight`."""
    return str(tensors["fc.weight"].dtype).removeprefix("torch.")


def write_checkpoint(
    directory: str | Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    """Write a model directory: `model.safetensors` and `config.json`.

    Each file is replaced atomically and reaches the disk before it gets its name.
    """
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    held = {name: tensor.contiguous() for name, tensor in tensors.items()}
    data = save(held, metadata={"format": "pt"})
    write_private(folder / "model.safetensors", data, durable=True)
    text = json.dumps(config, indent=2) + "\n"
    write_private(folder / "config.json", text, durable=True)
