"""JSON with one entry a line: small in the repository, and still a readable diff."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def json_text(data: Mapping[str, Any]) -> str:
    """`data` with its lists and objects opened one level, the rest without spaces.

    Raises:
        ValueError: A number is not finite.
    """
    parts = [f"{json.dumps(key)}: {_opened(value)}" for key, value in data.items()]
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _opened(value: Any) -> str:
    if isinstance(value, list) and value:
        return "[\n" + ",\n".join(f" {_closed(entry)}" for entry in value) + "\n]"
    if isinstance(value, Mapping) and value:
        lines = (f" {json.dumps(k)}: {_closed(v)}" for k, v in value.items())
        return "{\n" + ",\n".join(lines) + "\n}"
    return _closed(value)


def _closed(value: Any) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":"))
