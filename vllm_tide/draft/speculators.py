"""The form of a draft that the speculators library writes, for vLLM 0.32.

vLLM (`transformers_utils/configs/speculators`) reads the model's configuration from
`transformer_layer_config`, copies some of the kind's fields from the top level, and
reads target and number of draft tokens from `speculators_config`, so that `vllm serve
DIR` suffices. Tensors are those of the kind's own form, with `layers.0.` for
EAGLE-3's `midlayer.`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from vllm_tide.draft.checkpoint import dtype_name, write_checkpoint
from vllm_tide.draft.config import DraftConfig, DraftError
from vllm_tide.draft.eagle3_config import LAYER
from vllm_tide.draft.kind import canonical


@dataclass(frozen=True)
class Verifier:
    """The target in speculators' configuration.

    Attributes:
        name_or_path: Hub name or directory from which `vllm serve` loads the target.
    """

    name_or_path: str = ""
    architectures: tuple[str, ...] = ()
    num_speculative_tokens: int = 3

    @property
    def hub_name(self) -> str:
        """The Hub name; empty for a directory, which is not written to files."""
        from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

        try:
            validate_repo_id(self.name_or_path)
        except ValueError:
            return ""
        return "" if Path(self.name_or_path).is_dir() else self.name_or_path


def is_speculators(raw: Mapping[str, Any]) -> bool:
    return isinstance(raw.get("transformer_layer_config"), dict)


def speculators_config(
    config: DraftConfig, verifier: Verifier, dtype: str
) -> dict[str, Any]:
    """Return the `config.json` of speculators' form.

    Args:
        dtype: Torch's name of the tensors' dtype.
    """
    top, layer = config.to_speculators()
    return {
        **top,
        "speculators_model_type": config.method,
        "speculators_config": {
            "algorithm": config.method,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": verifier.num_speculative_tokens,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {
                "architectures": list(verifier.architectures),
            }
            | ({"name_or_path": name} if (name := verifier.hub_name) else {}),
        },
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "transformer_layer_config": layer,
    }


def read_verifier(raw: Mapping[str, Any]) -> Verifier | None:
    """Read the target from a `config.json`; None in the Hugging Face form.

    Raises:
        DraftError: The section is malformed.
    """
    if not is_speculators(raw) or "speculators_config" not in raw:
        return None
    section = raw["speculators_config"]
    try:
        return Verifier(
            str(section["verifier"].get("name_or_path", "")),
            tuple(section["verifier"].get("architectures") or ()),
            int(section["proposal_methods"][0]["speculative_tokens"]),
        )
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise DraftError(
            f"draft config: speculators_config lacks verifier or "
            f"proposal_methods ({error!r})."
        ) from None


def save_speculators(
    directory: str | Path,
    config: DraftConfig,
    tensors: Mapping[str, Tensor],
    verifier: Verifier,
) -> None:
    """Write a directory that `vllm serve DIRECTORY` loads.

    Args:
        directory: Created if absent; its files are replaced atomically.
        tensors: As from `export_tensors`, by any accepted name.
    """
    named = {
        name.replace(f"{LAYER}.", "layers.0."): tensor
        for name, tensor in canonical(tensors).items()
    }
    body = speculators_config(config, verifier, dtype_name(named))
    write_checkpoint(directory, body, named)
