"""JSON with one entry per line, for small files and readable diffs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def json_text(data: Mapping[str, Any]) -> str:
    """Return `data` as JSON, with line breaks in the two outer levels only.

    Raises:
        ValueError: A number is not finite.
    """
    parts = [f"{json.dumps(key)}: {_lines(value)}" for key, value in data.items()]
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _lines(value: Any) -> str:
    if isinstance(value, list) and value:
        return "[\n" + ",\n".join(f" {_compact(entry)}" for entry in value) + "\n]"
    if isinstance(value, Mapping) and value:
        lines = (f" {json.dumps(k)}: {_compact(v)}" for k, v in value.items())
        return "{\n" + ",\n".join(lines) + "\n}"
    return _compact(value)


def _compact(value: Any) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":"))
