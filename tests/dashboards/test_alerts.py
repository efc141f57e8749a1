"""Each alert fires on its planted fault, and not on healthy series."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path

import pytest
import yaml

from tests.dashboards import known, plants
from tests.dashboards.promql import metrics_in
from tests.dashboards.promtool import needs_promtool, promtool
from vllm_tide.dashboards import ALERTS, BOARDS, RUNBOOKS, contents

FILE = Path(str(files("vllm_tide.dashboards").joinpath(ALERTS)))
RULES = [
    rule
    for group in yaml.safe_load(FILE.read_text(encoding="utf-8"))["groups"]
    for rule in group["rules"]
]
NAMES = [rule["alert"] for rule in RULES]


def check_fired(folder: Path, series: plants.Series, expected: Iterable[str]) -> None:
    """Run promtool and return the alerts that fired at any time."""
    fired = 'group by (alertname) (max_over_time(ALERTS{alertstate="firing"}[8h]))'
    samples = [
        {"labels": f'{{alertname="{name}"}}', "value": 1} for name in sorted(expected)
    ]
    test = {
        "interval": "1m",
        "input_series": [
            {"series": name, "values": plants.values(value)}
            for name, value in series.items()
        ],
        "promql_expr_test": [
            {"expr": fired, "eval_time": "8h", "exp_samples": samples},
        ],
    }
    promtool(
        folder,
        "test",
        {
            "rule_files": [str(FILE)],
            "evaluation_interval": "5m",
            "tests": [test],
        },
    )


def test_every_alert_has_a_plant():
    assert sorted(plants.PLANTS) == sorted(NAMES)
    assert len(set(NAMES)) == len(NAMES)


@pytest.mark.parametrize("rule", RULES, ids=NAMES)
def test_an_alert_has_a_summary_and_an_action(rule):
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    notes = dict(rule["annotations"])
    assert notes.pop("runbook_url") == f"{RUNBOOKS}#{rule['alert'].lower()}"
    assert set(notes) == {"summary", "description", "action"}
    assert all(text.endswith(".") for text in notes.values())
    assert metrics_in(rule["expr"]) and not known.missing(rule["expr"])


def test_panels_of_an_alert_exist_and_each_alert_has_a_runbook():
    # A heading's anchor is its text in small letters.
    headings = re.findall(r"^## (\w+)$", contents()[RUNBOOKS], flags=re.MULTILINE)
    assert headings == NAMES
    titles = {
        panel["title"]
        for name in BOARDS
        for panel in json.loads(contents()[name])["panels"]
    }
    named = re.findall(r'panel "([^"]+)"', FILE.read_text(encoding="utf-8"))
    assert named and set(named) <= titles


@needs_promtool
def test_promtool_accepts_the_rules(tmp_path):
    document = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    assert f"{len(RULES)} rules found" in promtool(tmp_path, "check", document)


@needs_promtool
@pytest.mark.parametrize("name", NAMES)
def test_alert_fires_on_its_fault(name, tmp_path):
    planted, others = plants.PLANTS[name]
    check_fired(tmp_path, {**plants.HEALTHY, **planted}, {name, *others})


@needs_promtool
def test_a_growing_loss_is_divergence_too(tmp_path):
    loss = {plants.trainer("loss"): plants.gauge(1.5, 6)}
    check_fired(tmp_path, {**plants.HEALTHY, **loss}, {"TideTrainerDiverged"})


@needs_promtool
@pytest.mark.parametrize("name", plants.SILENT)
def test_nothing_fires_on_healthy_series(name, tmp_path):
    check_fired(tmp_path, plants.SILENT[name], ())
