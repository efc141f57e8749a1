"""Writes a draft for others: one directory with weights, configuration, model card."""

from __future__ import annotations

import json
import math
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
    dtype_name,
    hf_config,
    read_tensors,
    stored_vocab,
    write_checkpoint,
)
from vllm_tide.draft.config import DraftError, Eagle3Config, read_config
from vllm_tide.draft.speculators import Verifier, read_verifier, save_speculators

Form = Literal["hf", "speculators"]


@dataclass(frozen=True)
class ExportedDraft:
    """A draft on its way out.

    Attributes:
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
    vocab = stored_vocab(config, out)
    if "d2t" in out:
        out.setdefault("t2d", vocab.t2d)
    return out


def from_directory(
    directory: str | Path, target: Mapping[str, Any] | None = None
) -> ExportedDraft:
    """Read a draft directory of either form.

    Args:
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


# Key of a measured figure, what the card says of it, how it is written.
FIGURES: tuple[tuple[str, str, str], ...] = (
    ("holdout_acceptance_new", "Expected acceptance length, held-out requests", ".3f"),
    ("holdout_acceptance_live", "The same of the draft before it", ".3f"),
    ("gain", "Gain over the draft before it (tokens per verify step)", "+.4f"),
    ("gain_error", "Standard error of the gain, over requests", ".4f"),
    ("holdout_requests", "Held-out requests", ".0f"),
    ("steps", "Optimizer steps", ".0f"),
    ("train_tokens", "Tokens trained on, repetitions included", ".0f"),
    ("loss", "Mean training loss of the last cycle", ".4f"),
)
_TEMPLATE = """---
{{ card_data }}
---

# EAGLE-3 draft

A draft for speculative decoding{% if trained %}, trained by vllm_tide on the target's \
own hidden states while it served{% endif %}. The target's outputs do not depend on it.

| | |
|---|---|
{% for label, text in facts %}| {{ label }} | {{ text }} |
{% endfor %}
## Measured

{% if figures %}| figure | value |
|---|---|
{% for label, text in figures %}| {{ label }} | {{ text }} |
{% endfor %}{% else %}Nothing was measured on these weights.
{% endif %}
## Use

    {{ command }}
"""


def measured(figures: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Label and text of every figure that is there and finite, in the card's order."""
    rows = []
    for key, label, form in FIGURES:
        value = figures.get(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        if math.isfinite(value):
            rows.append((label, format(value, form)))
    return rows


def model_card(
    draft: ExportedDraft, tensors: Mapping[str, Tensor], form: str, verifier: Verifier
) -> str:
    """The card as Markdown with the hub's YAML header; `tensors` as they are stored."""
    from huggingface_hub import ModelCard, ModelCardData

    target = verifier.hub_name
    data = ModelCardData(
        base_model=target or None,
        library_name="vllm",
        pipeline_tag="text-generation",
        tags=["eagle3", "speculative-decoding", "vllm"]
        + ["speculators"] * (form == "speculators"),
    )
    size = sum(t.numel() for t in tensors.values() if t.is_floating_point())
    shape = draft.config
    kept = f"{shape.draft_vocab_size} of {shape.vocab_size} tokens"
    version = "" if draft.version is None else f", version {draft.version}"
    command = "vllm serve DIRECTORY"
    if form == "hf" or not target:
        value: dict[str, Any] = {"method": "eagle3", "model": "DIRECTORY"}
        value["num_speculative_tokens"] = verifier.num_speculative_tokens
        command = f"vllm serve {target or 'TARGET'} "
        command += f"--speculative-config '{json.dumps(value)}'"
    card = ModelCard.from_template(
        data,
        template_str=_TEMPLATE,
        trained=draft.trained,
        facts=[
            *([("Target", f"`{target}`")] if target else []),
            ("Weights", f"{draft.source or 'a draft directory'}{version}"),
            ("Parameters stored", f"{size} ({dtype_name(tensors)})"),
            ("Draft vocabulary", kept),
            ("Target layers read", ", ".join(map(str, shape.aux_layer_ids))),
        ],
        figures=measured(draft.figures),
        command=command,
    )
    return str(card)
