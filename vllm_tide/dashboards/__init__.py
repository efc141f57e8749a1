"""Grafana boards, Prometheus rules and their runbooks, as data of the package.

The boards complement vLLM's own "vLLM / Speculative Decoding": the same variables, tag
and link. Every query is per replica, except where a trainer's figures are compared.
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
    """Text of every file, by name."""
    here = files("vllm_tide.dashboards")
    names = (*BOARDS, ALERTS, RUNBOOKS)
    return {name: (here / name).read_text("utf-8") for name in names}


def exported(form: str = "grafana", runbooks: str = RUNBOOKS) -> dict[str, str]:
    """Files of `vllm-tide dashboards export`, by name.

    Args:
        form: `grafana`: plain files. `configmap`: the boards for Grafana's sidecar.
            `prometheusrule`: the rules for Prometheus Operator.
        runbooks: Address of the runbooks in `runbook_url`; an anchor follows it.
            As it is by default a `prometheusrule` has none.

    Raises:
        KeyError: No such form.
    """
    texts = contents()
    if runbooks != RUNBOOKS:
        texts[ALERTS] = re.sub(
            rf"(?<=: ){re.escape(RUNBOOKS)}(#.*)",
            lambda found: json.dumps(runbooks + found[1], ensure_ascii=False),
            texts[ALERTS],
        )
    # Nothing lies beside a rule in a cluster.
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
        "# Label it as your Prometheus' ruleSelector wants it.\n"
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
