"""The HTML report of a run: one file, plots inline, nothing loaded from elsewhere."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup, escape

from bench.harness import plots
from bench.harness.arms import STATIC
from bench.harness.blocks import cell_rows, verdict
from bench.harness.ratios import trace_summary, trace_verdict

Json = Mapping[str, Any]
Row = Sequence[Any]
TITLES = {
    "control": "How fast is each speculation policy, by requests in flight?",
    "traces": "How long do requests of recorded traces take under each policy?",
    "ablation": "What does each part of adaspec bring?",
    "learning": "Does a draft that learns while it serves follow shifting traffic?",
    "day0": "How soon is a random draft, trained while it serves, a good one?",
    "loss": "Which training loss gives the best acceptance length?",
    "rollback": "Are bad drafts refused or taken back, after how many requests?",
    "multi": "Two servers, two domains, one trainer: do both drafts get better?",
}
_ARMS = {
    "none": "no speculation",
    "threshold": "drafts while its mean confidence is high",
    "tide_gate": "a fixed length, on and off by predicted speed-up",
    "vllm_dynamic": "vLLM's length by batch size",
    "vllm_adaptive": "vLLM's adaptive verification",
    "adaspec": "the length of most predicted tokens/s, step by step",
    "adaspec_adaptive": "adaspec, its drafts cut by vLLM's adaptive verification",
    "adaspec_drafter": "adaspec that verifies all it drafts",
    "adaspec_calibration": "adaspec",
    "adaspec_slo": "adaspec, told to keep none's P90 time per output token",
    "frozen": "never trained",
    "always": "trained on all new traffic",
    "tide": "trained when acceptance falls",
    "gated": "trained when acceptance of a kind of requests falls",
    "none-again": "none at the end: the machine's own drift",
    "fresh": "random at first, trained while it serves",
    "ceiling": "like fresh, but trained offline",
    "planted": "a good draft with bad ones between",
}
_VERDICT = ("identical", "requests", "tokens", "near_ties", "wrong")
_LABELS = {
    "none": "no speculation",
    "vllm_dynamic": "vLLM's dynamic schedule",
    "vllm_adaptive": "vLLM's adaptive verification",
    "adaspec": "vllm_tide's control",
}
_RAW = ("verdict", "left_on_the_table", "environment", "options")
# Long, and of use to a program only.
_LEFT_OUT = ("jobs", "offline", "trainer")
_COLUMNS = (
    "arm",
    "num requests",
    "failed requests",
    "output tokens per s",
    "shifted, output tokens per s",
    "acceptance length",
    "shifted, acceptance length",
    "training s",
    "acceptance length before first swap",
    "acceptance length last part",
    "swaps, count",
    "swaps, pause ms max",
)


def cell(value: Any, digits: int = 2) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return f"{value:.{digits}f}" if isinstance(value, float) else escape(value)


def told(arms: Iterable[str]) -> list[tuple[str, str]]:
    """Arms with what a stranger is told of them."""
    named = ((arm, _words(*arm.partition("@"))) for arm in arms)
    return [(arm, words) for arm, words in named if words]


def _words(name: str, at: str, number: str) -> str:
    static = STATIC.match(name)
    words = f"always {static[1]} draft tokens" if static else _ARMS.get(name, "")
    limit = "given the limit at scale" if "adaspec" in name else "least requests apart"
    return f"{words}, {limit} {number}" if at and words else words


def _ratio(value: Json | None) -> str:
    if not value:
        return "-"
    mean = f"{value['mean']:.3f}"
    if value["n"] < 2:
        return mean
    return f"{mean} ({value['min']:.3f} to {value['max']:.3f})"


def label(arm: str) -> str:
    """Name of an arm in a table's head."""
    static = STATIC.match(arm)
    if static:
        return f"{static[1]} draft token{'s' * (static[1] != '1')}"
    return _LABELS.get(arm, arm)


def heat(row: Json) -> Markup:
    """Ratio to the best arm with its interval, on red (0.85 and less) to green (1)."""
    ratio, low, high = (row[k] for k in ("ratio_to_best", "best_low", "best_high"))
    hue = round(120 * min(1.0, max(0.0, (ratio - 0.85) / 0.15)))
    within = "no interval" if low is None else f"{low:.3f} to {high:.3f}"
    best = Markup("<b>{}</b>") if row["arm"] == row["best_arm"] else Markup("{}")
    return Markup('<td style="background: hsl({} 70% 82%)" title="{}">{}</td>').format(
        hue, within, best.format(f"{ratio:.3f}")
    )


def control_rows(data: Json) -> dict[str, list[Json]]:
    """Rows of the closed loops by target; of an old report they are made here."""
    if "visits" in data:
        return {str(data.get("verdict")): data["cells"]}
    closed = [c for c in data.get("cells", ()) if c.get("trace") is None]
    found = {}
    for target in dict.fromkeys(c.get("target") for c in closed):
        rows = cell_rows(
            [{**c, "block": c["repeat"] + 1} for c in closed if c["target"] == target]
        )
        found[f"{target}: {verdict(rows)}"] = rows
    return found


def heat_rows(rows: Sequence[Json]) -> Iterator[tuple[str, list[Json | None]]]:
    """Rows of the heat map, an entry for every arm."""
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    cells: dict[str, dict[str, Json]] = {}
    for row in rows:
        place = f"batch {row['batch']}, {row['domain']}"
        cells.setdefault(place, {})[row["arm"]] = row
    for place, by_arm in cells.items():
        yield place, [by_arm.get(arm) for arm in arms]


def figure_rows(rows: Sequence[Json]) -> Iterator[Row]:
    for row in rows:
        low, high = row["ratio_low"], row["ratio_high"]
        within = "-" if low is None else f"{low:.3f} to {high:.3f}"
        cpu = row["cpu_s_per_token"]
        yield (
            f"batch {row['batch']}, {row['domain']}",
            label(row["arm"]),
            cell(row["output_tokens_per_s"], 1),
            cell(row["ratio_to_none"], 3),
            within,
            cell(cpu and 1e3 * cpu, 2),
            row["acceptance_length"],
            row["verified_per_request_round"],
            row["blocks"],
        )


def trace_rows(found: Json) -> Iterator[Row]:
    for arm, f in found["arms"].items():
        ratios = [_ratio(f[f"speedup_over_{x}"]) for x in ("none", "best_static")]
        tokens = [
            f[f"{x}_per_request_round"] for x in ("drafted", "verified", "accepted")
        ]
        yield (arm, cell(f["mean_e2e_s"], 3), *ratios, *tokens, f["acceptance_rate"])


def attainment_head(traces: Mapping[str, Json]) -> list[str]:
    scales = list(traces.values())[-1]["attainment"]["scales"]
    return ["% within the limit at scale", *(f"{scale:g}" for scale in scales)]


def attainment_rows(traces: Mapping[str, Json]) -> Iterator[Row]:
    for name, found in traces.items():
        for arm, shares in found["attainment"]["arms"].items():
            percents = [None if s is None else 100 * s for s in shares]
            yield (f"{name}: {arm}", *(cell(p, 1) for p in percents))


def sections(results: Json) -> list[tuple[str, Any]]:
    """Parts of a learning suite's results; lists first: they are the answer."""
    order = sorted(results.items(), key=lambda item: not isinstance(item[1], list))
    return [(name, found) for name, found in order if name not in _LEFT_OUT]


def curves(found: Any) -> dict[str, Json]:
    """Arms of a part that have curves over time."""
    items = found.items() if isinstance(found, dict) else ()
    return {k: v for k, v in items if isinstance(v, dict) and "windows" in v}


def records(rows: Sequence[Json], names: Sequence[str] = ()) -> tuple[Row, list[Row]]:
    """Head and rows of a table of records, without columns that say nothing."""
    flattened = [dict(flat(row)) for row in rows]
    every = names or list(dict.fromkeys(name for row in flattened for name in row))
    shown = [
        name
        for name in every
        if any(row.get(name, "-") != "-" for row in flattened) and "spread" not in name
    ]
    return shown, [[row.get(name, "-") for name in shown] for row in flattened]


def arm_table(arms: Mapping[str, Json]) -> tuple[Row, list[Row]]:
    return records([{"arm": arm, **found} for arm, found in arms.items()], _COLUMNS)


def flat(found: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Figures of nested objects by their path."""
    if isinstance(found, dict):
        for key, value in found.items():
            yield from flat(value, f"{name}, {key}".strip(", ").replace("_", " "))
    elif not isinstance(found, list):
        yield name, cell(found, 3)
    elif found:
        yield name, ", ".join(cell(value, 3) for value in found)


def _of_trace(cells: Sequence[Json], name: str) -> list[Json]:
    return [c for c in cells if f"{c.get('target')}: {c.get('trace')}" == name]


def _arms_of(traces: Mapping[str, Json]) -> list[str]:
    return list(
        dict.fromkeys(arm for found in traces.values() for arm in found["arms"])
    )


_FILTERS = (
    cell, told, label, heat, heat_rows, figure_rows, trace_rows, attainment_head,
    attainment_rows, sections, curves, records, arm_table, flat,
)  # fmt: skip


def _parameters(environment: Json) -> str:
    number = environment.get("target", {}).get("parameters")
    return f"{number / 1e6:.0f}M parameters" if number else "?"


def html(data: Json) -> str:
    environment, options = data["environment"], data.get("options", {})
    turns = "compared" in data.get("identity", {})  # engines took turns
    cells = data.get("cells", [])
    traces = trace_summary(cells, options.get("slo_scales"))
    suite, state = str(data.get("suite", "?")), "complete"
    script = f"run.py --suite {suite}"
    if turns:  # it is not known whether all were taken
        suite = "traces" if traces else "control"
        script, state = f"interleaved{'_traces' * bool(traces)}.py", "turn by turn"
    elif not data.get("complete"):
        state = f"NOT complete: {data.get('stopped')}"
    pages = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    pages.filters |= {filter_.__name__: filter_ for filter_ in _FILTERS}
    pages.filters |= {"of_trace": _of_trace, "arms_of": _arms_of}
    return pages.get_template("report.html.jinja").render(
        title=TITLES.get(suite, f"Suite {suite}"),
        facts=[
            f"scripts/bench/{script}, {state}",
            f"target: {options.get('target') or _parameters(environment)}",
            f"prompts: {', '.join(map(str, options.get('domains', ())))}",
            f"commit {str(environment.get('commit', ''))[:12] or 'unknown'}",
            f"{environment.get('cpu', '')}, {environment.get('num_cpus')} cores",
        ],
        problems=data.get("problems", ()),
        plots=plots,
        cells=cells,
        sweeps=control_rows(data),
        left=data.get("left_on_the_table", ()),
        traces=traces,
        trace_verdict=trace_verdict(traces),
        results=None if "cells" in data else data["results"],
        identity=[
            (f"{target}: {arm}", *(verdict[key] for key in _VERDICT))
            for target, arms in data.get("identity", {}).items()
            for arm, verdict in arms.items()
        ]
        if "cells" in data and not turns
        else [],
        turns=data["identity"] if turns else None,
        schedules=[
            (target, ", ".join(f"{a} to {b}: {k}" for a, b, k in ranges))
            for target, ranges in data.get("schedules", {}).items()
        ],
        record=json.dumps(
            {
                k: data[k]
                for k in (*_RAW, *(["cells"] * ("visits" in data)))
                if k in data
            },
            indent=1,
        ),
    )


def write_html(data: Json, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(html(data) + "\n", encoding="utf-8")
