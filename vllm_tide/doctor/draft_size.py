"""How many bytes the weights of the configured draft take."""

from __future__ import annotations

import math

from vllm_tide.doctor.checkpoints import (
    CheckpointError,
    local_checkpoint,
    model_config,
    stored_tensors,
)
from vllm_tide.doctor.subject import Subject

_BYTES = {"float32": 4, "float64": 8}
_UNUSED = "t2d"  # as the server: vLLM ignores it


def draft_bytes(subject: Subject) -> int | None:
    """Bytes of the draft's tensors; None if the draft is not known or not here."""
    if subject.draft == "fresh":
        return _fresh_bytes(subject)
    draft = subject.draft and local_checkpoint(subject.draft, subject.revision)
    if not draft:
        return None
    try:
        tensors = stored_tensors(draft)
    except CheckpointError:  # said by the check of the fit
        return None
    return sum(t.num_bytes for name, t in tensors.items() if name != _UNUSED)


def _fresh_bytes(subject: Subject) -> int | None:
    target = subject.model and local_checkpoint(subject.model)
    if not target or subject.tide is None:
        return None
    from vllm_tide.draft.config import DraftError
    from vllm_tide.draft.eagle3 import parameter_shapes
    from vllm_tide.draft.fresh import fresh_config

    try:
        raw = model_config(target)
        config = fresh_config(raw, subject.tide.fresh)
    except (CheckpointError, DraftError):
        return None
    text = raw.get("text_config") or raw
    dtype = text.get("dtype") or text.get("torch_dtype") or ""
    shapes = [
        *parameter_shapes(config).values(),
        (config.draft_vocab_size, config.hidden_size),
    ]
    weights = sum(math.prod(shape) for shape in shapes) * _BYTES.get(dtype, 2)
    return weights + 8 * config.draft_vocab_size
