"""Export of a draft: a directory with weights, configuration and model card."""

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
    check_tensors,
    dtype_name,
    hf_config,
    read_tensors,
    stored_vocab,
    write_checkpoint,
)
from vllm_tide.draft.config import DraftConfig, DraftError, read_config
from vllm_tide.draft.kind import canonical, draft_config
from vllm_tide.draft.speculators import Verifier, read_verifier, save_speculators

Form = Literal["hf", "speculators"]


@dataclass(frozen=True)
class ExportedDraft:
    """A draft to export.

    Attributes:
        tensors: By parameter, on the CPU; shared ones may be absent.
        verifier: The target; None if unknown.
        version: Version of the weights on their engine, or None.
        source: Description of their origin.
        figures: Measured figures by the keys of `FIGURES`.
        trained: Trained by vllm_tide; False if unknown.
    """

    config: DraftConfig
    tensors: Mapping[str, Tensor]
    verifier: Verifier | None = None
    version: int | None = None
    source: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)
    trained: bool = False


def with_mapping(
    config: DraftConfig, tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Check tensors and return them by parameter, with `t2d` if it is missing.

    Raises:
        DraftError: A name, shape or the vocabulary mapping is wrong.
    """
    out = canonical(tensors)
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
        target: The target's configuration, for default layer ids.
    """
    raw = read_config(directory)
    config = draft_config(raw, dict(target) if target is not None else None)
    return ExportedDraft(
        config,
        with_mapping(config, read_tensors(directory)),
        read_verifier(raw),
        source="a draft directory",
    )


def write_export(directory: str | Path, draft: ExportedDraft, form: Form) -> Path:
    """Write the directory atomically.

    Args:
        directory: Absent or empty.
        form: "hf" (for `--speculative-config`) or "speculators" (`vllm serve DIR`).

    Raises:
        DraftError: The directory is not empty, or the form needs an unknown target.
    """
    folder = Path(directory).expanduser().absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DraftError(
            f"export: {str(directory)!r} is not empty; choose another directory."
        )
    if draft.verifier is None and form == "speculators":
        raise DraftError(
            "export: speculators' form needs the name of the target; give --target."
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
        # Files are created private; an export is readable by others.
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


# Key, label on the card and format of each measured figure.
FIGURES: tuple[tuple[str, str, str], ...] = (
    ("gain", "Gain over the previous draft in the last cycle (tokens)", "+.4f"),
    ("gain_error", "Standard error of the gain, over requests", ".4f"),
    ("fresh_requests", "Requests scored before training on them", ".0f"),
    ("holdout_requests", "Held-out requests", ".0f"),
    ("holdout_acceptance_new", "Acceptance length, held out, teacher-forced", ".3f"),
    ("holdout_acceptance_live", "The same for the previous draft", ".3f"),
    ("steps", "Optimizer steps", ".0f"),
    ("train_tokens", "Tokens trained on, repetitions included", ".0f"),
    ("loss", "Mean training loss of the last cycle", ".4f"),
)
_TEMPLATE = """---
{{ card_data }}
---

# {{ kind }} draft

A draft for speculative decoding{% if trained %}, trained by vllm_tide on the target's \
hidden states during serving{% endif %}. The target's outputs do not depend on it.

| | |
|---|---|
{% for label, text in facts %}| {{ label }} | {{ text }} |
{% endfor %}
## Measured

{% if figures %}| figure | value |
|---|---|
{% for label, text in figures %}| {{ label }} | {{ text }} |
{% endfor %}{% else %}No measurements of these weights.
{% endif %}
## Use

    {{ command }}
"""


def measured(figures: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return label and text of all finite figures, in the order of `FIGURES`."""
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
    """Return the card: Markdown with the hub's YAML header; `tensors` as stored."""
    from huggingface_hub import ModelCard, ModelCardData

    target = verifier.hub_name
    data = ModelCardData(
        base_model=target or None,
        library_name="vllm",
        pipeline_tag="text-generation",
        tags=[draft.config.method, "speculative-decoding", "vllm"]
        + ["speculators"] * (form == "speculators"),
    )
    size = sum(t.numel() for t in tensors.values() if t.is_floating_point())
    shape = draft.config
    vocabulary = f"{shape.draft_vocab_size} of {shape.vocab_size} tokens"
    version = "" if draft.version is None else f", version {draft.version}"
    command = "vllm serve DIRECTORY"
    if form == "hf" or not target:
        value: dict[str, Any] = {"method": shape.method, "model": "DIRECTORY"}
        value["num_speculative_tokens"] = verifier.num_speculative_tokens
        command = f"vllm serve {target or 'TARGET'} "
        command += f"--speculative-config '{json.dumps(value)}'"
    card = ModelCard.from_template(
        data,
        template_str=_TEMPLATE,
        kind=shape.title,
        trained=draft.trained,
        facts=[
            *([("Target", f"`{target}`")] if target else []),
            ("Weights", f"{draft.source or 'a draft directory'}{version}"),
            ("Parameters stored", f"{size} ({dtype_name(tensors)})"),
            ("Draft vocabulary", vocabulary),
            ("Target layers read", ", ".join(map(str, shape.aux_layer_ids))),
        ],
        figures=measured(draft.figures),
        command=command,
    )
    return str(card)
