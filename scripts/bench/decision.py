"""Time of one control decision: plan, go_on, choose (and observe, once per step).

`learn` is their sum on Model Runner V2 with asynchronous scheduling, where the
launching thread makes the decision. Its mean counts, because a large batch decides only
in some steps. `recall` is an n-gram lookup on Model Runner V1
(`tide.test_time.memory`) without a match, because no text repeats.

Run: python scripts/bench/decision.py [--requests 256] [--k 8] [--cold MIB]

`--cold` writes so many MiB before `plan`, `choose` and `observe` of each step. A server
runs its models between these calls, and their weights evict everything from the caches.

Limit: 100 microseconds (median) each for 256 requests x 8 tokens. Drafting pays for all
requests here, so `go_on` is measured at every depth and `choose` on the full set. Calls
are timed one by one, with the garbage collector off, as for a server in steady state.
`cpu` is the thread's CPU time: the cost when other processes share the core.
"""

import argparse
import gc
import json
import platform
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]
from sim.published import table_model
from vllm_tide.capture.step import Step
from vllm_tide.config import ControlConfig
from vllm_tide.control.batch import Batch, Outcome
from vllm_tide.control.costs import FirstPassAlways
from vllm_tide.control.policies import AdaSpecPolicy, ControlSettings
from vllm_tide.control.step_times import StepSample, StepTimes
from vllm_tide.engine.control_v2 import ControlV2
from vllm_tide.memory.ngram import Text
from vllm_tide.memory.source import Memory

LIMIT_US = 100.0
# A memory-bound target and a cheap draft: speculation pays at every batch size.
KNOTS = (1, 8, 64, 128, 256, 512, 4096)
SECONDS = (0.0155, 0.0158, 0.0165, 0.0170, 0.0180, 0.0200, 0.03)


def measure(
    requests: int, k: int, steps: int, cold_mib: int = 0
) -> dict[str, tuple[list[float], list[float]]]:
    """Return wall and CPU seconds of single calls, by decision."""
    rng = np.random.default_rng(0)
    time_model = StepTimes(table_model(KNOTS, SECONDS, 1e-4))
    settings = ControlSettings(k_max=k, max_requests=requests)
    policy = AdaSpecPolicy(settings, time_model)
    times: dict[str, tuple[list[float], list[float]]] = {}
    weights = np.zeros(cold_mib << 17)

    def timed(name: str, call, *args):  # noqa: ANN001, ANN002, ANN202
        wall, cpu = times.setdefault(name, ([], []))
        if name != "go_on":
            np.add(weights, 1.0, out=weights)
        spent, begin = time.thread_time(), time.perf_counter()
        result = call(*args)
        wall.append(time.perf_counter() - begin)
        cpu.append(time.thread_time() - spent)
        return result

    slots = np.arange(requests)
    now = 0.0
    for slot in range(requests):
        policy.add(slot, slot % 4 == 0, now)
    for index in range(steps):
        batch = Batch(
            slots=slots,
            context=rng.integers(100, 2000, requests),
            caps=np.where(rng.random(requests) < 0.02, rng.integers(0, k, requests), k),
            sampled=slots % 4 == 0,
            limit=np.full(requests, 0.5 if index % 2 else np.inf),
            first_rows=requests,
        )
        logit = 3.0 + 1.5 * rng.standard_normal((k, requests))
        confidence = (1.0 / (1.0 + np.exp(-logit))).astype(np.float32)
        depth = timed("plan", policy.plan, batch, now).passes
        for step in range(1, depth + 1):
            timed("go_on", policy.go_on, step, confidence[step - 1])
        lengths = timed("choose", policy.choose)
        passed = (rng.random((k, requests)) < confidence) & (
            np.arange(k)[:, None] < lengths
        )
        accepted = np.cumprod(passed, axis=0).sum(axis=0)
        seconds = 0.03
        now += seconds
        sample = StepSample(
            requests, int(batch.context.sum()), int(lengths.sum()), 0, depth,
            requests, seconds - 8e-4, 1e-4, 1e-4 * (depth - 1), 0.0,
        )  # fmt: skip
        outcome = Outcome(slots, lengths, accepted, accepted + 1, now, sample)
        timed("observe", policy.observe, outcome)
    return times


def measure_v2(
    requests: int, k: int, steps: int
) -> dict[str, tuple[list[float], list[float]]]:
    """Return seconds of a step's `begin` and `learn` on Model Runner V2."""
    rng = np.random.default_rng(0)
    times = StepTimes(table_model(KNOTS, SECONDS, 1e-4))
    control = ControlV2(requests, 4096, ControlConfig.model_validate({}), k, False)
    control.times = times
    settings = ControlSettings(
        k_max=k, verify=False, explore=False, max_requests=requests
    )
    control.policy = AdaSpecPolicy(settings, FirstPassAlways(times))
    names = [f"cmpl-{number:032d}-0" for number in range(requests)]
    begin_times, learn_times = ([], []), ([], [])
    for index in range(steps):
        first = index == 0
        new = [
            SimpleNamespace(
                req_id=name, prompt_len=50, sampling_params=None, num_computed_tokens=0
            )
            for name in names
        ]
        output: Any = SimpleNamespace(
            scheduled_new_reqs=new * first,
            num_scheduled_tokens=dict.fromkeys(names, k + 1),
            preempted_req_ids=None,
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=names * (not first),
                num_computed_tokens=[100] * (requests * (not first)),
            ),
            scheduled_spec_decode_tokens=dict.fromkeys(names, [-1] * k),
            total_num_scheduled_tokens=requests * (k + 1),
        )
        sample = StepSample(
            requests, 100 * requests, requests * k, 0, k, requests * (k + 1),
            0.026, 1e-3, 2e-3, 1e-3,
        )  # fmt: skip
        logit = 3.0 + 1.5 * rng.standard_normal((requests, k))
        confidence = (1.0 / (1.0 + np.exp(-logit))).astype(np.float32)
        hits = rng.random((requests, k)) < confidence
        step = Step(
            req_ids=list(names),
            bounds=np.arange(requests + 1, dtype=np.int32) * (k + 1),
            drafts=np.full(requests, k, np.int32),
            padding=np.zeros(requests, np.int32),
            logit_ends=np.arange(1, requests + 1, dtype=np.int32) * (k + 1),
            num_prompt_tokens=np.full(requests, 50, np.int32),
            version=0,
            buffer=None,  # type: ignore[arg-type]
            steps=k,
        )
        step.start = np.full(requests, 100 + 2 * index, np.int32)
        step.emitted = (hits.cumprod(axis=1).sum(axis=1) + 1).astype(np.int32)
        step.sampled = np.zeros((requests, k + 1), np.int32)
        step.confidence = confidence
        step.drafted = np.zeros(requests, np.int32)
        step.reading = lambda sample=sample: sample
        for (wall, cpu), call, argument in (
            (begin_times, control.begin, output),
            (learn_times, control.learn, step),
        ):
            spent, began = time.thread_time(), time.perf_counter()
            call(argument)
            wall.append(time.perf_counter() - began)
            cpu.append(time.thread_time() - spent)
    if control.faults:
        raise RuntimeError(f"control failed: {control.faults}")
    return {"begin": begin_times, "learn": learn_times}


def measure_recall(
    requests: int, k: int, steps: int
) -> dict[str, tuple[list[float], list[float]]]:
    """Return the same for one step's n-gram lookup in texts of at least 500 tokens."""
    rng, slots = np.random.default_rng(0), np.arange(requests)
    table = rng.integers(0, 100_000, (requests, 500 + steps))
    memory = Memory(requests, table.shape[1], k)
    for slot in slots.tolist():
        memory.begin(slot)
    one, caps = np.ones(requests, np.int64), np.full(requests, k)
    wall, cpu = [], []
    for length in range(500, table.shape[1]):
        text = Text(table, one * length, table[:, length : length + 1], one)
        spent, began = time.thread_time(), time.perf_counter()
        if memory.recall(slots, text, caps) is not None:
            raise RuntimeError("a text repeats")
        wall.append(time.perf_counter() - began)
        cpu.append(time.thread_time() - spent)
    return {"recall": (wall[1:], cpu[1:])}  # the first call indexes the prompts


def main() -> None:
    """Measure the decisions and print the times."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--k", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=400, help="decode steps")
    parser.add_argument(
        "--cold",
        type=int,
        default=0,
        help="MiB written before a call, to evict the caches",
    )
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    args = parser.parse_args()
    gc.collect()
    gc.disable()
    measure(args.requests, args.k, 20)
    times = measure(args.requests, args.k, args.rounds, args.cold)
    times |= measure_v2(args.requests, args.k, args.rounds)
    times |= measure_recall(args.requests, args.k, args.rounds)
    rows = {}
    for name, (wall, cpu) in times.items():
        row = {
            "mean_us": statistics.mean(wall) * 1e6,
            "median_us": statistics.median(wall) * 1e6,
            "p99_us": statistics.quantiles(wall, n=100)[98] * 1e6,
            "cpu_median_us": statistics.median(cpu) * 1e6,
            "calls": len(wall),
        }
        rows[name] = row
        print(
            f"{name:8} mean {row['mean_us']:7.1f} us   median {row['median_us']:7.1f}"
            f"   p99 {row['p99_us']:7.1f}   CPU median {row['cpu_median_us']:7.1f}"
        )
    if args.json:
        record = {
            "requests": args.requests,
            "k": args.k,
            "cold_mib": args.cold,
            "limit_us": LIMIT_US,
            "machine": platform.machine(),
            "python": platform.python_version(),
            "numpy": np.__version__,
            "decisions": rows,
        }
        args.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
