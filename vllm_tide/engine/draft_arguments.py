"""Check the draft of a configuration against the target before a model is loaded."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path
from typing import Any

from vllm_tide.config import ConfigError
from vllm_tide.speculative import FRESH, METHODS

logger = logging.getLogger("vllm.tide")


def use_draft(config: dict[str, Any], target: Any) -> None:
    """Check a draft and configure it.

    Args:
        config: Arguments of `SpeculativeConfig`. Sets `method`, and `model` to a copy
            in safetensors if the draft is stored as `.bin`.

    Raises:
        ConfigError: As `check_draft`, or the copy cannot be written.
    """
    from vllm_tide.draft.config import DraftError, bin_files
    from vllm_tide.draft.converted import converted_directory

    model, revision = config["model"], config.get("revision")
    given = config.get("method"), config.get("num_speculative_tokens")
    config["method"], folder = check_draft(model, revision, target, *given)
    if not bin_files(folder):
        return
    try:
        config["model"] = str(converted_directory(folder))
    except DraftError as error:
        raise ConfigError(f"model: draft {model!r} cannot be used: {error}") from None
    message = "vllm_tide: the draft %s is stored as .bin; serving its copy in %s"
    logger.info(message, model, config["model"])


def check_draft(
    model: str,
    revision: str | None,
    target: Any,
    method: str | None = None,
    depth: int | None = None,
) -> tuple[str, Path]:
    """Check the configuration and the tensor shapes of a draft against the target.

    Args:
        model: Directory or hub name of the draft.
        method: vLLM's name of the kind; None: the draft's.
        depth: num_speculative_tokens, if known.

    Returns:
        The draft's `method` and its directory.

    Raises:
        ConfigError: It does not fit the target, or its files cannot be used.
    """
    from vllm_tide.draft.config import DraftError, read_config

    folder = _find(model, revision)
    try:
        draft = read_config(folder)
    except DraftError as error:
        raise ConfigError(f"model: {error}") from None
    _check_fit(model, draft, target)
    kind = _check_kind(model, draft, method, depth)
    _check_sizes(model, folder, draft, target)
    return kind, folder


def _find(model: str, revision: str | None) -> Path:
    """Return a draft's directory, with its weights if the hub has them."""
    from transformers.utils.hub import cached_file

    from vllm_tide.draft.config import BIN
    from vllm_tide.engine.facts import WEIGHTS, weights_dir

    folder = Path(os.path.expanduser(model))
    if (folder / "config.json").is_file():
        return folder
    try:
        if folder.is_dir():
            raise FileNotFoundError
        folder = Path(cached_file(model, "config.json", revision=revision)).parent
    except (OSError, ValueError):
        raise ConfigError(
            f"model: no draft at {model!r}: neither a directory with config.json nor "
            "a model on the hub or in its local cache."
        ) from None
    # vLLM gives the cause if they cannot be downloaded.
    with contextlib.suppress(OSError, ValueError):
        folder = weights_dir(model, revision)
        if not any(folder.glob(WEIGHTS)):
            folder = weights_dir(model, revision, BIN)
    return folder


def _check_fit(model: str, draft: dict[str, Any], target: Any) -> None:
    layer = draft.get("transformer_layer_config")
    text = layer if isinstance(layer, dict) else draft
    hidden, vocab = target.get_hidden_size(), target.get_vocab_size()
    layers = target.get_total_num_hidden_layers()
    width = "target_hidden_size" if "target_hidden_size" in draft else "hidden_size"
    tokens = f"the target's vocabulary has {vocab} tokens"
    pruned = draft.get("draft_vocab_size") or vocab
    for key, value, good, fact in (
        (
            width,
            draft.get("target_hidden_size", text.get("hidden_size")),
            [hidden],
            f"the target's hidden size is {hidden}",
        ),
        ("vocab_size", text.get("vocab_size"), [vocab], tokens),
        ("draft_vocab_size", pruned, range(1, vocab + 1), tokens),
    ):
        if not isinstance(value, int) or value not in good:
            raise ConfigError(
                f"model: draft {model!r} does not fit the target: its {key} is "
                f"{value!r:.40}, but {fact}; use a draft trained for this target."
            )
    ids = draft.get("eagle_aux_hidden_state_layer_ids")
    if ids is None:
        return
    if not (
        isinstance(ids, list)
        and ids
        and all(isinstance(i, int) and 0 <= i <= layers for i in ids)
        and len(set(ids)) == len(ids)
    ):
        raise ConfigError(
            f"model: eagle_aux_hidden_state_layer_ids of {model!r} is {ids!r:.80}, but "
            f"the target has {layers} layers; the ids must be distinct and in "
            f"0..{layers}."
        )


def _check_kind(
    model: str, draft: dict[str, Any], method: str | None, depth: int | None
) -> str:
    """Return vLLM's `method` for a draft; compare it with the configured one."""
    from vllm_tide.draft.kind import method_of

    kind = method_of(draft)
    if method is not None and method != kind:
        raise ConfigError(
            f"method: {method!r}, but the draft {model!r} is of the kind {kind!r}; set "
            f"it to {kind!r}, or leave it out."
        )
    block = draft.get("block_size")
    if type(block) is int and type(depth) is int and 2 <= block <= depth:
        raise ConfigError(
            f"num_speculative_tokens: {depth}, but the draft {model!r} was trained for "
            f"blocks of {block} tokens, of which one is known; set at most {block - 1}."
        )
    return kind


def _check_sizes(model: str, folder: Path, draft: dict[str, Any], target: Any) -> None:
    """Compare the configured sizes with the headers of the tensors on this machine."""
    from vllm_tide.draft.checkpoint import check_shapes, stored_shapes
    from vllm_tide.draft.config import DraftError, UnsupportedDraft
    from vllm_tide.draft.kind import canonical, draft_config, method_of

    layers = {"num_hidden_layers": target.get_total_num_hidden_layers()}
    try:
        stored = canonical(stored_shapes(folder))
        config = draft_config(draft, layers)
        check_shapes(config, stored)
        missing = sorted(config.parameter_shapes().keys() - stored)
        if stored and missing:  # without tensors they are in another format
            raise DraftError(f"missing {missing[0]}.")
    except UnsupportedDraft as error:
        if method_of(draft) != METHODS[0]:
            text = f"model: draft {model!r} cannot be used: {error}"
            raise ConfigError(text) from None
        # Other drafts that vLLM serves may have it quantised, or another name for it.
        whole = draft.get("num_hidden_layers") == layers["num_hidden_layers"]
        if stored and whole and not any(name.startswith("fc.") for name in stored):
            raise ConfigError(
                f"model: {model!r} is no EAGLE-3 draft: it has no fc.weight; use a "
                f"draft trained for this target, or {FRESH!r}."
            ) from None
        return  # vLLM may support it; the trainer reports why it does not
    except DraftError as error:
        raise ConfigError(
            f"model: draft {model!r} cannot be used: {error} Use another draft, or "
            "repair its files."
        ) from None
    if config.method != METHODS[0]:
        _check_block_draft(model, folder, config, target)
    if max(config.aux_layer_ids) > layers["num_hidden_layers"]:
        raise ConfigError(
            f"model: draft {model!r} reads layer {max(config.aux_layer_ids)}, but the "
            f"target has {layers['num_hidden_layers']}; use a draft trained for it."
        )


def _check_block_draft(model: str, folder: Path, config: Any, target: Any) -> None:
    """Check what vLLM does not check of a draft that drafts blocks."""
    longest = getattr(target, "max_model_len", None)
    if longest is not None and config.max_position_embeddings < longest:
        raise ConfigError(
            f"model: draft {model!r} has {config.max_position_embeddings} positions, "
            f"and --max-model-len is {longest}; lower it, or use another draft."
        )
    if (folder / "mask_embedding.pt").exists():
        raise ConfigError(
            f"model: draft {model!r} has a mask_embedding.pt, which tide cannot train; "
            "use another draft, or remove the tide section."
        )
