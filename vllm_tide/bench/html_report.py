"""The HTML report of a run: one file, plots inline, nothing loaded from elsewhere."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from . import control_plots as plots
from .control_summary import summarise

Json = Mapping[str, Any]
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1100px;
       padding: 0 1rem; color: #222; background: #fff; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; }
h3 { font-size: 1rem; } .note { color: #555; } .bad { color: #b00020; }
table { border-collapse: collapse; margin: 0.6rem 0 1.2rem; font-size: 13px; }
th, td { padding: 0.2rem 0.6rem; text-align: right; border-bottom: 1px solid #e3e3e3; }
th { background: #f6f6f6; } th:first-child, td:first-child { text-align: left; }
td.best { font-weight: 700; } .wide { overflow-x: auto; }
svg { max-width: 100%; height: auto; } pre { overflow-x: auto; background: #f6f6f6;
padding: 0.8rem; font-size: 12px; }
"""


def _text(value: Any, digits: int = 2) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, float):
        return f"{value:.{digits}f}"
    return escape(str(value))


def _ratio(value: Json | None) -> str:
    """Return ``1.32 (1.30 to 1.35)``, the range only where there are repeats."""
    if not value:
        return "-"
    mean = f"{value['mean']:.3f}"
    if value["n"] < 2:
        return mean
    return f"{mean} ({value['min']:.3f} to {value['max']:.3f})"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f'<div class="wide"><table><tr>{top}</tr>{body}</table></div>'


def _control(summary: Mapping[str, Json]) -> str:
    parts = []
    for target, found in summary.items():
        if not found["cells"]:
            continue
        parts.append(f"<h2>Batch sweep: {escape(target)}</h2>")
        parts.append(plots.speedup_by_batch(found))
        parts.append(
            '<p class="note">Closed loop, exactly that many requests in flight. Bars '
            "are the least and the largest repeat. A ratio is taken within a repeat; "
            "means are geometric.</p>"
        )
        best = found["best_static"]
        head = (
            "arm",
            "tokens/s",
            f"over {best or 'best static'}",
            "over none",
            "weakest against the best arm",
            "weakest against none",
        )
        parts.append(
            _table(
                head,
                (
                    (
                        escape(arm),
                        _text(f["geomean_tokens_per_s"]),
                        _ratio(f["over_best_static"]),
                        _ratio(f["over_none"]),
                        _least(f.get("least_over_best")),
                        _least(f.get("least_over_none")),
                    )
                    for arm, f in found["arms"].items()
                ),
            )
        )
        parts.append("<h3>Output tokens/s</h3>")
        parts.append(_rates(found))
    return "".join(parts)


def _least(found: Json | None) -> str:
    return f"{found['ratio']:.3f} at {escape(found['cell'])}" if found else "-"


def _rates(found: Json) -> str:
    arms = list(found["arms"])
    rows = []
    for row in found["cells"]:
        cells = [f"<td>{escape(row['domain'])}</td><td>{row['batch']}</td>"]
        for arm in arms:
            mark = ' class="best"' if arm == row["best_arm"] else ""
            rate = row["arms"].get(arm, {}).get("output_tokens_per_s")
            cells.append(f"<td{mark}>{_text(rate, 1)}</td>")
        rows.append(f"<tr>{''.join(cells)}</tr>")
    head = "".join(f"<th>{escape(x)}</th>" for x in ("domain", "batch", *arms))
    body = "".join(rows)
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'


def _traces(summary: Mapping[str, Json], cells: Sequence[Json]) -> str:
    if not summary:
        return ""
    parts = ["<h2>Replayed traces</h2>", plots.speedup_by_trace(summary)]
    parts.append(
        '<p class="note">Open loop: every request is sent at its own time. Latency '
        "counts from the time a request was due.</p>"
    )
    for name, found in summary.items():
        parts.append(f"<h3>{escape(name)}</h3>")
        head = (
            "arm",
            "mean end to end, s",
            "speed-up over none",
            f"over {found['best_static'] or 'best static'}",
            "drafted",
            "verified",
            "accepted",
            "acceptance rate",
        )
        parts.append(
            _table(
                head,
                (
                    (
                        escape(arm),
                        _text(f["mean_e2e_s"], 3),
                        _ratio(f["speedup_over_none"]),
                        _ratio(f["speedup_over_best_static"]),
                        _text(f["drafted_per_request_round"]),
                        _text(f["verified_per_request_round"]),
                        _text(f["accepted_per_request_round"]),
                        _text(f["acceptance_rate"]),
                    )
                    for arm, f in found["arms"].items()
                ),
            )
        )
        mine = [c for c in cells if f"{c.get('target')}: {c.get('trace')}" == name]
        over_time = plots.length_over_time(mine)
        if over_time:
            parts.append(over_time)
    parts.append(
        '<p class="note">Drafted, verified and accepted tokens are per request and '
        "round, rounds without speculation counted as zero.</p>"
    )
    attainment = plots.attainment_by_scale(summary)
    if attainment:
        parts += ["<h2>SLO attainment</h2>", attainment, _attainment(summary)]
        parts.append(
            '<p class="note">Limit = scale x P90 time per output token of arm none on '
            "the same trace. An arm named with @ was served with that limit.</p>"
        )
    return "".join(parts)


def _attainment(summary: Mapping[str, Json]) -> str:
    rows = []
    scales: Sequence[float] = ()
    for name, found in summary.items():
        scales = found["attainment"]["scales"]
        for arm, shares in found["attainment"]["arms"].items():
            percents = [None if s is None else 100 * s for s in shares]
            rows.append(
                (f"{escape(name)}: {escape(arm)}", *(_text(p, 1) for p in percents))
            )
    return _table(("% within the limit at scale", *(f"{s:g}" for s in scales)), rows)


def _identity(identity: Mapping[str, Json]) -> str:
    rows = [
        (
            f"{escape(target)}: {escape(arm)}",
            _text(verdict["identical"]),
            _text(verdict["requests"]),
            _text(verdict["tokens"]),
            _text(verdict["near_ties"]),
            _text(verdict["wrong"]),
        )
        for target, arms in identity.items()
        for arm, verdict in arms.items()
    ]
    if not rows:
        return '<p class="bad">Outputs were not compared.</p>'
    head = ("arm", "same as none", "requests", "tokens", "near ties", "wrong")
    return _table(head, rows)


def html(data: Json) -> str:
    """Return the report of a run's JSON."""
    summary = summarise(data["cells"], data.get("options", {}).get("slo_scales"))
    environment = data["environment"]
    commit = str(environment.get("commit", ""))[:12] or "unknown"
    title = f"vllm_tide bench: suite {data.get('suite', '?')}"
    state = (
        "complete" if data.get("complete") else f"NOT complete: {data.get('stopped')}"
    )
    parts = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{len(data['cells'])} visits, {escape(state)}; commit {escape(commit)}; "
        f"{escape(str(environment.get('cpu', '')))}, "
        f"{_text(environment.get('num_cpus'))} cores.</p>",
    ]
    parts += [f'<p class="bad">{escape(str(p))}</p>' for p in data.get("problems", ())]
    parts.append(_control(summary.get("control", {})))
    parts.append(_traces(summary.get("traces", {}), data["cells"]))
    parts += ["<h2>Greedy outputs</h2>", _identity(data.get("identity", {}))]
    if data.get("schedules"):
        parts.append("<h2>Schedule of vllm_dynamic</h2>")
        parts.append(
            _table(
                ("target", "batch sizes: draft tokens"),
                (
                    (escape(t), ", ".join(f"{a} to {b}: {k}" for a, b, k in ranges))
                    for t, ranges in data["schedules"].items()
                ),
            )
        )
    record = {"environment": environment, "options": data.get("options", {})}
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
