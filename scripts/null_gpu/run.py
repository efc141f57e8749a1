#!/usr/bin/env python
"""Runs the arms of `scripts/null_gpu.sh`, one engine each, and makes the table."""

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
# Control drafts at full depth here, so that its steps are comparable: a null draft is
# never sure of a token (`adaptive.say_how_confident`).
CONTROL = {"policy": "threshold"}
# Prices need times. Nothing is looked at now and then, so that all steps are alike.
PRICED = {"policy": "adaspec", "probe_share": 0}
OFF = {"preset": "observe", "capture": {"enabled": False}}
ALONE = {"train": {"autostart": False}}
ARMS: dict[str, dict[str, Any] | None] = {
    "upstream": None,
    "idle": OFF,
    "capture": OFF | {"capture": {"ring_mib": 64}},
    "control": OFF | {"control": CONTROL},
    "all": ALONE | {"capture": {"ring_mib": 64}, "control": CONTROL},
    # With adaptive verification, which is compared with upstream's own.
    "adaptive_upstream": None,
    "adaptive": ALONE | {"capture": {"ring_mib": 64}, "control": PRICED},
}
ADAPTIVE = "adaptive"
# Less `all`: what the memory costs a step.
REMEMBERED = ARMS["all"] | {"test_time": {"memory": "ngram"}}
ARMS["memory"] = REMEMBERED
# Cut by the host: synchronous scheduling, no adaptive verification.
ARMS["priced"] = OFF | {"control": PRICED | {"verify": True}}
# All under vLLM's own check (VLLM_GPU_SYNC_CHECK), which makes each wait an error.
CHECKED = "checked"
ARMS[CHECKED] = REMEMBERED
# Of a decoding step; ours less upstream's.
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
# What a step of ours may not do more often.
WITHOUT_GRAPH = "/verifies_half"
WAITS = ("synchronisations", "allocations", "pageable_copies", "torch_allocations")


def run(arm: str, asynchronous: bool, options: argparse.Namespace) -> dict[str, Any]:
    """One engine; its result, or what it said last."""
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
    """What a step of ours does more than upstream's."""
    return {name: round(ours[name] - upstream[name], 3) for name in COMPARED}


def steps_of(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The kinds of step that a run counted, by a suffix of its name."""
    kinds = {"": found["decode"]}
    for name, step in found.get("cuts", {}).items():
        kinds[f"/verifies_{name}"] = step
    return kinds


def compared_runs(runs: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Name and result of each run, and upstream's that it is compared with."""
    for name, found in runs.items():
        scheduling, _, arm = name.partition("/")
        own = f"{ADAPTIVE}_upstream" if arm.startswith(ADAPTIVE) else "upstream"
        upstream = runs.get(f"{scheduling}/{own}", {})
        if arm != CHECKED and "decode" in found and "decode" in upstream:
            yield name, found, upstream


def table(runs: dict[str, Any]) -> dict[str, dict[str, float]]:
    """What ours do more than upstream's, by run and kind of step."""
    more = {}
    for name, found, upstream in compared_runs(runs):
        theirs = steps_of(upstream)
        for kind, step in steps_of(found).items():
            more[name + kind] = difference(step, theirs[kind])
    return more


def priced(found: dict[str, Any]) -> bool:
    """Whether each step that was to be priced was: told to the worker, and used."""
    if "prices" not in found:
        return True
    cuts = (step["prices"] for step in found["cuts"].values())
    counts = [found["prices"], *cuts]
    return all(c["steps"] == c["told"] == c["used"] > 0 for c in counts)


def waits_more(runs: dict[str, Any]) -> bool:
    """True if a step waits or allocates more often than upstream's.

    Under adaptive verification the draft's first pass has no graph of ours
    (`replay_each`): steps are held against those of upstream's that have none for it.
    """
    for name, found, upstream in compared_runs(runs):
        theirs = steps_of(upstream)
        if name.endswith(f"/{ADAPTIVE}"):
            theirs |= {kind: theirs[WITHOUT_GRAPH] for kind in ("", "/verifies_all")}
        for kind, step in steps_of(found).items():
            more = difference(step, theirs[kind])
            # A window of ten steps may hold one block of another's.
            most = {"torch_allocations": 0.5}
            if any(more[name] > most.get(name, 0.0) for name in WAITS):
                return True
    return False


def sound(runs: dict[str, Any]) -> bool:
    """Whether each run is whole, without a fault and priced, and none waits more."""
    whole = all(found.get("faults") == {} and priced(found) for found in runs.values())
    served = all(found.get("predicts", True) for found in runs.values())
    return whole and served and not waits_more(runs)


def document(runs: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """What `--json` gets."""
    return {
        "what": "Calls per decoding step on a null GPU, whose kernels do nothing; "
        "host_ms is the host's time alone, on a shared machine.",
        "environment": {p: version(p) for p in ("torch", "triton", "vllm")},
        "batch": options.batch,
        "steps": options.steps,
        "more_than_upstream": table(runs),
        "runs": runs,
    }


def main() -> int:
    """Run the arms; 0 if each ran whole, priced and with upstream's waits only."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--scheduling", default="async,sync")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--timeout", type=float, default=540, help="seconds an engine")
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--keep", action="store_true", help="keep the runs that --json holds already"
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
