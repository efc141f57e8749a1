"""The live check of the alerts: what it plants, and the rules it loads."""

from __future__ import annotations

import re
import sys

import pytest
import yaml

from tests.dashboards.test_alerts import FILE, NAMES, RULES
from tests.dashboards.test_prometheus import ROOT

pytest.importorskip("torch")  # the planted heads are tensors
sys.path.insert(0, str(ROOT / "scripts" / "bench"))
import alerts_check  # noqa: E402


def test_every_alert_has_a_live_fault():
    planted = [name for _, _, names, *_ in alerts_check.PLANTS for name in names]
    assert sorted(planted) == sorted(NAMES)


def test_a_minute_is_a_second_and_nothing_else_changes():
    groups = yaml.safe_load(alerts_check.scaled(FILE.read_text("utf-8")))["groups"]
    rules = {rule["alert"]: rule for group in groups for rule in group["rules"]}
    for rule in RULES:
        short = rules[rule["alert"]]
        assert not re.search(r"\d[mhd]\b", short["expr"] + short.get("for", ""))
        for key, text in (rule | {"labels": "", "annotations": ""}).items():
            number = r"\b[\d.]+[smhd]?\b"
            new = re.sub(number, "N", short[key]) if text else text
            assert new == re.sub(number, "N", text)
    assert rules["TideTrainerGone"]["for"] == "5s"
    assert "total[30s]) > 682.6" in rules["TideTrainerStalled"]["expr"]
    assert "total[15s])) > 10" in rules["TideLimitMissed"]["expr"]
