"""`vllm-tide dashboards export` writes the package's files and overwrites none."""

from __future__ import annotations

import json

import pytest
import yaml

from tests.dashboards.promtool import needs_promtool, promtool
from vllm_tide.cli.main import main
from vllm_tide.dashboards import ALERTS, BOARDS, contents


def export(folder, *argv: str) -> int:
    return main(["dashboards", "export", str(folder), *argv])


def rules(document) -> list[dict]:
    return [rule for group in document["groups"] for rule in group["rules"]]


def test_export_writes_every_file(tmp_path, capsys):
    folder = tmp_path / "new" / "folder"
    assert export(folder) == 0
    written = {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir()}
    assert written == contents()
    assert set(written) == {*BOARDS, ALERTS, "runbooks.md"}
    assert capsys.readouterr().out.count("written: ") == len(written)
    # As written, a runbook is a file next to the rules.
    for rule in rules(yaml.safe_load(written[ALERTS])):
        page, anchor = rule["annotations"]["runbook_url"].split("#")
        assert f"\n## {rule['alert']}\n" in written[page]
        assert anchor == rule["alert"].lower()


@pytest.mark.parametrize("base", ["https://wiki.example.com/tide", "{{x}}&é:b\\n"])
def test_runbooks_have_the_operators_address(tmp_path, base):
    assert export(tmp_path, "--runbooks", base) == 0
    text = (tmp_path / ALERTS).read_text(encoding="utf-8")
    for ours, theirs in zip(
        rules(yaml.safe_load(contents()[ALERTS])),
        rules(yaml.safe_load(text)),
        strict=True,
    ):
        assert theirs["annotations"].pop("runbook_url") == (
            f"{base}#{ours['alert'].lower()}"
        )
        del ours["annotations"]["runbook_url"]
        assert theirs == ours


def test_the_configmap_has_the_boards_in_grafanas_sidecar_format(tmp_path):
    assert export(tmp_path, "--format", "configmap") == 0
    (file,) = tmp_path.iterdir()
    made = yaml.safe_load(file.read_text(encoding="utf-8"))
    assert (made["apiVersion"], made["kind"]) == ("v1", "ConfigMap")
    assert made["metadata"]["labels"]["grafana_dashboard"] == "1"
    boards = {name: json.loads(text) for name, text in made["data"].items()}
    assert boards == {name: json.loads(contents()[name]) for name in BOARDS}
    # `kubectl apply` keeps a copy in an annotation, which holds so much.
    assert len(json.dumps(made)) < 262_144


@pytest.mark.parametrize("base", ["", "https://wiki.example.com/tide"])
def test_the_prometheusrule_has_the_rules(tmp_path, base):
    """Its runbooks are the operator's; it has no link to a file outside the export."""
    argv = ["--runbooks", base] if base else []
    assert export(tmp_path, "--format", "prometheusrule", *argv) == 0
    (file,) = tmp_path.iterdir()
    made = yaml.safe_load(file.read_text(encoding="utf-8"))
    assert made["apiVersion"] == "monitoring.coreos.com/v1"
    assert made["kind"] == "PrometheusRule"
    expected = rules(yaml.safe_load(contents()[ALERTS]))
    for rule in expected:
        del rule["annotations"]["runbook_url"]
        if base:
            url = f"{base}#{rule['alert'].lower()}"
            rule["annotations"]["runbook_url"] = url
    assert rules(made["spec"]) == expected


@needs_promtool
def test_promtool_accepts_the_spec_of_a_prometheusrule(tmp_path):
    assert export(tmp_path, "--format", "prometheusrule") == 0
    made = yaml.safe_load((tmp_path / "prometheusrule.yaml").read_text("utf-8"))
    output = promtool(tmp_path, "check", made["spec"])
    assert f"{len(rules(made['spec']))} rules found" in output


def test_export_overwrites_only_with_force(tmp_path, capsys):
    mine = tmp_path / "alerts.yml"
    mine.write_text("mine")
    assert export(tmp_path) == 2
    assert capsys.readouterr().err == (
        f"error: '{mine}' exists; give --force to overwrite it.\n"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["alerts.yml"]
    assert mine.read_text() == "mine"
    assert export(tmp_path, "--force") == 0
    assert mine.read_text(encoding="utf-8") == contents()["alerts.yml"]
