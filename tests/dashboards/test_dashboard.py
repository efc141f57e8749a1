"""The dashboard is one that Grafana takes, and asks for what exists."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import combinations
from typing import Any

import pytest

from tests.dashboards import known
from tests.dashboards.promql import filled, metrics_in
from tests.dashboards.promtool import needs_promtool, promtool
from vllm_tide import dashboards

TEXT = dashboards.contents()[dashboards.DASHBOARD]
DASHBOARD = json.loads(TEXT)
COLUMNS = 24  # of Grafana's grid
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS = [
    (f"{panel['title']} {target['refId']}", target["expr"])
    for panel in PANELS
    for target in panel["targets"]
] + [(item["name"], item["expr"]) for item in DASHBOARD["annotations"]["list"]]
GRAFANAS_OWN = {"__rate_interval", "__range", "__all"}


def datasources(node: Any) -> Iterator[Any]:
    if isinstance(node, dict):
        if "datasource" in node:
            yield node["datasource"]
        for value in node.values():
            yield from datasources(value)
    elif isinstance(node, list):
        for value in node:
            yield from datasources(value)


def test_text_is_laid_out_as_a_diff_wants_it():
    assert json.dumps(DASHBOARD, indent=2) + "\n" == TEXT
    assert TEXT.isascii()


def test_grafana_knows_the_schema():
    # 38 came with Grafana 10.0; a newer Grafana migrates it.
    assert DASHBOARD["schemaVersion"] == 38
    assert DASHBOARD["id"] is None
    assert re.fullmatch(r"[a-zA-Z0-9_-]{1,40}", DASHBOARD["uid"])
    kinds = {panel["type"] for panel in DASHBOARD["panels"]}
    assert kinds == {"row", "stat", "timeseries", "bargauge"}


def test_panel_ids_and_titles_are_unique():
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    titles = [panel["title"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    assert len(set(titles)) == len(titles)
    assert all(panel["description"].endswith(".") for panel in PANELS)


def test_panels_lie_on_the_grid_and_on_no_other():
    places = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    for place in places:
        assert place["x"] >= 0 and place["w"] > 0 and place["h"] > 0
        assert place["x"] + place["w"] <= COLUMNS
    for one, other in combinations(places, 2):
        apart = (
            one["x"] + one["w"] <= other["x"]
            or other["x"] + other["w"] <= one["x"]
            or one["y"] + one["h"] <= other["y"]
            or other["y"] + other["h"] <= one["y"]
        )
        assert apart, (one, other)


def test_queries_of_a_panel_have_letters_of_their_own():
    for panel in PANELS:
        refs = [target["refId"] for target in panel["targets"]]
        assert refs == list("ABCDEFGH"[: len(refs)])
        told = {
            item["matcher"]["options"] for item in panel["fieldConfig"]["overrides"]
        }
        assert told <= set(refs)


def test_the_data_source_is_always_the_variable():
    found = list(datasources(DASHBOARD))
    assert len(found) > len(PANELS)
    assert all(one == {"type": "prometheus", "uid": "${datasource}"} for one in found)


def test_variables_are_declared_before_they_are_used():
    names = [variable["name"] for variable in DASHBOARD["templating"]["list"]]
    assert names == ["datasource", "model_name", "engine", "trainer"]
    used = re.findall(r"\$\{?(\w+)", TEXT)
    assert set(used) <= {*names, *GRAFANAS_OWN}
    # Values of one another: in the order of the list.
    for place, variable in enumerate(DASHBOARD["templating"]["list"]):
        for name in re.findall(r"\$(\w+)", variable.get("definition", "")):
            assert name in names[:place]


@pytest.mark.parametrize(("name", "expr"), EXPRESSIONS)
def test_expression_reads_known_metrics_only(name, expr):
    read = metrics_in(expr)
    assert read
    ours = known.of_serving() | known.of_training()
    assert {one for one in read if one.startswith("vllm_tide:")} <= ours
    theirs = known.of_vllm()
    if theirs is not None:
        assert read <= ours | theirs


@pytest.mark.parametrize(("name", "expr"), EXPRESSIONS)
def test_expression_obeys_the_selection(name, expr):
    ours = re.findall(r"((?:vllm|vllm_tide):\w+)(\{[^}]*\})?", expr)
    for metric, matchers in ours:
        training = metric.startswith("vllm_tide:trainer_")
        for variable in ("model_name", "trainer" if training else "engine"):
            assert f'=~"${variable}"' in matchers, metric


def test_every_subject_is_shown():
    shown = set().union(*(metrics_in(expr) for _, expr in EXPRESSIONS))
    # Parts of what is shown otherwise: vLLM counts the same tokens for every policy.
    told_otherwise = {
        "vllm_tide:draft_steps_total",
        "vllm_tide:verified_tokens_total",
        "vllm_tide:accepted_tokens_total",
        "vllm_tide:swap_seconds_bucket",
        "vllm_tide:swap_seconds_sum",
        "vllm_tide:swap_seconds_count",
    }
    assert (known.of_serving() | known.of_training()) - shown == told_otherwise


@needs_promtool
def test_promtool_parses_every_expression(tmp_path):
    rules = [
        {
            "record": f"panel:{place}",
            "expr": filled(expr, __rate_interval="1m", __range="1h"),
        }
        for place, (_, expr) in enumerate(EXPRESSIONS)
    ]
    said = promtool(tmp_path, "check", {"groups": [{"name": "panels", "rules": rules}]})
    assert f"{len(EXPRESSIONS)} rules found" in said
