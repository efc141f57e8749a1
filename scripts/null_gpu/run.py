#!/usr/bin/env python
"""Run the arms of `scripts/null_gpu.sh`, one engine each, and write the table."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]
from json_text import json_text

HERE = Path(__file__).parent
# All arms draft at full depth (`depths.Depths`), so their steps are comparable.
CONTROL = {"policy": "threshold"}
# Step costs need times. Exploration is off, so that all steps are alike.
PRICED = {"policy": "adaspec", "probe_share": 0}
OFF = {"preset": "observe", "capture": {"enabled": False}}
ALONE = {"train": {"autostart": False}}
ARMS: dict[str, dict[str, Any] | None] = {
    "upstream": None,
    "idle": OFF,
    "capture": OFF | {"capture": {"ring_mib": 64}},
    "control": OFF | {"control": CONTROL},
    "all": ALONE | {"capture": {"ring_mib": 64}, "control": CONTROL},
    # With adaptive verification; compared with upstream's.
    "adaptive_upstream": None,
    "adaptive": ALONE | {"capture": {"ring_mib": 64}, "control": PRICED},
}
ADAPTIVE = "adaptive"
# Minus `all`: the cost of the memory per step.
WITH_MEMORY = ARMS["all"] | {"test_time": {"memory": "ngram"}}
ARMS["memory"] = WITH_MEMORY
# Drafts cut by the host: synchronous scheduling, no adaptive verification.
ARMS["priced"] = OFF | {"control": PRICED | {"verify": True}}
# Everything with vLLM's check VLLM_GPU_SYNC_CHECK, which raises on each wait.
CHECKED = "checked"
ARMS[CHECKED] = WITH_MEMORY
# Counts per decode step that are compared; ours minus upstream's.
COMPARED = (
    "launches",
    "graph_launches",
    "copies_to_device",
    "copies_to_host",
    "copies_on_device",
    "pageable_copies",
    "synchronisations",
    "allocations",
    "torch_allocations",
    "torch_pinned_allocations",
    "event_records",
    "stream_waits",
    "event_queries",
)
# Counts of our step that must not exceed upstream's.
WITHOUT_GRAPH = "/verifies_half"
WAITS = ("synchronisations", "allocations", "pageable_copies", "torch_allocations")


def run(arm: str, asynchronous: bool, options: argparse.Namespace) -> dict[str, Any]:
    """Run one engine; return its result, or print the end of its output."""
    with tempfile.TemporaryDirectory() as run_dir:
        case = {
            "tide": ARMS[arm],
            "check": arm == CHECKED,
            "adaptive": arm.startswith(ADAPTIVE),
            "async": asynchronous,
            "run_dir": run_dir,
            "batch": options.batch,
            "steps": options.steps,
        }
        try:
            done = subprocess.run(
                [sys.executable, str(HERE / "engine.py"), json.dumps(case)],
                capture_output=True,
                text=True,
                timeout=options.timeout,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {"failed": f"after {options.timeout:g} s"}
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return json.loads(line.removeprefix("RESULT "))
    print((done.stdout + done.stderr)[-6000:], file=sys.stderr)
    return {"failed": done.returncode}


def difference(ours: dict[str, Any], upstream: dict[str, Any]) -> dict[str, float]:
    """Return the counts of our step minus upstream's."""
    return {name: round(ours[name] - upstream[name], 3) for name in COMPARED}


def steps_of(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the kinds of step of a run, by a suffix of its name."""
    kinds = {"": result["decode"]}
    for name, step in result.get("cuts", {}).items():
        kinds[f"/verifies_{name}"] = step
    return kinds


def compared_runs(runs: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield name and result of each run, and the upstream result to compare with."""
    for name, result in runs.items():
        scheduling, _, arm = name.partition("/")
        own = f"{ADAPTIVE}_upstream" if arm.startswith(ADAPTIVE) else "upstream"
        upstream = runs.get(f"{scheduling}/{own}", {})
        if arm != CHECKED and "decode" in result and "decode" in upstream:
            yield name, result, upstream


def table(runs: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return the differences to upstream by run and kind of step."""
    more = {}
    for name, result, upstream in compared_runs(runs):
        baseline = steps_of(upstream)
        for kind, step in steps_of(result).items():
            more[name + kind] = difference(step, baseline[kind])
    return more


def priced(result: dict[str, Any]) -> bool:
    """Return whether the worker received and used step costs in each such step."""
    if "prices" not in result:
        return True
    cuts = (step["prices"] for step in result["cuts"].values())
    counts = [result["prices"], *cuts]
    return all(c["steps"] == c["told"] == c["used"] > 0 for c in counts)


def waits_more(runs: dict[str, Any]) -> bool:
    """Return whether a step waits or allocates more often than upstream's.

    With adaptive verification our first draft pass has no CUDA graph (`replay_each`),
    so these steps are compared with upstream's steps without that graph.
    """
    for name, result, upstream in compared_runs(runs):
        baseline = steps_of(upstream)
        if name.endswith(f"/{ADAPTIVE}"):
            without = baseline[WITHOUT_GRAPH]
            baseline |= {kind: without for kind in ("", "/verifies_all")}
        for kind, step in steps_of(result).items():
            more = difference(step, baseline[kind])
            # A window of ten steps may include one block of another component.
            most = {"torch_allocations": 0.5}
            if any(more[name] > most.get(name, 0.0) for name in WAITS):
                return True
    return False


def sound(runs: dict[str, Any]) -> bool:
    """Return whether all runs are complete, without faults and additional waits."""
    results = runs.values()
    complete = all(run.get("faults") == {} and priced(run) for run in results)
    predicting = all(run.get("predicts", True) for run in results)
    return complete and predicting and not waits_more(runs)


def document(runs: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Return the document of `--json`."""
    return {
        "what": "Calls per decoding step on a null GPU without kernel code; "
        "host_ms is the host's time alone, on a shared machine.",
        "environment": {p: version(p) for p in ("torch", "triton", "vllm")},
        "batch": options.batch,
        "steps": options.steps,
        "more_than_upstream": table(runs),
        "runs": runs,
    }


def main() -> int:
    """Run the arms; return 0 if `sound`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--scheduling", default="async,sync")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--timeout", type=float, default=540, help="seconds per engine")
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--keep", action="store_true", help="skip runs that --json has already"
    )
    options = parser.parse_args()
    runs: dict[str, Any] = {}
    if options.keep and options.json.exists():
        runs = json.loads(options.json.read_text(encoding="utf-8"))["runs"]
    for scheduling in options.scheduling.split(","):
        for arm in options.arms.split(","):
            name = f"{scheduling}/{arm}"
            if "decode" in runs.get(name, {}):
                continue
            runs[name] = run(arm, scheduling == "async", options)
            print(name, json.dumps(runs[name].get("decode", runs[name])), flush=True)
            if options.json:
                options.json.write_text(json_text(document(runs, options)), "utf-8")
    return 0 if sound(runs) else 1


if __name__ == "__main__":
    sys.exit(main())
