"""What a panel is, without Grafana's words for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["timeseries", "stat", "bargauge"]


@dataclass(frozen=True, slots=True)
class Query:
    """One expression of a panel.

    Attributes:
        expr: PromQL with the dashboard's variables.
        legend: Name of its series; `{{label}}` is replaced.
        unit: Unit of its own on the right axis; None shares the panel's.
        bars: Drawn as bars: something that happened, not something that is.
    """

    expr: str
    legend: str
    unit: str | None = None
    bars: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel.

    Attributes:
        title: Names it; unique in the dashboard.
        description: What is seen, and what a bad picture looks like.
        unit: Grafana's unit id (`none`, `s`, `percentunit`, ...).
        queries: At most 26.
        kind: `stat` and `bargauge` show the newest values only.
        width: Columns, of 24.
        stacked: Series are parts of a whole.
        steps: Values hold until the next one (versions, states).
        decimals: Digits after the point; None leaves it to Grafana.
    """

    title: str
    description: str
    unit: str
    queries: tuple[Query, ...]
    kind: Kind = "timeseries"
    width: int = 8
    stacked: bool = False
    steps: bool = False
    decimals: int | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """A titled group of panels."""

    title: str
    panels: tuple[Panel, ...]
