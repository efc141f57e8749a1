"""The model card (README.md) of an exported draft: measured figures, nothing else.

A figure that was not measured is not mentioned, no more than a licence, which nobody
told us, or a place on this machine.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from vllm_tide.draft.checkpoint import dtype_name

if TYPE_CHECKING:
    from vllm_tide.draft.export import ExportedDraft
    from vllm_tide.draft.speculators import Verifier

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
