"""Plugin of vLLM that rejects a `tide` section if vLLM is not patched.

Every process of vLLM loads it, so it imports only small modules.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable
from typing import Any

SENTENCE = "this vLLM is not patched for tide: run `vllm-tide patch apply`."
FILE_SENTENCE = (
    "unpatched vLLM reads no file here: run `vllm-tide patch apply`, or, without tide, "
    "pass the JSON itself."
)


def announce() -> None:
    """Make an unpatched vLLM reject a `tide` section, or a file, in a sentence."""
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
        result = made(value)
    except argparse.ArgumentTypeError:
        with contextlib.suppress(OSError, ValueError), open(value) as file:
            if "num_speculative_tokens" in file.read(1 << 20):
                raise argparse.ArgumentTypeError(FILE_SENTENCE) from None
        raise
    if isinstance(result, dict) and "tide" in result:
        raise argparse.ArgumentTypeError(SENTENCE)
    return result
