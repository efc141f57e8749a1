"""Expressions of the boards: what they read, and Grafana's variables filled in."""

from __future__ import annotations

import re

_VARIABLE = re.compile(r"\$(\w+)")
_METRIC = re.compile(r"\b((?:vllm|vllm_tide):\w+|process_\w+)")


def filled(expr: str, **values: str) -> str:
    """An expression as Grafana would send it.

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
    """Names of the samples that an expression reads."""
    return set(_METRIC.findall(expr))
