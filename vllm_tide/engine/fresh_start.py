"""`"model": "fresh"`: a head of our own making, before vLLM looks for a draft."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from vllm_tide.config import ConfigError, TideConfig

if TYPE_CHECKING:
    from pathlib import Path

logger = logging.getLogger("vllm.tide")


def use_fresh_head(config: dict[str, Any], tide: TideConfig, target: Any) -> None:
    """Build a head for the target (or take it from the cache) and configure it.

    An untrained head drafts badly: under the policy `adaspec`, which is the default,
    nothing is drafted until it pays.

    Args:
        config: The dictionary that `SpeculativeConfig` will be made from; gets `model`
            and `method`.
        tide: Its `tide` section, parsed.
        target: vLLM's `ModelConfig` of the target.

    Raises:
        ConfigError: No head can be built for this target.
    """
    folder = _head(tide, target)
    config["model"] = str(folder)
    config["method"] = "eagle3"
    logger.info(
        "tide: serving a fresh head from %s under policy %r",
        folder,
        tide.control.policy,
    )


def _head(tide: TideConfig, target: Any) -> Path:
    from vllm_tide.draft.config import DraftError
    from vllm_tide.draft.fresh import fresh_directory
    from vllm_tide.engine.draft_facts import weights_dir

    try:
        where = weights_dir(target.model, target.revision)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model: a fresh head needs the target's weights and {target.model!r} is "
            f"not to be had ({type(error).__name__}); fetch it first."
        ) from None
    try:
        return fresh_directory(where, tide.fresh, target.dtype)
    except DraftError as error:
        raise ConfigError(
            f"model: no fresh head can be built for {target.model!r}: {error}"
        ) from None
