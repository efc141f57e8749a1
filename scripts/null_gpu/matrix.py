#!/usr/bin/env python
"""Run engines on the null GPU in many combinations of options, one process each."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from json_text import json_text

HERE = Path(__file__).parent
COMPILED = {"mode": 3, "cudagraph_mode": "FULL_AND_PIECEWISE"}
PIECEWISE = {"mode": 3, "cudagraph_mode": "PIECEWISE"}
CACHED = {"enable_prefix_caching": True}
FULL: dict[str, Any] = {"capture": {"ring_mib": 64}, "train": {"autostart": False}}
MEMORY = FULL | {"test_time": {"memory": "ngram"}}
DEFAULT: dict[str, Any] = {"tide": FULL, "async": True, "adaptive": True}
# By name: the case of engine.py; None: two ranks, see `tensor_parallel`.
CASES: dict[str, dict[str, Any] | None] = {
    "full_and_piecewise": DEFAULT | {"engine": {"compilation_config": COMPILED}},
    # vLLM's adaptive verification needs FULL graphs.
    "piecewise": DEFAULT
    | {"adaptive": False, "engine": {"compilation_config": PIECEWISE}},
    "not_adaptive": DEFAULT | {"adaptive": False, "engine": CACHED},
    "sync": DEFAULT | {"async": False, "engine": CACHED},
    "sync_not_adaptive": DEFAULT | {"async": False, "adaptive": False},
    "memory": DEFAULT | {"tide": MEMORY},
    "dflash": DEFAULT | {"method": "dflash"},
    "dflash_not_adaptive": DEFAULT | {"method": "dflash", "adaptive": False},
    "published_at_start": DEFAULT | {"publish_at_start": True},
    "alias": DEFAULT | {"alias": True},
    "tensor_parallel": None,
}
SIZES = {"check": False, "batch": 8, "steps": 20}


def run(name: str, timeout: float) -> dict[str, Any]:
    """Run one engine; return its result, or the end of its output."""
    with tempfile.TemporaryDirectory() as run_dir:
        program = [__file__, "--case", "tensor_parallel", "--run-dir", run_dir]
        if (case := CASES[name]) is not None:
            case = SIZES | case | {"run_dir": run_dir}
            program = [str(HERE / "engine.py"), json.dumps(case)]
        devices = {"NULL_GPU_COUNT": "2" if name == "tensor_parallel" else "1"}
        try:
            done = subprocess.run(
                [sys.executable, *program],
                env=os.environ | devices,
                capture_output=True,
                text=True,
                timeout=timeout,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {"failed": f"after {timeout:g} s"}
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return json.loads(line.removeprefix("RESULT "))
    return {"failed": (done.stdout + done.stderr)[-3000:]}


def problems(result: dict[str, Any]) -> list[str]:
    """Return what is wrong with a run; empty if it is sound."""
    wrong = [] if "failed" not in result else ["it ended early"]
    if result.get("faults"):
        wrong.append(f"faults {result['faults']}")
    if result.get("forbidden_calls"):
        wrong.append(f"{result['forbidden_calls']} calls that a capture forbids")
    for name in ("swap", "rollback"):
        for good in ("same_addresses", "same_graphs", "new_weights_are_served"):
            if not result.get(name, {}).get(good, True):
                wrong.append(f"{name}: not {good}")
    if result.get("published_at_start") == 0:
        wrong.append("nothing was published during the start")
    if result.get("late_rows"):
        wrong.append(f"{result['late_rows']} steps were packed after a draft's graph")
    if "captured_rows" in result and not result["captured_rows"]:
        wrong.append("no row was captured")
    if result.get("read_back", {}).get("corrupt"):
        wrong.append(f"{result['read_back']['corrupt']} damaged records")
    if result.get("lost_steps"):
        wrong.append(f"{result['lost_steps']} steps were not recorded")
    if "failed" not in result and "swap" not in result and "gpus" not in result:
        wrong.append("no draft was swapped")
    return wrong


def rank_report(worker: Any) -> tuple[dict[str, int], int]:
    """Return a rank's faults and calls that a capture forbids."""
    sys.path[:0] = [str(HERE)]
    from counts import Counters

    faults = dict(getattr(worker, "worker", worker).tide._faults())
    return faults, int(Counters().read()["forbidden_calls"])


def tensor_parallel(run_dir: str) -> None:
    """Serve on two ranks, with a swap; print the result."""
    import time

    from engine import DEMO, ENGINE, draft_tensors, publish, read_back

    os.environ |= {"VLLM_WORKER_MULTIPROC_METHOD": "spawn", "HF_HUB_OFFLINE": "1"}
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # for `rank_report`
    os.environ["VLLM_ALLREDUCE_USE_FLASHINFER"] = "0"  # links CUDA statically
    from vllm import LLM, SamplingParams

    from vllm_tide.transport.rendezvous import read_manifests
    from vllm_tide.transport.versions import first_version, number_of
    from vllm_tide.transport.weights import WeightsWriter

    speculative = {"method": "eagle3", "model": str(DEMO / "draft")}
    speculative |= {"num_speculative_tokens": 3, "tide": FULL | {"run_dir": run_dir}}
    llm = LLM(
        str(DEMO / "target"),
        speculative_config=speculative,
        tensor_parallel_size=2,
        max_num_seqs=8,
        disable_custom_all_reduce=True,
        **ENGINE,
    )
    params = SamplingParams(max_tokens=60, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": list(range(5 + i, 25 + i))} for i in range(8)]

    llm.generate(prompts, params, use_tqdm=False)
    (engine,) = read_manifests(Path(run_dir))
    tensors = draft_tensors(0.5, set(engine.shared))
    publish(engine.weights, tensors, first_version(1))
    feedback, deadline = WeightsWriter.attach(engine.weights), time.monotonic() + 60
    while not feedback.feedback().installed_version and time.monotonic() < deadline:
        llm.generate(prompts, params, use_tqdm=False)
    report = feedback.feedback()
    ranks = llm.collective_rpc(rank_report)
    result = {
        "gpus": engine.gpu_uuids,
        "installed_version": number_of(report.installed_version),
        "refused": report.refused_reason,
        "captured_rows": read_back(engine.ring)["rows"],
        "faults": [faults for faults, _ in ranks if faults],
        "forbidden_calls": sum(calls for _, calls in ranks),
    }
    feedback.close()
    assert result["installed_version"] == 1 and len(set(engine.gpu_uuids)) == 2, result
    print("RESULT " + json.dumps(result), flush=True)


def main() -> int:
    """Run the cases; return 0 if all are sound."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="comma-separated names of cases")
    parser.add_argument("--timeout", type=float, default=540, help="seconds per engine")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--run-dir", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        tensor_parallel(options.run_dir)
        return 0
    names = options.only.split(",") if options.only else list(CASES)
    results, bad = {}, 0
    for name in names:
        result = results[name] = run(name, options.timeout)
        wrong = problems(result)
        bad += bool(wrong)
        print(name, "; ".join(wrong) or "sound", result.get("failed", ""), flush=True)
        if options.json:
            options.json.write_text(json_text({"runs": results}), encoding="utf-8")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
