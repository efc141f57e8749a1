"""speculators' form of an EAGLE-3 draft, as vLLM 0.32 reads it.

vLLM (`transformers_utils/configs/speculators`) takes `transformer_layer_config` as the
model's configuration, copies a few EAGLE-3 fields from the top level into it, and finds
target and draft length under `speculators_config`, so that `vllm serve DIR` is enough.
Tensors are those of the Hugging Face form with `layers.0.` for `midlayer.`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from vllm_tide.draft.checkpoint import canonical_name, dtype_name, write_checkpoint
from vllm_tide.draft.config import DraftError, Eagle3Config
from vllm_tide.draft.eagle3 import LAYER

# Keys beside the layer's configuration, and keys of the other form only.
_TOP_KEYS = (
    "draft_vocab_size",
    "target_hidden_size",
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "eagle_aux_hidden_state_layer_ids",
)
_HF_KEYS = ("architectures", "num_aux_hidden_states")
_DEFAULT_NUM_AUX = 3  # vLLM's, where the configuration does not say


@dataclass(frozen=True)
class Verifier:
    """The target as speculators' configuration names it.

    Attributes:
        name_or_path: Hub name, from which `vllm serve` loads the target, or directory.
    """

    name_or_path: str = ""
    architectures: tuple[str, ...] = ()
    num_speculative_tokens: int = 3

    @property
    def hub_name(self) -> str:
        """What may be written down; empty for a place on this machine."""
        from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

        try:
            validate_repo_id(self.name_or_path)
        except ValueError:
            return ""
        return "" if Path(self.name_or_path).is_dir() else self.name_or_path


def is_speculators(raw: Mapping[str, Any]) -> bool:
    return isinstance(raw.get("transformer_layer_config"), dict)


def speculators_config(
    config: Eagle3Config, verifier: Verifier, dtype: str
) -> dict[str, Any]:
    """The `config.json` of speculators' form.

    Args:
        dtype: Floating type of the tensors as torch names it.
    """
    flat = config.to_json()
    layer = {k: v for k, v in flat.items() if k not in (*_TOP_KEYS, *_HF_KEYS)}
    if layer["rope_scaling"] is None:
        # vLLM sets every key as an attribute, and None would erase the parameters.
        del layer["rope_scaling"]
    if config.num_aux != _DEFAULT_NUM_AUX:
        # Read off the model's configuration only, never copied from the top level.
        layer["num_aux_hidden_states"] = config.num_aux
    return {
        "architectures": ["Eagle3Speculator"],
        **{key: flat[key] for key in _TOP_KEYS},
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
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
    """What a `config.json` says about its target; None in the Hugging Face form.

    Raises:
        DraftError: The section is there and malformed.
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


def speculators_name(name: str) -> str:
    name = canonical_name(name)
    if name.startswith(f"{LAYER}."):
        return "layers.0." + name.removeprefix(f"{LAYER}.")
    return name


def save_speculators(
    directory: str | Path,
    config: Eagle3Config,
    tensors: Mapping[str, Tensor],
    verifier: Verifier,
) -> None:
    """Write a directory that `vllm serve DIRECTORY` loads.

    Args:
        directory: Made if absent; its files are replaced atomically.
        tensors: As `export_tensors` gives them, under any of the accepted names.
    """
    named = {speculators_name(name): tensor for name, tensor in tensors.items()}
    body = speculators_config(config, verifier, dtype_name(named))
    write_checkpoint(directory, body, named)
