"""The Grafana dashboard and the Prometheus rules that ship with the package.

Panels are declared once (`serving.py`: what engines report; `learning.py`: what the
trainer reports) and become JSON in `grafana.py`: a change of a query is one line of a
diff, where a dashboard's JSON would be a hundred. The rules are a plain file,
`alerts.yml`, which Prometheus' own tools read and test. Nothing here is imported by a
server.
"""

from __future__ import annotations

from importlib.resources import files

from vllm_tide.dashboards.grafana import dashboard_text

DASHBOARD = "vllm_tide.json"
ALERTS = "alerts.yml"


def contents() -> dict[str, str]:
    """Every file of `vllm-tide dashboards export`: name to text."""
    alerts = files("vllm_tide.dashboards").joinpath(ALERTS).read_text("utf-8")
    return {DASHBOARD: dashboard_text(), ALERTS: alerts}
