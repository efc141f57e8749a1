"""Shape and options of an EAGLE-3 draft, read from its `config.json`.

Supports the options of published one-layer Llama drafts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

from vllm_tide.draft.config import (
    DraftConfig,
    DraftError,
    UnsupportedDraft,
    common_fields,
    refuse_options,
    rope_to_json,
    sorted_layer_ids,
)

LAYER = "midlayer"
ARCHITECTURES = (
    "LlamaForCausalLMEagle3",
    "Eagle3LlamaForCausalLM",
    "LlamaForCausalLM",  # the EAGLE authors' checkpoints
    "Eagle3Speculator",
    "Eagle3DraftModel",
)
# Keys outside of the layer's section, and keys of the other form only.
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
_OTHER_NAMES = ("aux_layer_ids", "rope")  # fields with another name in config.json


@dataclass(frozen=True)
class Eagle3Config(DraftConfig):
    """Configuration of an EAGLE-3 draft."""

    method: ClassVar[str] = "eagle3"
    title: ClassVar[str] = "EAGLE-3"

    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    @classmethod
    def _read(cls, raw: dict[str, Any], target: dict[str, Any] | None) -> Self:
        body = dict(raw)
        layer = body.pop("transformer_layer_config", None)
        speculators = layer is not None
        if layer is not None:
            kind = body.get("speculators_model_type", "eagle3")
            if kind != "eagle3":
                raise UnsupportedDraft(
                    f"draft: speculators type {kind!r:.40} is not 'eagle3'."
                )
            if not isinstance(layer, dict):
                raise TypeError("transformer_layer_config")
            body = {**layer, **{k: v for k, v in body.items() if v is not None}}
            body["model_type"] = layer.get("model_type", "llama")
        _refuse_unsupported(body)
        eagle = body.get("eagle_config") or {}
        options: dict[str, Any] = {
            name: bool(eagle.get(name, body.get(name, default)))
            for name, default in (
                ("norm_before_residual", speculators),
                ("norm_before_fc", False),
            )
        }
        if not speculators:  # vLLM reads this option at the top level only
            options["norm_before_residual"] = bool(body.get("norm_before_residual"))
        if options["norm_before_fc"] and body.get("fc_norm"):
            raise DraftError("draft: norm_before_fc and fc_norm exclude each other.")
        return cls(
            **common_fields(body),
            aux_layer_ids=_layer_ids(body, eagle, target),
            fc_norm=bool(body.get("fc_norm", False)),
            norm_output=bool(body.get("norm_output", False)),
            **options,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the `config.json` that vLLM loads as `Eagle3LlamaForCausalLM`."""
        out: dict[str, Any] = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            **rope_to_json(self.rope),
            "eagle_aux_hidden_state_layer_ids": list(self.aux_layer_ids),
            "num_aux_hidden_states": self.num_aux,
        }
        # All other fields have vLLM's names.
        fields = {k: v for k, v in vars(self).items() if k not in _OTHER_NAMES}
        return out | fields

    def to_speculators(self) -> tuple[dict[str, Any], dict[str, Any]]:
        flat = self.to_json()
        layer = {k: v for k, v in flat.items() if k not in (*_TOP_KEYS, *_HF_KEYS)}
        if layer["rope_scaling"] is None:
            # vLLM sets every key as an attribute; None would remove the parameters.
            del layer["rope_scaling"]
        if self.num_aux != _DEFAULT_NUM_AUX:
            # vLLM reads it from the model's configuration only, not from the top level.
            layer["num_aux_hidden_states"] = self.num_aux
        top = {"architectures": ["Eagle3Speculator"]}
        return top | {key: flat[key] for key in _TOP_KEYS}, layer

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        h, q = self.hidden_size, self.num_attention_heads * self.head_dim
        kv, inter = self.num_key_value_heads * self.head_dim, self.intermediate_size
        shapes: dict[str, tuple[int, ...]] = {
            "fc.weight": (h, self.feature_size),
            f"{LAYER}.self_attn.q_proj.weight": (q, 2 * h),
            f"{LAYER}.self_attn.k_proj.weight": (kv, 2 * h),
            f"{LAYER}.self_attn.v_proj.weight": (kv, 2 * h),
            f"{LAYER}.self_attn.o_proj.weight": (h, q),
            f"{LAYER}.mlp.gate_proj.weight": (inter, h),
            f"{LAYER}.mlp.up_proj.weight": (inter, h),
            f"{LAYER}.mlp.down_proj.weight": (h, inter),
            f"{LAYER}.input_layernorm.weight": (h,),
            f"{LAYER}.hidden_norm.weight": (h,),
            f"{LAYER}.post_attention_layernorm.weight": (h,),
            "norm.weight": (h,),
        }
        if self.norm_before_fc:
            shapes["input_norm.weight"] = (self.feature_size,)
        if self.fc_norm:
            for i in range(self.num_aux):
                shapes[f"fc_norm.{i}.weight"] = (self.target_hidden_size,)
        return shapes

    def computed_rows(self, rows: int, depth: int) -> int:
        return rows * depth


def _refuse_unsupported(body: dict[str, Any]) -> None:
    known = set(ARCHITECTURES)
    names = body.get("architectures") or []
    names = [names] if isinstance(names, str) else names
    if names and not known & set(names):
        raise UnsupportedDraft(
            f"draft config: architecture {names[0]!r:.60} is not supported; "
            f"supported: {', '.join(ARCHITECTURES)}."
        )
    supported: dict[str, tuple[Any, ...]] = {
        "model_type": ("llama", None),
        "num_hidden_layers": (1, None),
        "hidden_act": ("silu", None),
        "attention_bias": (False, None),
        "bias": (False, None),
        "mlp_bias": (False, None),
        "qkv_bias": (False, None),
        "logit_scale": (1.0, None),
        "partial_rotary_factor": (1.0, None),
        "quantization_config": (None,),
        "parallel_drafting": (False, None),
    }
    refuse_options(body, supported)
    eagle = body.get("eagle_config") or {}
    if eagle.get("use_aux_hidden_state", True) is not True:
        raise UnsupportedDraft(
            "draft config: use_aux_hidden_state=false (EAGLE-1) is not supported."
        )
    if "sliding_attention" in (body.get("layer_types") or []):
        raise UnsupportedDraft(
            "draft config: sliding-window attention is not supported."
        )


def _layer_ids(
    body: dict[str, Any], eagle: dict[str, Any], target: dict[str, Any] | None
) -> tuple[int, ...]:
    name = "eagle_aux_hidden_state_layer_ids"
    ids = body.get(name) or eagle.get(name)
    if not ids and target is not None:
        text = target.get("text_config") or target
        layers = int(text["num_hidden_layers"])
        ids = (2, layers // 2, layers - 3)  # vLLM's default
    if not ids:
        raise DraftError(
            f"draft config: {name} is missing, and there is no target config for a "
            "default."
        )
    count = body.get("num_aux_hidden_states")
    if count is not None and count != len(ids):
        raise DraftError(
            f"draft config: num_aux_hidden_states is {count!r:.40}, but there are "
            f"{len(ids)} layer ids."
        )
    return sorted_layer_ids(ids, name)
