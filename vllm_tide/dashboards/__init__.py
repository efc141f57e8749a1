"""Grafana boards, Prometheus rules and their runbooks, as package data.

The boards complement vLLM's "vLLM / Speculative Decoding", with the same variables, tag
and link. Every query is per replica, except comparisons with a trainer's figures.
"""

from __future__ import annotations

import json
import re
from importlib.resources import files
from textwrap import indent

BOARDS = ("vllm_tide_learning.json", "vllm_tide_control.json")
ALERTS = "alerts.yml"
RUNBOOKS = "runbooks.md"
FORMATS = ("grafana", "configmap", "prometheusrule")


def contents() -> dict[str, str]:
    """Return the text of every file by name."""
    here = files("vllm_tide.dashboards")
    names = (*BOARDS, ALERTS, RUNBOOKS)
    return {name: (here / name).read_text("utf-8") for name in names}


def exported(form: str = "grafana", runbooks: str = RUNBOOKS) -> dict[str, str]:
    """Return the files of `vllm-tide dashboards export` by name.

    Args:
        form: `grafana`: plain files. `configmap`: the boards for Grafana's sidecar.
            `prometheusrule`: the rules for Prometheus Operator.
        runbooks: Base URL of `runbook_url`, to which an anchor is appended. A
            `prometheusrule` has no `runbook_url` by default.

    Raises:
        KeyError: No such form.
    """
    texts = contents()
    if runbooks != RUNBOOKS:
        texts[ALERTS] = re.sub(
            rf"(?<=: ){re.escape(RUNBOOKS)}(#.*)",
            lambda match: json.dumps(runbooks + match[1], ensure_ascii=False),
            texts[ALERTS],
        )
    # In a cluster there is no file next to the rule.
    alerts = re.sub(rf"\n *runbook_url: {re.escape(RUNBOOKS)}#.*", "", texts[ALERTS])
    boards = {name: json.dumps(json.loads(texts[name])) for name in BOARDS}
    labels = {"app.kubernetes.io/name": "vllm-tide", "grafana_dashboard": "1"}
    configmap = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "vllm-tide-dashboards", "labels": labels},
        "data": boards,
    }
    rule = (
        "# Add the labels that your Prometheus' ruleSelector requires.\n"
        "apiVersion: monitoring.coreos.com/v1\n"
        "kind: PrometheusRule\n"
        "metadata:\n"
        "  name: vllm-tide\n"
        "  labels: {app.kubernetes.io/name: vllm-tide}\n"
        f"spec:\n{indent(alerts, '  ')}"
    )
    return {
        "grafana": texts,
        "configmap": {"configmap.json": json.dumps(configmap, indent=2) + "\n"},
        "prometheusrule": {"prometheusrule.yaml": rule},
    }[form]
