"""The kinds of drafts: a table by vLLM's `method`.

A kind is a configuration and a trainable module. Everything else (capture, training,
gate, publication, swap) is the same for all kinds: step i of a row is drafted token
i + 1, with the same context, label and teacher.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from vllm_tide.draft.config import DraftConfig
from vllm_tide.draft.dflash import DFlashDraft
from vllm_tide.draft.dflash_config import DFlashConfig
from vllm_tide.draft.eagle3 import Eagle3Draft
from vllm_tide.draft.eagle3_config import LAYER, Eagle3Config
from vllm_tide.draft.module import Draft

T = TypeVar("T")


@dataclass(frozen=True)
class DraftKind:
    """Classes of a kind of drafts."""

    config: type[DraftConfig]
    module: type[Draft]


KINDS: dict[str, DraftKind] = {
    "eagle3": DraftKind(Eagle3Config, Eagle3Draft),
    "dflash": DraftKind(DFlashConfig, DFlashDraft),
}


def method_of(raw: Mapping[str, Any]) -> str:
    """Return vLLM's `method` for a draft's `config.json`."""
    names = [raw.get("speculators_model_type"), *_listed(raw.get("architectures"))]
    if "dflash_config" in raw or any(
        str(name).lower().startswith("dflash") for name in names
    ):
        return DFlashConfig.method
    return Eagle3Config.method


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def draft_config(
    raw: dict[str, Any], target: dict[str, Any] | None = None
) -> DraftConfig:
    """Read a draft's `config.json`; arguments and errors as `DraftConfig.from_json`."""
    return KINDS[method_of(raw)].config.from_json(raw, target)


def canonical(tensors: Mapping[str, T]) -> dict[str, T]:
    """Return the tensors of a draft by the names of its parameters.

    The only layer of EAGLE-3 has another name in speculators' form.
    """
    out = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    if "layers.0.hidden_norm.weight" not in out:
        return out
    return {name.replace("layers.0.", f"{LAYER}."): t for name, t in out.items()}
