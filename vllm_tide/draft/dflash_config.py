"""Shape and options of a DFlash draft, read from its `config.json`.

Supports full, non-causal attention in all layers, as in z-lab's and speculators'
checkpoints for Qwen3 and Llama targets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from vllm_tide.draft.config import (
    DraftConfig,
    DraftError,
    UnsupportedDraft,
    common_fields,
    need,
    refuse_options,
    rope_to_json,
    sorted_layer_ids,
)

ARCHITECTURES = ("DFlashDraftModel",)
MAX_BLOCKS = 512
"""Blocks of a training batch, chosen at random (DFlash: 512 anchors per sequence)."""
_ROPE_THETA = 1e6  # vLLM's default for this architecture
_SPECULATORS_IDS = "aux_hidden_state_layer_ids"
# Options of a layer that change its computation, with their supported values.
_OPTIONS: dict[str, tuple[Any, ...]] = {
    "model_type": ("qwen3", "llama", None),
    "hidden_act": ("silu", None),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "logit_scale": (1.0, None),
    "partial_rotary_factor": (1.0, None),
    "is_neox_style": (True, None),
    "is_causal": (False, None),
    "use_sliding_window": (False, None),
    "add_swa_attention_sink_bias": (False, None),
    "use_aux_hidden_state": (True, None),
    "quantization_config": (None,),
}
_DFLASH_OPTIONS: dict[str, tuple[Any, ...]] = {
    "causal": (False, None),
    "use_swa": (False, None),
    "attention_sink_bias": (False, None),
    "attention_value_scale": (None,),
    "sample_from_anchor": (False, None),
    "use_aux_hidden_state": (True, None),
}


@dataclass(frozen=True)
class DFlashConfig(DraftConfig):
    """Configuration of a DFlash draft.

    Attributes:
        num_layers: Decoder layers of the draft.
        block_size: Tokens of a block: the known one and `block_size - 1` masked ones.
        mask_token_id: Target id with the embedding of the masked tokens.
    """

    method: ClassVar[str] = "dflash"
    title: ClassVar[str] = "DFlash"

    num_layers: int = 1
    block_size: int = 8
    mask_token_id: int = 0

    @classmethod
    def _read(cls, raw: dict[str, Any], target: dict[str, Any] | None) -> Self:
        body, dflash = dict(raw), dict(raw.get("dflash_config") or {})
        layer = body.pop("transformer_layer_config", None)
        if layer is not None:
            if not isinstance(layer, dict):
                raise TypeError("transformer_layer_config")
            if body.pop("sliding_window_non_causal", True) is not True:
                dflash["causal"] = True
            dflash["sample_from_anchor"] = body.get("sample_from_anchor")
            body = {**layer, **{k: v for k, v in body.items() if v is not None}}
            body["model_type"] = layer.get("model_type")
            body["architectures"] = list(ARCHITECTURES)
        names = body.get("architectures") or []
        names = [names] if isinstance(names, str) else names
        if names and not set(names) & set(ARCHITECTURES):
            raise UnsupportedDraft(
                f"draft config: architecture {names[0]!r:.60} is not supported; "
                f"supported: {', '.join(ARCHITECTURES)}."
            )
        refuse_options(body, _OPTIONS)
        refuse_options(dflash, _DFLASH_OPTIONS)
        if set(body.get("layer_types") or ()) - {"full_attention"}:
            raise UnsupportedDraft(
                "draft config: sliding-window attention is not supported."
            )
        fields = common_fields(body, _ROPE_THETA)
        mask = dflash.get("mask_token_id", body.get("mask_token_id"))
        if type(mask) is not int or not 0 <= mask < fields["vocab_size"]:
            raise DraftError(
                f"draft config: mask_token_id is {mask!r:.40}; it must be an id of "
                f"the target's {fields['vocab_size']} tokens."
            )
        block = need(body, "block_size")
        if block < 2:
            raise DraftError(f"draft config: block_size is {block}; it must be >= 2.")
        return cls(
            **fields,
            aux_layer_ids=_layer_ids(body, dflash),
            num_layers=need(body, "num_hidden_layers"),
            block_size=block,
            mask_token_id=mask,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the `config.json` that vLLM loads as `DFlashQwen3ForCausalLM`."""
        return {
            "architectures": list(ARCHITECTURES),
            **self._layer(),
            "block_size": self.block_size,
            "draft_vocab_size": self.draft_vocab_size,
            "target_hidden_size": self.target_hidden_size,
            "dflash_config": {
                "mask_token_id": self.mask_token_id,
                # vLLM's own ids are of outputs; ours are of the layers they enter.
                "target_layer_ids": [i - 1 for i in self.aux_layer_ids],
            },
        }

    def to_speculators(self) -> tuple[dict[str, Any], dict[str, Any]]:
        layer = self._layer()
        if layer["rope_scaling"] is None:
            # vLLM sets every key as an attribute; None would remove the parameters.
            del layer["rope_scaling"]
        top = {
            "architectures": ["DFlashSpeculator"],
            "draft_vocab_size": self.draft_vocab_size,
            "target_hidden_size": self.target_hidden_size,
            "block_size": self.block_size,
            "mask_token_id": self.mask_token_id,
            _SPECULATORS_IDS: list(self.aux_layer_ids),
        }
        return top, layer

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        h, q = self.hidden_size, self.num_attention_heads * self.head_dim
        kv, inter = self.num_key_value_heads * self.head_dim, self.intermediate_size
        shapes: dict[str, tuple[int, ...]] = {
            "fc.weight": (h, self.feature_size),
            "hidden_norm.weight": (h,),
            "norm.weight": (h,),
        }
        of_layer: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj": (q, h),
            "self_attn.k_proj": (kv, h),
            "self_attn.v_proj": (kv, h),
            "self_attn.o_proj": (h, q),
            "self_attn.q_norm": (self.head_dim,),
            "self_attn.k_norm": (self.head_dim,),
            "mlp.gate_proj": (inter, h),
            "mlp.up_proj": (inter, h),
            "mlp.down_proj": (h, inter),
            "input_layernorm": (h,),
            "post_attention_layernorm": (h,),
        }
        for i in range(self.num_layers):
            for name, shape in of_layer.items():
                shapes[f"layers.{i}.{name}.weight"] = shape
        return shapes

    def num_steps(self, ttt_steps: int, depth: int) -> int:
        return depth  # a block is trained as it is served

    def computed_rows(self, rows: int, depth: int) -> int:
        return self.num_layers * (rows + min(rows, MAX_BLOCKS) * (depth + 1))

    def _layer(self) -> dict[str, Any]:
        return {
            "model_type": "qwen3",
            "num_hidden_layers": self.num_layers,
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": False,
            **rope_to_json(self.rope),
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "rms_norm_eps": self.rms_norm_eps,
            "max_position_embeddings": self.max_position_embeddings,
        }


def _layer_ids(body: Mapping[str, Any], dflash: Mapping[str, Any]) -> tuple[int, ...]:
    name = "eagle_aux_hidden_state_layer_ids"
    ids = body.get(name) or body.get(_SPECULATORS_IDS)
    if ids:
        return sorted_layer_ids(ids, name, lowest=1)
    name = "target_layer_ids"
    outputs = dflash.get(name)
    if not outputs:
        raise DraftError(f"draft config: {name} of dflash_config is missing.")
    return tuple(i + 1 for i in sorted_layer_ids(outputs, name))
