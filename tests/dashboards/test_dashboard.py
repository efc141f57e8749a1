"""The boards are valid for Grafana, and query existing metrics."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.dashboards import known
from tests.dashboards.promql import filled, metrics_in
from tests.dashboards.promtool import needs_promtool, promtool
from vllm_tide.dashboards import BOARDS, contents

BOARD = {name: json.loads(contents()[name]) for name in BOARDS}
PANELS = {
    name: [panel for panel in board["panels"] if panel["type"] != "row"]
    for name, board in BOARD.items()
}
EXPRESSIONS = [
    (f"{name} {panel['title']} {target['refId']}", target["expr"])
    for name, panels in PANELS.items()
    for panel in panels
    for target in panel["targets"]
] + [
    (f"{name} {item['name']}", item["expr"])
    for name, board in BOARD.items()
    for item in board["annotations"]["list"]
]
GRAFANAS_OWN = {"__rate_interval", "__range", "__all"}
# Of vLLM's own boards (main, after 0.32): they find each other by tag and link, and
# pass on the selection.
VARIABLES = ["datasource", "job", "model_name", "instance", "engine", "filters"]
on_each_board = pytest.mark.parametrize("name", BOARDS)


def datasources(node: Any) -> Iterator[Any]:
    if isinstance(node, dict):
        if "datasource" in node:
            yield node["datasource"]
        for value in node.values():
            yield from datasources(value)
    elif isinstance(node, list):
        for value in node:
            yield from datasources(value)


@on_each_board
def test_a_board_has_vllms_tag_links_and_variables(name):
    text = contents()[name]
    assert json.dumps(BOARD[name], indent=2) + "\n" == text
    assert text.isascii()
    board = BOARD[name]
    assert board["title"].startswith("vLLM / TIDE: ")
    assert (board["tags"], board["schemaVersion"], board["id"]) == (["vllm"], 39, None)
    assert re.fullmatch(r"vllm-tide-[a-z]{1,30}", board["uid"])
    (link,) = board["links"]
    assert (link["type"], link["tags"]) == ("dashboards", ["vllm"])
    assert link["includeVars"] and link["keepTime"]
    kinds = {panel["type"] for panel in board["panels"]}
    assert kinds <= {"row", "stat", "timeseries", "bargauge"}
    ids = [panel["id"] for panel in BOARD[name]["panels"]]
    titles = [panel["title"] for panel in BOARD[name]["panels"]]
    assert len(set(ids)) == len(ids)
    assert len(set(titles)) == len(titles)
    assert all(panel["description"].endswith(".") for panel in PANELS[name])
    sources = list(datasources(BOARD[name]))
    assert len(sources) > len(PANELS[name])
    assert all(one == {"type": "prometheus", "uid": "${datasource}"} for one in sources)


@on_each_board
def test_every_panel_has_a_unit_and_thresholds(name):
    for panel in PANELS[name]:
        defaults = panel["fieldConfig"]["defaults"]
        assert defaults["unit"] not in ("", "none"), panel["title"]
        steps = defaults["thresholds"]["steps"]
        values = [step["value"] for step in steps]
        assert values[0] is None and values[1:] == sorted(values[1:])
        for override in panel["fieldConfig"]["overrides"]:
            units = [p["value"] for p in override["properties"] if p["id"] == "unit"]
            assert "none" not in units
        if panel["type"] == "stat":
            assert defaults["color"]["mode"] == "thresholds"
            assert defaults["noValue"]  # no traffic is no error
        if panel["type"] == "timeseries":
            drawn = defaults["custom"]["thresholdsStyle"]["mode"] != "off"
            assert drawn == (len(steps) > 1), panel["title"]


@on_each_board
def test_variables_are_declared_before_they_are_used(name):
    variables = BOARD[name]["templating"]["list"]
    assert [variable["name"] for variable in variables] == VARIABLES
    used = re.findall(r"\$\{?(\w+)", contents()[name])
    assert set(used) <= {*VARIABLES, *GRAFANAS_OWN}
    # Values of one another: in the order of the list. From a metric of every vLLM, so
    # that a replica without tide can be selected together with one with it.
    for place, variable in enumerate(variables):
        if definition := variable.get("definition"):
            assert definition.startswith("label_values(vllm:num_requests_running")
            assert re.findall(r"\$(\w+)", definition) == VARIABLES[1:place]


@pytest.mark.parametrize(("name", "expr"), EXPRESSIONS)
def test_an_expression_reads_known_metrics_and_follows_the_selection(name, expr):
    assert metrics_in(expr) and not known.missing(expr)
    ours = re.findall(r"((?:vllm|vllm_tide):\w+)(\{[^}]*\})?", expr)
    for metric, matchers in ours:
        # A trainer has a separate instance, and no engine.
        training = metric.startswith("vllm_tide:trainer_")
        for variable in VARIABLES[1 : 3 if training else 5]:
            assert f'{variable}=~"${variable}"' in matchers, metric
    # It merges no replicas; `by` would also drop labels that an operator's Prometheus
    # adds (pod, namespace).
    assert not re.search(r"\bby\b|\bon\b", expr)
    dropped = re.findall(r"\bwithout \(([^)]*)\)", expr)
    assert not {"job", "instance", "model_name", "engine"}.intersection(dropped)
    assert len(dropped) == len(re.findall(r"\b(?:sum|avg|max|min|count) ", expr))


def test_every_metric_is_shown():
    shown = set().union(*(metrics_in(expr) for _, expr in EXPRESSIONS))
    # Shown in another form: vLLM counts the same tokens for every policy.
    excluded = {
        "vllm_tide:draft_passes_total",
        "vllm_tide:verified_tokens_total",
        "vllm_tide:accepted_tokens_total",
        "vllm_tide:swap_seconds_bucket",
    }
    assert (known.of_serving() | known.of_training()) - shown == excluded


@needs_promtool
def test_promtool_parses_every_expression(tmp_path):
    rules = [
        {
            "record": f"panel:{place}",
            "expr": filled(expr, __rate_interval="1m", __range="1h"),
        }
        for place, (_, expr) in enumerate(EXPRESSIONS)
    ]
    output = promtool(
        tmp_path, "check", {"groups": [{"name": "panels", "rules": rules}]}
    )
    assert f"{len(EXPRESSIONS)} rules found" in output
