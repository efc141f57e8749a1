"""Shape and options of an EAGLE-3 draft, read from its `config.json`.

Supports the options of published one-layer Llama drafts and refuses all others: an
ignored option would give a draft that trains but has low acceptance when served.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ARCHITECTURES = (
    "LlamaForCausalLMEagle3",
    "Eagle3LlamaForCausalLM",
    "Eagle3Speculator",
    "Eagle3DraftModel",
)
_ROPE_TYPES = ("default", "linear", "llama3")
_OTHER_NAMES = ("aux_layer_ids", "rope")  # fields with another name in config.json
_MAX_SIZE = 1 << 24  # of any integer in a configuration


class DraftError(ValueError):
    """A draft or target checkpoint cannot be used."""


class UnsupportedDraft(DraftError):
    """A kind of draft that cannot be trained here, although vLLM may serve it."""


@dataclass(frozen=True)
class Rope:
    """Rotary embedding parameters (neox halves, all of head_dim)."""

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192

    def inverse_frequencies(self, head_dim: int) -> list[float]:
        """Return the angle per position of the `head_dim / 2` pairs (radians)."""
        plain = [self.theta ** (-2.0 * i / head_dim) for i in range(head_dim // 2)]
        if self.kind == "linear":
            return [f / self.factor for f in plain]
        if self.kind == "llama3":
            return [self._llama3(f) for f in plain]
        return plain

    def _llama3(self, frequency: float) -> float:
        wavelength = 2 * math.pi / frequency
        low, high = self.low_freq_factor, self.high_freq_factor
        if wavelength < self.original_max_position / high:
            return frequency
        if wavelength > self.original_max_position / low:
            return frequency / self.factor
        smooth = (self.original_max_position / wavelength - low) / (high - low)
        return (1 - smooth) * frequency / self.factor + smooth * frequency


@dataclass(frozen=True)
class Eagle3Config:
    """Configuration of a draft.

    `aux_layer_ids` are vLLM's: id L is the residual stream entering layer L.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    aux_layer_ids: tuple[int, ...]
    target_hidden_size: int
    rms_norm_eps: float = 1e-5
    rope: Rope = field(default_factory=Rope)
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    max_position_embeddings: int = 2048

    @property
    def num_aux(self) -> int:
        return len(self.aux_layer_ids)

    @property
    def feature_size(self) -> int:
        return self.num_aux * self.target_hidden_size

    @classmethod
    def from_json(
        cls, raw: dict[str, Any], target: dict[str, Any] | None = None
    ) -> Eagle3Config:
        """Read a `config.json`.

        Args:
            raw: The draft's configuration (EAGLE-3 or speculators form).
            target: The target's configuration, for default layer ids.

        Raises:
            DraftError: A shape or option of the draft is not supported.
        """
        try:
            return cls._read(raw, target)
        except DraftError:
            raise
        except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
            raise DraftError(
                f"draft config: a value has the wrong type ({error!r:.150})."
            ) from None

    @classmethod
    def _read(cls, raw: dict[str, Any], target: dict[str, Any] | None) -> Eagle3Config:
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
        hidden = _need(body, "hidden_size")
        num_heads = _need(body, "num_attention_heads")
        vocab = _need(body, "vocab_size")
        options = {
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
        num_kv_heads = _need(body, "num_key_value_heads", num_heads)
        head_dim = _need(body, "head_dim", hidden // num_heads)
        if num_heads % num_kv_heads or head_dim % 2:
            raise DraftError(
                f"draft config: num_attention_heads {num_heads} must be a multiple of "
                f"num_key_value_heads {num_kv_heads}, and head_dim {head_dim} even."
            )
        eps = float(body.get("rms_norm_eps", 1e-6))
        if not 0.0 <= eps < math.inf:
            raise DraftError(f"draft config: rms_norm_eps is {eps}; it must be >= 0.")
        return cls(
            hidden_size=hidden,
            intermediate_size=_need(body, "intermediate_size"),
            num_attention_heads=num_heads,
            num_key_value_heads=num_kv_heads,
            head_dim=head_dim,
            vocab_size=vocab,
            draft_vocab_size=_need(body, "draft_vocab_size", vocab),
            aux_layer_ids=_layer_ids(body, eagle, target),
            target_hidden_size=_need(body, "target_hidden_size", hidden),
            rms_norm_eps=eps,
            rope=read_rope(body),
            fc_norm=bool(body.get("fc_norm", False)),
            norm_output=bool(body.get("norm_output", False)),
            max_position_embeddings=_need(body, "max_position_embeddings", 2048),
            **options,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the `config.json` that vLLM loads as `Eagle3LlamaForCausalLM`."""
        rope: dict[str, Any] = {"rope_type": self.rope.kind}
        if self.rope.kind != "default":
            rope["factor"] = self.rope.factor
        if self.rope.kind == "llama3":
            rope["low_freq_factor"] = self.rope.low_freq_factor
            rope["high_freq_factor"] = self.rope.high_freq_factor
            rope["original_max_position_embeddings"] = self.rope.original_max_position
        out: dict[str, Any] = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "rope_theta": self.rope.theta,
            "rope_scaling": None if self.rope.kind == "default" else rope,
            "eagle_aux_hidden_state_layer_ids": list(self.aux_layer_ids),
            "num_aux_hidden_states": self.num_aux,
        }
        # All other fields have vLLM's names.
        fields = {k: v for k, v in vars(self).items() if k not in _OTHER_NAMES}
        return out | fields


def regular_file(path: Path) -> Path:
    """Return `path` if it is absent or a regular file.

    Raises:
        DraftError: It is a pipe, a device or a directory; a read might not end.
    """
    if path.exists() and not path.is_file():
        raise DraftError(f"{path}: cannot be read (not a regular file).")
    return path


def read_config(directory: str | Path) -> dict[str, Any]:
    path = regular_file(Path(directory) / "config.json")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, RecursionError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise DraftError(f"{path}: cannot be read as JSON ({why}).") from None
    if not isinstance(value, dict):
        raise DraftError(f"{path}: must contain a JSON object.")
    return value


def _need(body: dict[str, Any], name: str, default: int | None = None) -> int:
    value = body.get(name)
    if value is None and default is not None:
        value = default
    if type(value) is not int or not 0 < value <= _MAX_SIZE:
        raise DraftError(
            f"draft config: {name} is {value!r:.40}; it must be an integer from 1 to "
            f"{_MAX_SIZE}."
        )
    return value


def _refuse_unsupported(body: dict[str, Any]) -> None:
    known = set(ARCHITECTURES)
    names = body.get("architectures") or []
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
    for name, allowed in supported.items():
        if body.get(name) not in allowed:
            raise UnsupportedDraft(
                f"draft config: {name}={body[name]!r:.60} is not supported; it must be "
                f"{allowed[0]!r}."
            )
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
    out = tuple(sorted(int(i) for i in ids))  # vLLM returns them in layer order
    if len(set(out)) != len(out):
        raise DraftError(f"draft config: {name} {list(out)!r:.80} repeats a layer.")
    return out


def read_rope(body: dict[str, Any]) -> Rope:
    """Read the rotary embedding of a `config.json`; DraftError if unsupported."""
    scaling = body.get("rope_parameters") or body.get("rope_scaling") or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in _ROPE_TYPES:
        raise UnsupportedDraft(
            f"draft config: rope type {kind!r:.40} is not supported; "
            f"supported: {', '.join(_ROPE_TYPES)}."
        )
    if scaling.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedDraft("draft config: partial_rotary_factor must be 1.0.")
    original = scaling.get("original_max_position_embeddings")
    rope = Rope(
        theta=float(scaling.get("rope_theta") or body.get("rope_theta") or 10000.0),
        kind=kind,
        factor=float(scaling.get("factor") or 1.0),
        low_freq_factor=float(scaling.get("low_freq_factor") or 1.0),
        high_freq_factor=float(scaling.get("high_freq_factor") or 4.0),
        original_max_position=int(original or 8192),
    )
    numbers = {name: v for name, v in vars(rope).items() if name != "kind"}
    for name, value in numbers.items():
        if not 0.0 < value < 1e30:
            raise DraftError(
                f"draft config: {name} of the rotary embedding is {value!r:.40}; it "
                "must be positive and finite."
            )
    return rope
