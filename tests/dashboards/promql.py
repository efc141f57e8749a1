"""Expressions of the boards: their samples, with Grafana's variables filled in."""

from __future__ import annotations

import re

_VARIABLE = re.compile(r"\$(\w+)")
_METRIC = re.compile(r"\b((?:vllm|vllm_tide):\w+|process_\w+)")


def filled(expr: str, **values: str) -> str:
    """Return an expression as Grafana would send it.

    Args:
        expr: PromQL with variables.
        values: Value of each variable; selections not given match all.

    Raises:
        KeyError: A variable has no value.
    """
    names = ("job", "model_name", "instance", "engine")
    known = dict.fromkeys(names, ".*") | values
    return _VARIABLE.sub(lambda match: known[match.group(1)], expr)


def metrics_in(expr: str) -> set[str]:
    """Return the names of the samples that an expression reads."""
    return set(_METRIC.findall(expr))
