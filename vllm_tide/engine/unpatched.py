"""A general plugin of vLLM: an unpatched one that is given a `tide` section says so.

Loaded in every process of vLLM, so it imports nothing heavy.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable
from typing import Any

SENTENCE = "this vLLM is not patched for tide: run `vllm-tide patch apply`."


def announce() -> None:
    """Let an unpatched vLLM refuse a `tide` section or file in a sentence."""
    arguments: Any = sys.modules.get("vllm.engine.arg_utils")
    if arguments is None or hasattr(arguments, "_speculative_config_argument"):
        return
    optional_type = arguments.optional_type
    create = arguments.EngineArgs.create_speculative_config

    def checked_type(kind: Any) -> Any:
        made = optional_type(kind)
        return (lambda value: _checked(made, value)) if kind is json.loads else made

    def checked_create(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "tide" in (self.speculative_config or ()):
            raise ValueError(SENTENCE)
        return create(self, *args, **kwargs)

    arguments.optional_type = checked_type
    arguments.EngineArgs.create_speculative_config = checked_create


def _checked(made: Callable[[str], Any], value: str) -> Any:
    try:
        found = made(value)
    except argparse.ArgumentTypeError:
        with contextlib.suppress(OSError, ValueError), open(value) as file:
            if "tide" in file.read(1 << 20):
                raise argparse.ArgumentTypeError(SENTENCE) from None
        raise
    if isinstance(found, dict) and "tide" in found:
        raise argparse.ArgumentTypeError(SENTENCE)
    return found
