"""The model card (README.md) of an exported draft: measured figures, nothing else.

A figure that was not measured is not mentioned; a card never estimates.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_tide.draft.config import Eagle3Config

# Key of a measured figure, what the card says of it, how it is written.
FIGURES: tuple[tuple[str, str, str], ...] = (
    ("served_acceptance", "Served acceptance length (tokens per verify step)", ".3f"),
    ("served_acceptance_before", "The same of the draft before it", ".3f"),
    ("served_requests", "Requests it was measured on", ".0f"),
    ("holdout_acceptance_new", "Expected acceptance length, held-out requests", ".3f"),
    ("holdout_acceptance_live", "The same of the draft before it", ".3f"),
    ("gain", "Gain over the draft before it (tokens per verify step)", "+.4f"),
    ("gain_error", "Standard error of the gain, over requests", ".4f"),
    ("holdout_requests", "Held-out requests", ".0f"),
    ("steps", "Optimizer steps", ".0f"),
    ("train_tokens", "Tokens trained on, repetitions included", ".0f"),
    ("loss", "Mean training loss of the last cycle", ".4f"),
)
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class CardFacts:
    """What a card is written from.

    Attributes:
        form: "hf" or "speculators".
        target: Hub name or directory of the target.
        config: Shape of the draft.
        dtype: Floating type of the tensors.
        num_parameters: Floating-point numbers stored.
        num_speculative_tokens: Draft length served or written into the configuration.
        version: Version of the weights on their engine; None if they had none.
        source: Where the weights were read from, in words.
        figures: Measured figures by the keys of `FIGURES`; others are left out.
    """

    form: str
    target: str
    config: Eagle3Config
    dtype: str
    num_parameters: int
    num_speculative_tokens: int
    version: int | None = None
    source: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)


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


def model_card(facts: CardFacts) -> str:
    """The card as Markdown with the hub's YAML header."""
    return "\n".join([*_header(facts), *_body(facts), *_figures(facts), *_use(facts)])


def _header(facts: CardFacts) -> list[str]:
    lines = ["---", "library_name: vllm"]
    if _HUB_NAME.fullmatch(facts.target):
        lines.append(f"base_model: {facts.target}")
    return [*lines, "tags:", "- eagle3", "- speculative-decoding", "---", ""]


def _body(facts: CardFacts) -> list[str]:
    shape = facts.config
    vocab = f"{shape.draft_vocab_size} of {shape.vocab_size} tokens"
    if shape.draft_vocab_size == shape.vocab_size:
        vocab = f"all {shape.vocab_size} tokens"
    version = "" if facts.version is None else f", version {facts.version}"
    rows = [
        ("Target", f"`{facts.target}`"),
        ("Weights", f"{facts.source or 'a draft directory'}{version}"),
        ("Parameters stored", f"{facts.num_parameters} ({facts.dtype})"),
        ("Draft vocabulary", vocab),
        ("Target layers read", ", ".join(map(str, shape.aux_layer_ids))),
    ]
    return [
        "# EAGLE-3 draft",
        "",
        "A draft for speculative decoding, trained by vllm_tide on the target's own "
        "hidden states while it served. The target's outputs do not depend on it.",
        "",
        *_table(("", ""), rows),
    ]


def _figures(facts: CardFacts) -> list[str]:
    rows = measured(facts.figures)
    if not rows:
        return ["## Measured", "", "Nothing was measured on these weights.", ""]
    return ["## Measured", "", *_table(("figure", "value"), rows)]


def _use(facts: CardFacts) -> list[str]:
    if facts.form == "speculators":
        command = "vllm serve DIRECTORY"
    else:
        value = json.dumps(
            {
                "method": "eagle3",
                "model": "DIRECTORY",
                "num_speculative_tokens": facts.num_speculative_tokens,
            }
        )
        command = f"vllm serve {facts.target} --speculative-config '{value}'"
    return ["## Use", "", f"    {command}", ""]


def _table(head: tuple[str, str], rows: list[tuple[str, str]]) -> list[str]:
    lines = [f"| {head[0]} | {head[1]} |", "|---|---|"]
    return [*lines, *(f"| {label} | {text} |" for label, text in rows), ""]
