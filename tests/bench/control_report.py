"""Small reports of runs, made up."""

from bench.harness.blocks import cell_rows, verdict

RATES = {"none": 100.0, "static1": 120.0, "static3": 130.0, "adaspec": 150.0}


def visits(blocks):
    """Visits of control's cells; the machine is 10% faster with each block."""
    return [
        {
            "batch": batch,
            "domain": domain,
            "arm": arm,
            "block": block,
            "output_tokens_per_s": RATES[arm] * 1.1**block * (1 + 0.02 * (place == 4)),
            "tokens": RATES[arm],
            "cpu_s": 1.0,
            "acceptance_length": None if arm == "none" else 2.0,
        }
        for block in range(1, blocks + 1)
        for batch in (1, 4)
        for domain in ("matched", "mixed")
        for place, arm in enumerate([*RATES, "none"])
    ]


def old_cells():
    """Cells of the control suite as they were: visits, by repeat."""
    return [
        {**visit, "target": "90m", "trace": None, "repeat": visit.pop("block") - 1}
        for visit in visits(2)
    ]


def trace_cell(arm, trace, repeat, e2e_s, tpots_ms, target="90m"):
    series = {
        "t_s": [0.5, 1.0, 1.5],
        "running": [1.0, 3.0, 2.0],
        "waiting": [0.0, 0.0, 0.0],
        "draft_length": [None, None, None],
        "length": [2.0, None, 1.5],
        "output_tokens_per_s": [40.0, 80.0, 60.0],
    }
    return {
        "batch": None,
        "domain": "mixed",
        "arm": arm,
        "target": target,
        "repeat": repeat,
        "trace": trace,
        "output_tokens_per_s": 70.0,
        "mean_e2e_s": e2e_s,
        "failed": 0,
        "verified_per_request_round": None if arm == "none" else 2.5,
        "tpots_ms": list(tpots_ms),
        "series": series,
    }


def report():
    cells = [
        trace_cell(arm, trace, 0, 1000 / rate, (10 * 100 / rate, 12 * 100 / rate))
        for trace in ("trace1", "trace2")
        for arm, rate in RATES.items()
    ]
    cells.append(trace_cell("adaspec@0.9", "trace1", 0, 7.0, (8.0, 9.0)))
    verdict = {"identical": True, "requests": 3, "tokens": 9, "near_ties": 0}
    verdict |= {"wrong": 0, "not_rescored": 0, "errors": [], "differences": []}
    return {
        "schema": 1,
        "suite": "traces",
        "complete": True,
        "stopped": None,
        "cells": cells,
        "summary": {},
        "identity": {"90m": {"adaspec": verdict}},
        "calibration": [],
        "schedules": {"90m": [[1, 2, 3], [3, 48, 0]]},
        "problems": ["90m, batch 4, <b>static1</b>: broke"],
        "options": {"slo_scales": [0.8, 0.9, 1.0]},
        "environment": {"commit": "0" * 40, "cpu": "AMD", "num_cpus": 2},
    }


def control_report():
    rows = cell_rows(visits(3))
    lost = {"prediction": 0.03, "calibration": 0.01, "times": 0.0, "overhead": 0.02}
    left = {"cell": "batch 4, mixed", "realised": 100.0, "best_uniform": 104.0}
    return report() | {
        "suite": "control",
        "visits": visits(3),
        "cells": rows,
        "verdict": verdict(rows),
        "left_on_the_table": [{**left, "best_per_request": 110.0, "lost_to": lost}],
    }
