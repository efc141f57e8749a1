"""Report of a quickstart run: a JSON object, a table, a sentence, and answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from bench.harness.arm import ArmRun
from bench.harness.common import cell_text, columns_text, environment
from bench.harness.identity import Rescored
from bench.harness.stream import StreamRequest
from bench.harness.summary import (
    arm_figures,
    capture_figures,
    request_columns,
    swap_figures,
    swap_times_s,
    swaps_after_shifts_s,
)

ARMS = ("none", "frozen", "tide")
ANSWERS = 10
"""Answers of the last domain that are written side by side."""


def build_report(
    runs: Mapping[str, ArmRun], rescored: Sequence[Rescored], facts: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the documented JSON object, with a few further keys."""
    run = runs.get("tide", ArmRun("tide", [], [], 0.0))
    tide = run.samples
    failed = sum(not r.ok for run in runs.values() for r in run.results)
    compared = len(runs) > 1 and all(run.results for run in runs.values())
    swapped = swaps_after_shifts_s(run)
    run_facts = environment(facts)
    return {
        "model": facts.get("model"),
        "dtype": facts.get("dtype"),
        "versions": run_facts["packages"],
        "arms": {
            name: {**arm_figures(run), "requests": _requests(run)}
            for name, run in runs.items()
        },
        "swaps": {**swap_figures(tide), "at_s": swap_times_s(tide)},
        "first_swap_after_shift_s": swapped[0] if swapped else None,
        "first_swap_after_each_shift_s": swapped,
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
        "environment": run_facts,
    }


def _requests(run: ArmRun) -> dict[str, list[Any]]:
    """Return the successful requests of an arm, in the order of the stream."""
    answered = [result for result in run.results if result.ok]
    return request_columns(sorted(answered, key=attrgetter("index")))


def gains(runs: Mapping[str, ArmRun]) -> dict[str, float]:
    """Return tokens/s of TIDE over those of each other arm."""
    figures: dict[str, Any] = {name: arm_figures(runs[name]) for name in runs}
    result: dict[str, float] = {}
    tide = figures.pop("tide", None)
    for name, other in figures.items() if tide else ():
        for part, (new, old) in {
            "final": (
                f["output_tokens_per_s_by_phase"]["final"] for f in (tide, other)
            ),
            "whole": (f["output_tokens_per_s"] for f in (tide, other)),
        }.items():
            if new and old:
                result[f"{part}_over_{name}"] = round(new / old, 4)
    return result


def sentence(report: Mapping[str, Any]) -> str:
    """Return the result as a sentence."""
    gain = report["gain"]
    if not {"final_over_frozen", "final_over_none"} <= gain.keys():
        return "The arms cannot be compared."
    same = "All answers are the same"
    if ties := report["near_ties"]:
        same += f" except {ties} near ties, where rounding decides"
    if not report["outputs_identical"]:
        same = "ANSWERS DIFFER"
    return (
        "On the new traffic, in its last quarter, vllm_tide served "
        f"{gain['final_over_frozen']:.2f} times the tokens/s of the frozen draft and "
        f"{gain['final_over_none']:.2f} times those without speculation. {same}."
    )


def problems(
    report: Mapping[str, Any], runs: Mapping[str, ArmRun], min_swaps: int = 1
) -> list[str]:
    """Return the reasons why the run is not sound."""
    reasons = [f"arm {name} is missing" for name in ARMS if name not in runs]
    for name, run in runs.items():
        reasons += [f"{name}: {problem}" for problem in run.problems]
        if run.segments and not run.results:
            reasons.append(f"{name}: no request ran")
    if report["failed_requests"]:
        reasons.append(f"{report['failed_requests']} requests failed")
    if len(runs) < 2:
        reasons.append("outputs were not compared")
    elif not report["outputs_identical"]:
        wrong = sum(not d["near_tie"] for d in report["differences"])
        reasons.append(f"outputs differ between arms ({wrong} not near ties)")
    for name in ("frozen", "tide"):
        figures = report["arms"].get(name)
        if not figures or None not in figures["acceptance_length"].values():
            continue
        # The controller drafts nothing where no draft pays, and counts these steps.
        last = runs[name].samples[-1:]
        if not any(s.value("vllm_tide:steps_without_drafts") for s in last):
            reasons.append(f"{name}: nothing was drafted in some phase")
    if "tide" in runs:
        if report["swaps"]["count"] < min_swaps:
            count = report["swaps"]["count"]
            reasons.append(f"{count} swaps instead of at least {min_swaps}")
        if report["capture"]["rows"] == 0:
            reasons.append("nothing was captured")
        if report["capture"].get("faults"):
            reasons.append(
                f"{report['capture']['faults']} faults in the engine's tide code"
            )
    return reasons


def table(report: Mapping[str, Any]) -> str:
    figures = list(report["arms"].values())
    rows = {
        "output tokens/s": [f["output_tokens_per_s"] for f in figures],
        "  last quarter": [f["output_tokens_per_s_by_phase"]["final"] for f in figures],
        "mean end-to-end latency, s": [f["mean_e2e_s"] for f in figures],
        "TPOT, ms": [f["tpot_ms"] for f in figures],
    }
    for place, stretch in enumerate(figures[0]["stretches"]):
        domain = stretch["name"].partition(" ")[2]
        for part, label in (("whole", domain), ("final", "  last quarter")):
            rows[f"acceptance length, {label} ({place + 1})"] = [
                f["stretches"][place][part]["acceptance_length"] for f in figures
            ]
    rows["failed requests"] = [f["failed_requests"] for f in figures]
    lines = [columns_text(34, list(report["arms"]), rows)]
    swaps, capture = report["swaps"], report["capture"]
    lines += [f"rolled back: {event}" for event in report["rolled_back"]]
    after = report["first_swap_after_each_shift_s"]
    lines += [
        "",
        f"swaps {swaps['count']}, pause p50 {cell_text(swaps['pause_ms_p50'])} ms, "
        f"max {cell_text(swaps['pause_ms_max'])} ms; captured rows {capture['rows']}, "
        f"dropped {capture['dropped']}",
        f"first swap after a shift, s: {', '.join(map(cell_text, after)) or '-'}",
    ]
    lines += [f"gain, {name}: {value}" for name, value in report["gain"].items()]
    return "\n".join(lines)


def answers_text(
    runs: Mapping[str, ArmRun], stream: Sequence[StreamRequest], target: Path
) -> str:
    """Return the first answers of the last domain, without and with TIDE."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target)
    last = [r.index for r in stream if r.segment == stream[-1].segment][:ANSWERS]
    lines = []
    for index in last:
        lines.append(f"## Request {index}\n\n{stream[index].prompt}\n")
        for name in ("none", "tide"):
            (result,) = (r for r in runs[name].results if r.index == index)
            lines.append(f"**{name}**: {tokenizer.decode(result.token_ids)}\n")
    return "\n".join(lines)
