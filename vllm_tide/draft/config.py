"""Configuration that all kinds of drafts share: sizes, layers read, RoPE.

Every kind refuses the options that it does not support: an ignored option would give a
draft that trains but has low acceptance when served.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

_ROPE_TYPES = ("default", "linear", "llama3")
BIN = "pytorch_model*.bin"
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
class DraftConfig:
    """Configuration of a draft of any kind.

    `aux_layer_ids` are vLLM's: id L is the residual stream entering layer L.

    Attributes:
        method: vLLM's name of the kind (`--speculative-config`).
        title: Name of the kind in texts.
    """

    method: ClassVar[str] = ""
    title: ClassVar[str] = ""

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
    ) -> Self:
        """Read a `config.json`.

        Args:
            raw: The draft's configuration (the kind's own or speculators' form).
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
    def _read(cls, raw: dict[str, Any], target: dict[str, Any] | None) -> Self:
        raise NotImplementedError

    def to_json(self) -> dict[str, Any]:
        """Return the `config.json` of the kind's own form, which vLLM loads."""
        raise NotImplementedError

    def to_speculators(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the top level and the layer's section of speculators' form."""
        raise NotImplementedError

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor but `lm_head.weight` and the embedding."""
        raise NotImplementedError

    def num_steps(self, ttt_steps: int, depth: int) -> int:
        """Return the drafted tokens per row to train.

        Args:
            ttt_steps: `tide.train.ttt_steps`.
            depth: num_speculative_tokens.
        """
        return ttt_steps

    def computed_rows(self, rows: int, depth: int) -> int:
        """Return the rows of all layers in a training step of `rows` packed rows."""
        raise NotImplementedError


def bin_files(folder: Path) -> list[Path]:
    """Return the `.bin` files of a draft; none if it has safetensors."""
    if any(folder.glob("*.safetensors")):
        return []
    return sorted(folder.glob(BIN))


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


def common_fields(body: Mapping[str, Any], rope_theta: float = 1e4) -> dict[str, Any]:
    """Return the sizes, RoPE and epsilon of a draft as fields of `DraftConfig`.

    Args:
        rope_theta: Default base of the rotary embedding.

    Raises:
        DraftError: A value is missing or wrong.
    """
    hidden = need(body, "hidden_size")
    num_heads = need(body, "num_attention_heads")
    vocab = need(body, "vocab_size")
    num_kv_heads = need(body, "num_key_value_heads", num_heads)
    head_dim = need(body, "head_dim", hidden // num_heads)
    if num_heads % num_kv_heads or head_dim % 2:
        raise DraftError(
            f"draft config: num_attention_heads {num_heads} must be a multiple of "
            f"num_key_value_heads {num_kv_heads}, and head_dim {head_dim} even."
        )
    eps = float(body.get("rms_norm_eps", 1e-6))
    if not 0.0 <= eps < math.inf:
        raise DraftError(f"draft config: rms_norm_eps is {eps}; it must be >= 0.")
    return {
        "hidden_size": hidden,
        "intermediate_size": need(body, "intermediate_size"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "draft_vocab_size": need(body, "draft_vocab_size", vocab),
        "target_hidden_size": need(body, "target_hidden_size", hidden),
        "rms_norm_eps": eps,
        "rope": read_rope(body, rope_theta),
        "max_position_embeddings": need(body, "max_position_embeddings", 2048),
    }


def refuse_options(
    body: Mapping[str, Any], supported: Mapping[str, tuple[Any, ...]]
) -> None:
    """Raise UnsupportedDraft for an option with another value than the given ones."""
    for name, allowed in supported.items():
        if body.get(name) not in allowed:
            raise UnsupportedDraft(
                f"draft config: {name}={body[name]!r:.60} is not supported; it must be "
                f"{allowed[0]!r}."
            )


def sorted_layer_ids(ids: Iterable[Any], name: str, lowest: int = 0) -> tuple[int, ...]:
    """Return distinct layer ids in the order in which vLLM returns their features.

    Args:
        lowest: Smallest valid id.
    """
    listed = list(ids)
    if any(type(i) is not int or i < lowest for i in listed):
        raise DraftError(
            f"draft config: {name} is {listed!r:.80}; it must be a list of integers "
            f"from {lowest} on."
        )
    out = tuple(sorted(listed))
    if len(set(out)) != len(out):
        raise DraftError(f"draft config: {name} {list(out)!r:.80} repeats a layer.")
    return out


def rope_to_json(rope: Rope) -> dict[str, Any]:
    """Return the keys of a `config.json` that `read_rope` reads."""
    scaling: dict[str, Any] = {"rope_type": rope.kind}
    if rope.kind != "default":
        scaling["factor"] = rope.factor
    if rope.kind == "llama3":
        scaling["low_freq_factor"] = rope.low_freq_factor
        scaling["high_freq_factor"] = rope.high_freq_factor
        scaling["original_max_position_embeddings"] = rope.original_max_position
    return {
        "rope_theta": rope.theta,
        "rope_scaling": None if rope.kind == "default" else scaling,
    }


def need(body: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = body.get(name)
    if value is None and default is not None:
        value = default
    if type(value) is not int or not 0 < value <= _MAX_SIZE:
        raise DraftError(
            f"draft config: {name} is {value!r:.40}; it must be an integer from 1 to "
            f"{_MAX_SIZE}."
        )
    return value


def read_rope(body: Mapping[str, Any], theta: float = 1e4) -> Rope:
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
        theta=float(scaling.get("rope_theta") or body.get("rope_theta") or theta),
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
