"""The form of an EAGLE-3 draft that the speculators library writes, for vLLM 0.32.

vLLM (`transformers_utils/configs/speculators`) reads the model's configuration from
`transformer_layer_config`, copies some EAGLE-3 fields from the top level into it, and
reads target and number of draft tokens from `speculators_config`, so that `vllm serve
DIR` suffices. Tensors are those of the Hugging Face form with `layers.0.` for
`midlayer.`.
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

# Keys outside of the layer's configuration, and keys of the Hugging Face form only.
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
_DEFAULT_NUM_AUX = 3  # vLLM's default


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
    config: Eagle3Config, verifier: Verifier, dtype: str
) -> dict[str, Any]:
    """Return the `config.json` of speculators' form.

    Args:
        dtype: Torch's name of the tensors' dtype.
    """
    flat = config.to_json()
    layer = {k: v for k, v in flat.items() if k not in (*_TOP_KEYS, *_HF_KEYS)}
    if layer["rope_scaling"] is None:
        # vLLM sets every key as an attribute; None would remove the parameters.
        del layer["rope_scaling"]
    if config.num_aux != _DEFAULT_NUM_AUX:
        # vLLM reads it from the model's configuration only, not from the top level.
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
        directory: Created if absent; its files are replaced atomically.
        tensors: As from `export_tensors`, by any accepted name.
    """
    named = {speculators_name(name): tensor for name, tensor in tensors.items()}
    body = speculators_config(config, verifier, dtype_name(named))
    write_checkpoint(directory, body, named)
