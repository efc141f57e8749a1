"""A small report of a run, made up: two targets' worth of every kind of cell."""

from bench.harness.ratios import summarise

RATES = {"none": 100.0, "static1": 120.0, "static3": 130.0, "adaspec": 150.0}


def closed_cell(arm, batch, domain, repeat, rate, target="90m"):
    return {
        "batch": batch,
        "domain": domain,
        "arm": arm,
        "target": target,
        "repeat": repeat,
        "trace": None,
        "output_tokens_per_s": rate,
        "mean_e2e_s": 100 / rate,
        "failed": 0,
    }


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
        closed_cell(arm, batch, domain, repeat, rate / batch**0.5 * (1 + repeat / 100))
        for repeat in range(2)
        for domain in ("matched", "unmatched")
        for batch in (1, 4)
        for arm, rate in RATES.items()
    ]
    cells += [
        trace_cell(arm, trace, 0, 1000 / rate, (10 * 100 / rate, 12 * 100 / rate))
        for trace in ("trace1", "trace2")
        for arm, rate in RATES.items()
    ]
    cells.append(trace_cell("adaspec@0.9", "trace1", 0, 7.0, (8.0, 9.0)))
    verdict = {"identical": True, "requests": 3, "tokens": 9, "near_ties": 0}
    verdict |= {"wrong": 0, "not_rescored": 0, "errors": [], "differences": []}
    return {
        "schema": 1,
        "suite": "control",
        "complete": True,
        "stopped": None,
        "cells": cells,
        "summary": summarise(cells),
        "identity": {"90m": {"adaspec": verdict}},
        "calibration": [],
        "schedules": {"90m": [[1, 2, 3], [3, 48, 0]]},
        "problems": ["90m, batch 4, <b>static1</b>: broke"],
        "options": {"slo_scales": [0.8, 0.9, 1.0]},
        "environment": {"commit": "0" * 40, "cpu": "AMD", "num_cpus": 2},
    }
