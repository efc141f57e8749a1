"""Building blocks of the panels' PromQL, and what fills Grafana's variables.

Engines are told apart by `model_name` and `engine`, trainers by `model_name` and the
`instance` they were scraped from.
"""

from __future__ import annotations

import re

ENGINE = 'model_name=~"$model_name", engine=~"$engine"'
TRAINER = 'model_name=~"$model_name", instance=~"$trainer"'
WINDOW = "$__rate_interval"
EACH = "{{model_name}}/{{engine}}"
"""Legend of a series per engine."""
BATCH_BANDS = ((1, 4), (4, 8), (8, 16), (16, 32), (32, None))
"""Running requests, from and below, that chosen lengths are averaged over."""

_VARIABLE = re.compile(r"\$(\w+)")
_METRIC = re.compile(r"\b((?:vllm|vllm_tide):\w+|process_\w+)")


def of_engine(name: str, where: str = "") -> str:
    """An engine's series as they are.

    Args:
        name: Metric.
        where: Further matchers.
    """
    return f"{name}{{{ENGINE}{where and ', ' + where}}}"


def per_engine(name: str, *labels: str, where: str = "") -> str:
    """An engine's counter, per second.

    Args:
        name: Counter.
        labels: Labels kept beside model and engine.
        where: Further matchers.
    """
    kept = ", ".join(("model_name", "engine", *labels))
    return f"sum by ({kept}) (rate({of_engine(name, where)}[{WINDOW}]))"


def of_trainer(name: str) -> str:
    """A trainer's series as they are."""
    return f"{name}{{{TRAINER}}}"


def per_trainer(name: str) -> str:
    """A trainer's counter, per second."""
    return f"rate({of_trainer(name)}[{WINDOW}])"


def happened(series: str) -> str:
    """Whole events of a counter within the window."""
    return f"round(increase({series}[{WINDOW}]))"


def quantile(share: float, histogram: str) -> str:
    """A quantile of an engine's histogram."""
    return f"histogram_quantile({share}, {per_engine(histogram + '_bucket', 'le')})"


def by_batch(gauge: str) -> str:
    """A gauge's mean over the shown range, apart by how many requests ran.

    One expression for all bands, so that it has data as soon as one of them has.
    """
    running = of_engine("vllm:num_requests_running")
    bands = []
    for low, high in BATCH_BANDS:
        below = f" < {high}" if high else ""
        name = f"{low} to {high - 1}" if high else f"{low} and more"
        mean = (
            f"avg_over_time(({of_engine(gauge)} and {running} >= {low}{below})"
            "[$__range:15s])"
        )
        bands.append(f'label_replace({mean}, "batch", "{name}", "", "")')
    return " or ".join(bands)


def filled(expr: str, **values: str) -> str:
    """An expression as Grafana would send it.

    Args:
        expr: PromQL with variables.
        values: Value of each variable; selections not given match all.

    Raises:
        KeyError: A variable has no value.
    """
    known = {"model_name": ".*", "engine": ".*", "trainer": ".*"} | values
    return _VARIABLE.sub(lambda match: known[match.group(1)], expr)


def metrics_in(expr: str) -> set[str]:
    """Names of the samples that an expression reads."""
    return set(_METRIC.findall(expr))
