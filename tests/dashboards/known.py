"""Names of the samples that a server and a trainer expose."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from tests.dashboards.promql import metrics_in
from vllm_tide.metrics import ENGINE, INFO, PREFIX, TRAINER, Metric

# vLLM 0.32: attribute that makes a metric -> endings of its samples
_ENDINGS = {
    "_counter_cls": ("_total",),
    "_gauge_cls": ("",),
    "_histogram_cls": ("_bucket", "_sum", "_count"),
}


def samples_of(metric: Metric) -> list[str]:
    """Return names of a metric's samples on `/metrics`."""
    endings = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}
    return [PREFIX + metric.name + end for end in endings.get(metric.kind, [""])]


def of_serving() -> set[str]:
    return {name for metric in (INFO, *ENGINE) for name in samples_of(metric)}


def of_training() -> set[str]:
    return {name for metric in TRAINER for name in samples_of(metric)}


@cache
def of_vllm() -> set[str] | None:
    """Return names from vLLM's source, without an import; None if not installed."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return None
    v1 = Path(spec.origin).parent / "v1"
    result = set()
    for node in _nodes(v1 / "metrics/loggers.py"):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            endings = _ENDINGS.get(node.func.attr, ())
            names = [
                keyword.value for keyword in node.keywords if keyword.arg == "name"
            ]
            result |= {name + end for name in _texts(names) for end in endings}
    # All of these are counters, with names from a table.
    return result | _totals(_texts(_nodes(v1 / "spec_decode/metrics.py")))


def missing(expr: str) -> set[str]:
    """Return samples that an expression reads without a known exporter."""
    ours, theirs = of_serving() | of_training(), of_vllm()
    absent = metrics_in(expr) - ours - (theirs or set())
    return absent if theirs else {n for n in absent if n.startswith("vllm_tide:")}


def _nodes(path: Path) -> Iterator[ast.AST]:
    return ast.walk(ast.parse(path.read_text(encoding="utf-8")))


def _texts(nodes: Iterable[ast.AST]) -> set[str]:
    """Return names of metrics among constants."""
    texts = {str(node.value) for node in nodes if isinstance(node, ast.Constant)}
    return {text for text in texts if re.fullmatch(r"vllm:\w+", text)}


def _totals(names: Iterable[str]) -> set[str]:
    return {f"{name}_total" for name in names}
