"""Run vLLM's tests and compare each test with a run on unpatched vLLM.

usage: run.py {subset,all} TREE BASELINE [--record] [--group NAME ...]

TREE has `tests/` of the sdist and `hf/` (see scripts/upstream_tests.sh). A test that
passed unpatched must pass. Failed tests are repeated once, because a few of upstream's
tests are statistical or time-dependent.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
CORE = "tests/v1/core"
METRICS = "tests/v1/metrics"
SPEC = "tests/v1/spec_decode"
WORKER = "tests/v1/worker"


@dataclass(frozen=True, slots=True)
class Group:
    """Test files that run in one process."""

    name: str
    files: tuple[str, ...]
    select: str = ""
    cpu_kernels: bool = False
    in_subset: bool = True


def _in(folder: str, names: str) -> tuple[str, ...]:
    return tuple(f"{folder}/test_{name}.py" for name in names.split())


# Longest first, so that two workers end together. Not included, because they cannot be
# collected on a CPU without ray: tests/distributed/test_weight_transfer.py,
# tests/v1/spec_decode/test_eagle.py, test_max_len.py.
GROUPS = (
    Group("scheduler", _in(CORE, "scheduler async_scheduler")),
    Group(
        "config",
        _in("tests", "config"),
        select="specul or adaptive or dynamic or eagle or draft",
        in_subset=False,
    ),
    Group(
        "engine",
        _in("tests/engine", "arg_utils")
        + _in(WORKER, "gpu_model_runner")
        + _in(CORE, "output priority_scheduler_random deferred_block_free"),
        in_subset=False,
    ),
    Group(
        "proposer",
        _in(SPEC, "llm_base_proposer llm_base_proposer_sampling dynamic_sd")
        + _in(SPEC, "request_acceptance vocab_mapping eagle_step_kernel"),
    ),
    Group(
        "rejection-sampler",
        _in("tests/v1/sample", "rejection_sampler"),
        cpu_kernels=True,
    ),
    Group(
        "outputs",
        _in("tests/v1", "outputs request")
        + _in(METRICS, "stats")
        + _in(WORKER, "gpu_worker_weight_transfer"),
    ),
    Group(
        "metrics",
        _in(METRICS, "stats metrics_reader perf_metrics ray_metrics"),
        in_subset=False,
    ),
    Group(
        "adaptive",
        _in(SPEC, "adaptive_verification acceptance_estimator dynamic_sd_cug")
        + _in(SPEC, "rejection_sampler_utils"),
        in_subset=False,
    ),
    Group(
        "drafts",
        _in(SPEC, "ngram speculators_eagle3 extract_hidden_states mtp"),
        in_subset=False,
    ),
    Group(
        "workers",
        _in(WORKER, "gpu_target_dependent_ar_speculator gpu_batch_ordering")
        + _in(WORKER, "gpu_warmup_blocks gpu_model_runner_v2 grammar_invalid_drafts")
        + _in(WORKER, "gpu_rejection_sampler_chunking gpu_input_batch")
        + _in(WORKER, "spec_decode_embed_sharing_pp")
        + _in(WORKER, "gpu_extract_hidden_states_speculator"),
        in_subset=False,
    ),
)


def run_group(tree: Path, group: Group, ids: tuple[str, ...] = ()) -> dict[str, str]:
    """Run a group, or only the given tests of it; return outcomes by test id."""
    outcomes = tree / f"outcomes-{group.name}{'-again' if ids else ''}.json"
    outcomes.unlink(missing_ok=True)
    env = os.environ | {
        "HF_HOME": str(tree / "hf"),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(HERE),
        "TIDE_OUTCOMES": str(outcomes),
        "TIDE_CPU_KERNELS": "1" if group.cpu_kernels else "0",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["-p", "tide_upstream_plugin", "--timeout=120", "--tb=short"]
    command += ["--continue-on-collection-errors"]
    command += ["-k", group.select] if group.select else []
    command += ids or [file for file in group.files if (tree / file).is_file()]
    started = time.monotonic()
    with open(tree / f"log-{group.name}.txt", "w") as log:
        subprocess.run(
            command,
            cwd=tree,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            check=False,
        )
    results: dict[str, str] = {}
    if outcomes.is_file():
        results = json.loads(outcomes.read_text())
    passed = sum(outcome == "passed" for outcome in results.values())
    seconds = time.monotonic() - started
    print(f"{group.name}: {passed} of {len(results)} pass, {seconds:.0f} s", flush=True)
    return results


def main() -> int:
    """Run the groups, then record or compare the outcomes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("which", choices=["subset", "all"])
    parser.add_argument("tree", type=Path)
    parser.add_argument("baseline", type=Path)
    parser.add_argument("--record", action="store_true")
    parser.add_argument(
        "--group", action="append", help="run only this group; repeatable"
    )
    args = parser.parse_args()
    groups = [
        group
        for group in GROUPS
        if (group.name in args.group if args.group else True)
        and (args.which == "all" or group.in_subset)
    ]
    with ThreadPoolExecutor(max_workers=2) as pool:
        results = pool.map(lambda group: run_group(args.tree, group), groups)
    outcomes = dict(zip((group.name for group in groups), results, strict=True))
    passed = {
        name: sorted(test for test, outcome in tests.items() if outcome == "passed")
        for name, tests in outcomes.items()
    }
    if args.record:
        args.baseline.parent.mkdir(parents=True, exist_ok=True)
        stored = _read(args.baseline) if args.baseline.exists() else {}
        merged = {g.name: (stored | passed).get(g.name, []) for g in GROUPS}
        _write(args.baseline, merged)
        print(f"{args.baseline}: {sum(map(len, merged.values()))} passing tests")
        return 0
    return _compare(args, groups, passed, _read(args.baseline))


def _write(path: Path, passed: dict[str, list[str]]) -> None:
    """Write test names by group and file, a third of the size of full names."""
    groups: dict[str, dict[str, list[str]]] = {}
    for group, tests in passed.items():
        files = groups.setdefault(group, {})
        for test in tests:
            file, _, name = test.partition("::")
            files.setdefault(file, []).append(name)
    text = json.dumps(groups, indent=0) + "\n"
    path.write_bytes(gzip.compress(text.encode(), mtime=0))


def _read(path: Path) -> dict[str, list[str]]:
    return {
        group: [f"{file}::{name}" for file, names in files.items() for name in names]
        for group, files in json.loads(gzip.decompress(path.read_bytes())).items()
    }


def _compare(
    args: argparse.Namespace,
    groups: list[Group],
    passed: dict[str, list[str]],
    baseline: dict[str, list[str]],
) -> int:
    broken: list[str] = []
    gained = unchanged = 0
    for group in groups:
        now, then = set(passed[group.name]), set(baseline.get(group.name, ()))
        if not then:
            # A missing baseline is a failure: record the baseline first.
            broken.append(f"(no baseline of group {group.name})")
        lost = then - now
        if lost:
            again = run_group(args.tree, group, tuple(sorted(lost)))
            lost -= {test for test, outcome in again.items() if outcome == "passed"}
        broken += sorted(lost)
        unchanged += len(then - lost)
        gained += len(now - then)
    for test in broken:
        print(f"passes unpatched, fails patched: {test}")
    print(
        f"upstream tests: {unchanged} passed, {len(broken)} failed "
        f"({gained} more pass than unpatched)"
    )
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
