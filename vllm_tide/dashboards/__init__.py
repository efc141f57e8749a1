"""The Grafana dashboard and the Prometheus rules, as data of the package."""

from __future__ import annotations

from importlib.resources import files

DASHBOARD = "vllm_tide.json"
ALERTS = "alerts.yml"


def contents() -> dict[str, str]:
    """Text of every file of `vllm-tide dashboards export`, by name."""
    here = files("vllm_tide.dashboards")
    return {name: (here / name).read_text("utf-8") for name in (DASHBOARD, ALERTS)}
