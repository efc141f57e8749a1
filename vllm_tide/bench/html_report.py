"""The HTML report of a run: one file, plots inline, nothing loaded from elsewhere."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from . import control_plots as plots
from .control_summary import summarise
from .html_parts import SUITES, arms_told, note, table, text
from .learning_html import learning

Json = Mapping[str, Any]
_TOKENS = ("drafted", "verified", "accepted")
_VERDICT = ("identical", "requests", "tokens", "near_ties", "wrong")
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1100px;
       padding: 0 1rem; color: #222; background: #fff; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; }
h3 { font-size: 1rem; } .note { color: #555; } .bad { color: #b00020; }
table { border-collapse: collapse; margin: 0.6rem 0 1.2rem; font-size: 13px; }
th, td { padding: 0.2rem 0.6rem; text-align: right; border-bottom: 1px solid #e3e3e3; }
th { background: #f6f6f6; } th:first-child, td:first-child { text-align: left; }
.wide { overflow-x: auto; }
svg { max-width: 100%; height: auto; } pre { overflow-x: auto; background: #f6f6f6;
padding: 0.8rem; font-size: 12px; }
"""


def _ratio(value: Json | None) -> str:
    """Return ``1.32 (1.30 to 1.35)``, the range only where there are repeats."""
    if not value:
        return "-"
    mean = f"{value['mean']:.3f}"
    if value["n"] < 2:
        return mean
    return f"{mean} ({value['min']:.3f} to {value['max']:.3f})"


def _control(summary: Mapping[str, Json]) -> str:
    parts = []
    for target, found in summary.items():
        if not found["cells"]:
            continue
        arms = found["arms"]
        parts += [f"<h2>Batch sweep: {escape(target)}</h2>", arms_told(arms)]
        parts.append(plots.speedup_by_batch(found))
        parts.append(
            note(
                "Closed loop, exactly that many requests in flight; the draft knows "
                "matched prompts, not unmatched ones. Bars are the least and the "
                "largest repeat. A ratio is taken within a repeat; means are geometric "
                "over all cells, - where an arm did not run in each."
            )
        )
        best = found["best_static"]
        head = (
            "arm",
            "mean tokens/s",
            f"x {best or 'best static'}",
            "x none",
            "worst cell, x its best arm",
            "worst cell, x none",
        )
        rows = [
            (
                escape(arm),
                text(f["geomean_tokens_per_s"]),
                *(_ratio(f[f"over_{other}"]) for other in ("best_static", "none")),
                *(_least(f.get(f"least_over_{other}")) for other in ("best", "none")),
            )
            for arm, f in arms.items()
        ]
        parts.append(table(head, rows))
        parts.append("<h3>Output tokens/s, the best of each cell in bold</h3>")
        parts.append(
            table(
                ("domain", "batch", *arms),
                (
                    (escape(row["domain"]), text(row["batch"]), *_rates(row, arms))
                    for row in found["cells"]
                ),
            )
        )
    return "".join(parts)


def _least(found: Json | None) -> str:
    return f"{found['ratio']:.3f} at {escape(found['cell'])}" if found else "-"


def _rates(row: Json, arms: Mapping[str, Json]) -> list[str]:
    rates = {
        arm: text(row["arms"].get(arm, {}).get("output_tokens_per_s"), 1)
        for arm in arms
    }
    rates[row["best_arm"]] = f"<b>{rates[row['best_arm']]}</b>"
    return list(rates.values())


def _traces(summary: Mapping[str, Json], cells: Sequence[Json]) -> str:
    if not summary:
        return ""
    arms = dict.fromkeys(arm for found in summary.values() for arm in found["arms"])
    parts = [
        "<h2>Replayed traces</h2>",
        arms_told(arms),
        plots.speedup_by_trace(summary),
        note(
            "Open loop: every request is sent at its own time. Latency counts from the "
            "time a request was due."
        ),
    ]
    for name, found in summary.items():
        parts.append(f"<h3>{escape(name)}</h3>")
        head = (
            "arm",
            "mean end to end, s",
            "x as fast as none",
            f"x as fast as {found['best_static'] or 'best static'}",
            *(f"{x} tokens" for x in _TOKENS),
            "acceptance rate",
        )
        rows = [
            (
                escape(arm),
                text(f["mean_e2e_s"], 3),
                *(_ratio(f[f"speedup_over_{x}"]) for x in ("none", "best_static")),
                *(text(f[f"{x}_per_request_round"]) for x in _TOKENS),
                text(f["acceptance_rate"]),
            )
            for arm, f in found["arms"].items()
        ]
        parts.append(table(head, rows))
        mine = [c for c in cells if f"{c.get('target')}: {c.get('trace')}" == name]
        over_time = plots.length_over_time(mine)
        if over_time:
            parts.append(over_time)
    parts.append(
        note(
            "Drafted, verified and accepted tokens are per request and step, steps "
            "without speculation counted as zero."
        )
    )
    attainment = plots.attainment_by_scale(summary)
    if attainment:
        parts += [
            "<h2>SLO attainment: requests fast enough per output token</h2>",
            attainment,
            note(
                "Limit = scale x P90 time per output token of arm none on the same "
                "trace, so none is near 90% (dotted) at scale 1. An arm with @ was "
                "given that limit."
            ),
            _attainment(summary),
        ]
    return "".join(parts)


def _attainment(summary: Mapping[str, Json]) -> str:
    rows = []
    scales: Sequence[float] = ()
    for name, found in summary.items():
        scales = found["attainment"]["scales"]
        for arm, shares in found["attainment"]["arms"].items():
            percents = [None if s is None else 100 * s for s in shares]
            rows.append(
                (f"{escape(name)}: {escape(arm)}", *(text(p, 1) for p in percents))
            )
    return table(("% within the limit at scale", *(f"{s:g}" for s in scales)), rows)


def _identity(identity: Mapping[str, Json]) -> str:
    rows = [
        (
            f"{escape(target)}: {escape(arm)}",
            *(text(verdict[key]) for key in _VERDICT),
        )
        for target, arms in identity.items()
        for arm, verdict in arms.items()
    ]
    if not rows:
        return '<p class="bad">Outputs were not compared.</p>'
    head = ("arm", *(key.replace("_", " ") for key in _VERDICT))
    return table(head, rows) + note("Near tie: best tokens equal but for rounding.")


def _cells(data: Json) -> list[str]:
    cells = data["cells"]
    summary = summarise(cells, data.get("options", {}).get("slo_scales"))
    parts = [
        _control(summary.get("control", {})),
        _traces(summary.get("traces", {}), cells),
        "<h2>Are greedy outputs the same as without speculation?</h2>",
        _identity(data.get("identity", {})),
    ]
    if data.get("schedules"):
        parts.append("<h2>Schedule of vllm_dynamic</h2>")
        parts.append(
            table(
                ("target", "batch sizes: draft tokens"),
                (
                    (escape(t), ", ".join(f"{a} to {b}: {k}" for a, b, k in ranges))
                    for t, ranges in data["schedules"].items()
                ),
            )
        )
    return parts


def html(data: Json) -> str:
    """Return the report of a run's JSON."""
    environment, options = data["environment"], data.get("options", {})
    commit = str(environment.get("commit", ""))[:12] or "unknown"
    suite = str(data.get("suite", "?"))
    title = SUITES.get(suite, f"Suite {suite}")
    state = (
        "complete" if data.get("complete") else f"NOT complete: {data.get('stopped')}"
    )
    facts = [
        f"vllm-tide bench run --suite {suite}, {state}",
        f"target: {options.get('target')}",
        f"prompts: {', '.join(map(str, options.get('domains', ())))}",
        f"commit {commit}",
        f"{environment.get('cpu', '')}, {environment.get('num_cpus')} cores",
    ]
    parts = [f"<h1>{escape(title)}</h1>", note(escape("; ".join(facts)))]
    parts += [f'<p class="bad">{escape(str(p))}</p>' for p in data.get("problems", ())]
    if "cells" in data:
        parts += _cells(data)
    else:
        parts.append(learning(data["results"]))
    record = {"environment": environment, "options": options}
    parts.append("<h2>Environment and options</h2>")
    parts.append(f"<pre>{escape(json.dumps(record, indent=1))}</pre>")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>"
        f"<body>{''.join(parts)}</body></html>\n"
    )


def write_html(data: Json, path: Path) -> None:
    """Write the report.

    Raises:
        OSError: The file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(html(data), encoding="utf-8")
