"""Grafana's JSON (schema 38, Grafana 10 and later) from the declared panels."""

from __future__ import annotations

import json
from typing import Any

from vllm_tide.dashboards import learning, serving
from vllm_tide.dashboards.panel import Kind, Panel, Query
from vllm_tide.dashboards.promql import of_engine, of_trainer

Json = dict[str, Any]

SCHEMA_VERSION = 38
COLUMNS = 24
HEIGHT: dict[Kind, int] = {"timeseries": 8, "stat": 4, "bargauge": 8}
ROW_HEIGHT = 1
SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def dashboard_text() -> str:
    """The dashboard as a file, the same bytes every time."""
    return json.dumps(dashboard(), indent=2) + "\n"


def dashboard() -> Json:
    """The dashboard that Grafana imports."""
    return {
        "id": None,
        "uid": "vllm-tide",
        "title": "vllm_tide",
        "description": "Speculative decoding whose draft learns while it serves.",
        "tags": ["vllm", "vllm_tide"],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "fiscalYearStartMonth": 0,
        "liveNow": False,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timepicker": {},
        "timezone": "",
        "weekStart": "",
        "links": [],
        "annotations": {"list": _annotations()},
        "templating": {"list": _variables()},
        "panels": _panels(),
    }


def _panels() -> list[Json]:
    panels: list[Json] = []
    top = 0
    for row in (*serving.ROWS, *learning.ROWS):
        place = {"x": 0, "y": top, "w": COLUMNS, "h": ROW_HEIGHT}
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": row.title,
                "collapsed": False,
                "gridPos": place,
                "panels": [],
            }
        )
        top += ROW_HEIGHT
        left = height = 0
        for panel in row.panels:
            if left + panel.width > COLUMNS:
                top, left, height = top + height, 0, 0
            place = {"x": left, "y": top, "w": panel.width, "h": HEIGHT[panel.kind]}
            panels.append({"id": len(panels) + 1, "gridPos": place} | _panel(panel))
            left += panel.width
            height = max(height, HEIGHT[panel.kind])
        top += height
    return panels


def _panel(panel: Panel) -> Json:
    defaults: Json = {
        "unit": panel.unit,
        "color": {"mode": "palette-classic"},
        "mappings": [],
        "thresholds": {
            "mode": "absolute",
            "steps": [{"color": "green", "value": None}],
        },
        "custom": _style(panel) if panel.kind == "timeseries" else {},
    }
    if panel.decimals is not None:
        defaults["decimals"] = panel.decimals
    if panel.kind != "stat":
        defaults["min"] = 0
    named = list(zip("ABCDEFGHIJKLMNOPQRSTUVWXYZ", panel.queries, strict=False))
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": SOURCE,
        "targets": [_target(ref, query, panel.kind) for ref, query in named],
        "fieldConfig": {
            "defaults": defaults,
            "overrides": [
                override for ref, query in named for override in _override(ref, query)
            ],
        },
        "options": _options(panel.kind),
        "transformations": [],
    }


def _target(ref: str, query: Query, kind: Kind) -> Json:
    newest = kind != "timeseries"
    return {
        "refId": ref,
        "datasource": SOURCE,
        "editorMode": "code",
        "expr": query.expr,
        "legendFormat": query.legend,
        "range": not newest,
        "instant": newest,
    }


def _override(ref: str, query: Query) -> list[Json]:
    properties: list[Json] = []
    if query.unit is not None:
        properties.append({"id": "custom.axisPlacement", "value": "right"})
        properties.append({"id": "unit", "value": query.unit})
    if query.bars:
        properties.append({"id": "custom.drawStyle", "value": "bars"})
        properties.append({"id": "custom.fillOpacity", "value": 60})
    if not properties:
        return []
    return [
        {"matcher": {"id": "byFrameRefID", "options": ref}, "properties": properties}
    ]


def _style(panel: Panel) -> Json:
    return {
        "drawStyle": "line",
        "lineInterpolation": "stepAfter" if panel.steps else "linear",
        "lineWidth": 1,
        "fillOpacity": 30 if panel.stacked else 0,
        "showPoints": "auto",
        "spanNulls": False,
        "axisPlacement": "auto",
        "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
    }


def _options(kind: Kind) -> Json:
    if kind == "timeseries":
        return {
            "legend": {
                "showLegend": True,
                "displayMode": "list",
                "placement": "bottom",
                "calcs": [],
            },
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    options: Json = {
        "orientation": "horizontal" if kind == "bargauge" else "auto",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
    }
    if kind == "bargauge":
        return options | {"displayMode": "basic", "showUnfilled": True}
    return options | {"colorMode": "none", "graphMode": "none", "textMode": "auto"}


def _variables() -> list[Json]:
    source = {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
        "current": {},
        "hide": 0,
        "includeAll": False,
        "multi": False,
        "options": [],
        "refresh": 1,
        "regex": "",
    }
    version = "vllm_tide:draft_version"
    cycles = "vllm_tide:trainer_cycles_total"
    of_model = '{model_name=~"$model_name"}'
    return [
        source,
        _variable("model_name", "Model", version, "model_name"),
        _variable("engine", "Engine", version + of_model, "engine"),
        _variable("trainer", "Trainer", cycles + of_model, "instance"),
    ]


def _variable(name: str, title: str, series: str, label: str) -> Json:
    query = f"label_values({series}, {label})"
    return {
        "name": name,
        "label": title,
        "type": "query",
        "datasource": SOURCE,
        "definition": query,
        "query": {"query": query, "refId": name},
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        "allValue": ".*",
        "hide": 0,
        "includeAll": True,
        "multi": True,
        "options": [],
        "refresh": 2,
        "regex": "",
        "sort": 1,
    }


def _annotations() -> list[Json]:
    swaps = f"changes({of_engine('vllm_tide:swaps_total')}[1m]) > 0"
    rollbacks = f"changes({of_trainer('vllm_tide:trainer_rollbacks_total')}[1m]) > 0"
    return [
        _annotation("Swaps", "blue", swaps, "{{model_name}}/{{engine}} swapped"),
        _annotation("Rollbacks", "red", rollbacks, "{{instance}} rolled back"),
    ]


def _annotation(name: str, color: str, expr: str, title: str) -> Json:
    return {
        "name": name,
        "datasource": SOURCE,
        "enable": True,
        "hide": False,
        "iconColor": color,
        "expr": expr,
        "step": "60s",
        "titleFormat": title,
    }
