"""Does the draft fit the target, for the server and for the trainer?

The product's own checks, given what the two checkpoints say about themselves; no weight
is read and nothing is fetched.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm_tide.config import ConfigError, TideConfig
from vllm_tide.doctor.checkpoints import (
    CheckpointError,
    local_checkpoint,
    model_config,
    stored_tensors,
)
from vllm_tide.doctor.finding import Finding, failed, ok, skipped
from vllm_tide.doctor.subject import Subject

NAME = "draft fit"
_OTHER_DRAFT = (
    'Use a draft trained for this target, or \'"model": "fresh"\' to begin with a '
    "new one."
)
_DTYPES = {
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "BOOL": "bool",
}


class TargetShape:
    """What the server's check asks of vLLM's `ModelConfig`, from a `config.json`.

    Args:
        raw: The target's configuration.

    Raises:
        CheckpointError: It names its sizes in a way that only vLLM knows.
    """

    def __init__(self, raw: dict[str, Any]) -> None:
        text = raw.get("text_config")
        text = text if isinstance(text, dict) else raw
        names = ("hidden_size", "vocab_size", "num_hidden_layers")
        values = [text.get(name) for name in names]
        for name, value in zip(names, values, strict=True):
            if not isinstance(value, int) or value <= 0:
                raise CheckpointError(f"The target's config.json has no {name}.")
        self._hidden, self._vocab, self._layers = values

    def get_hidden_size(self) -> Any:
        """Width of a hidden state."""
        return self._hidden

    def get_vocab_size(self) -> Any:
        """Tokens of the vocabulary."""
        return self._vocab

    def get_total_num_hidden_layers(self) -> Any:
        """Layers."""
        return self._layers


def check(subject: Subject) -> Iterator[Finding]:
    """Compare the configured draft with the target."""
    yield _check(subject)


def _check(subject: Subject) -> Finding:
    if subject.tide is None:
        return skipped(NAME, "The configuration cannot be used.")
    if subject.source is None:
        return skipped(NAME, "No --config given, so no draft is known.")
    if subject.draft is None:
        return skipped(NAME, "The configuration names no draft.")
    if subject.model is None:
        return skipped(NAME, "No --model given, so the target is not known.")
    target = local_checkpoint(subject.model)
    if target is None:
        return skipped(
            NAME,
            f"The target {subject.model!r} is not on this machine; vllm serve fetches "
            "and checks it.",
        )
    try:
        shape = TargetShape(model_config(target))
    except CheckpointError as error:
        return skipped(NAME, f"{error} vllm serve compares them.")
    if subject.draft == "fresh":
        return _fresh(target, subject.tide)
    draft = local_checkpoint(subject.draft, subject.revision)
    if draft is None:
        return skipped(
            NAME,
            f"The draft {subject.draft!r} is not on this machine; vllm serve fetches "
            "and checks it.",
        )
    return _compare(subject, target, shape, draft)


def _fresh(target: Path, tide: TideConfig) -> Finding:
    from vllm_tide.draft.config import DraftError
    from vllm_tide.draft.fresh import fresh_config

    try:
        fresh_config(model_config(target), tide.fresh)
    except DraftError as error:
        return failed(
            NAME, f"No fresh head can be built: {error}", "Name a draft in 'model'."
        )
    return ok(NAME, "The server builds a fresh head for this target.")


def _compare(
    subject: Subject, target: Path, shape: TargetShape, draft: Path
) -> Finding:
    import torch

    from vllm_tide.draft.checkpoint import canonical_name, check_tensors
    from vllm_tide.draft.config import DraftError, Eagle3Config
    from vllm_tide.engine.arguments import check_speculative_config

    try:
        check_speculative_config({**subject.speculative, "model": str(draft)}, shape)
    except ConfigError as error:
        return failed(NAME, str(error), _OTHER_DRAFT)
    try:
        config = Eagle3Config.from_json(model_config(draft), model_config(target))
        # Tensors without memory: their types and shapes are looked at, no more.
        found = {
            canonical_name(name): torch.empty(
                stored.shape,
                dtype=getattr(torch, _DTYPES.get(stored.dtype, "uint8")),
                device="meta",
            )
            for name, stored in stored_tensors(draft).items()
        }
        check_tensors(config, found)
    except (CheckpointError, DraftError) as error:
        return failed(NAME, f"The trainer cannot take the draft: {error}", _OTHER_DRAFT)
    return ok(
        NAME,
        f"{draft.name} fits {target.name}: hidden {config.target_hidden_size}, layers "
        f"{list(config.aux_layer_ids)}, {config.draft_vocab_size} of "
        f"{config.vocab_size} tokens.",
    )
