"""Writes a draft for others: one directory with weights, configuration, model card."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from vllm_tide.draft.checkpoint import (
    canonical_name,
    check_tensors,
    hf_config,
    read_tensors,
    write_checkpoint,
)
from vllm_tide.draft.config import DraftError, Eagle3Config, read_config
from vllm_tide.draft.model_card import model_card
from vllm_tide.draft.speculators import Verifier, read_verifier, save_speculators
from vllm_tide.draft.vocab import VocabMap

Form = Literal["hf", "speculators"]


@dataclass(frozen=True)
class ExportedDraft:
    """A draft on its way out.

    Attributes:
        config: Shape and switches.
        tensors: By EAGLE-3 names, CPU. A name the target shares may be absent.
        verifier: The target, or None when nothing says which it is.
        version: Version of the weights on their engine, or None.
        source: Where they were read from, in words.
        figures: Measured figures by the keys of `model_card.FIGURES`.
        trained: A trainer of ours made it; False if nobody knows.
    """

    config: Eagle3Config
    tensors: Mapping[str, Tensor]
    verifier: Verifier | None = None
    version: int | None = None
    source: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)
    trained: bool = False


def with_mapping(
    config: Eagle3Config, tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """EAGLE-3 names, checked, with the `t2d` that a publication leaves out.

    Raises:
        DraftError: A name, shape or the vocabulary mapping is wrong.
    """
    out = {canonical_name(name): tensor for name, tensor in tensors.items()}
    check_tensors(config, out)
    if "d2t" in out:
        vocab = VocabMap.from_d2t(out["d2t"], config.vocab_size)
        if "t2d" in out:
            vocab.check_t2d(out["t2d"])
        else:
            out["t2d"] = vocab.t2d
    elif config.draft_vocab_size != config.vocab_size:
        raise DraftError("draft checkpoint: d2t is missing for a pruned vocabulary.")
    return out


def from_directory(
    directory: str | Path, target: Mapping[str, Any] | None = None
) -> ExportedDraft:
    """Read a draft directory of either form.

    Args:
        directory: Holds `config.json` and safetensors.
        target: The target's configuration, where the draft leaves layer ids out.
    """
    raw = read_config(directory)
    config = Eagle3Config.from_json(raw, dict(target) if target is not None else None)
    return ExportedDraft(
        config,
        with_mapping(config, read_tensors(directory)),
        read_verifier(raw),
        source="a draft directory",
    )


def write_export(directory: str | Path, draft: ExportedDraft, form: Form) -> Path:
    """Write the directory: all of it or nothing.

    Args:
        directory: Must not exist, or be empty.
        draft: What to write.
        form: "hf" (for `--speculative-config`) or "speculators" (`vllm serve DIR`).

    Raises:
        DraftError: The directory is taken, or the form needs a target that is unknown.
    """
    folder = Path(directory).expanduser().absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DraftError(
            f"export: {str(directory)!r} exists and is not empty; name another "
            "directory."
        )
    if draft.verifier is None and form == "speculators":
        raise DraftError(
            "export: speculators' form names its target and nothing says which it is; "
            "give --target."
        )
    tensors = with_mapping(draft.config, draft.tensors)
    verifier = draft.verifier or Verifier()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        staged = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    except OSError as error:
        raise DraftError(
            f"export: {str(directory)!r} cannot be written ({error.strerror})."
        ) from None
    try:
        if form == "speculators":
            save_speculators(staged, draft.config, tensors, verifier)
        else:
            write_checkpoint(staged, hf_config(draft.config, tensors), tensors)
        card = model_card(draft, tensors, form, verifier)
        (staged / "README.md").write_text(card, encoding="utf-8")
        # What makes them makes them private; an export is to be shared.
        for file in staged.iterdir():
            file.chmod(0o644)
        staged.chmod(0o755)
        os.replace(staged, folder)
    except OSError as error:
        raise DraftError(
            f"export: {str(directory)!r} cannot be written ({error})."
        ) from None
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    return folder
