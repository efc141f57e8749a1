r"""How well the time model predicts: held-out shapes, and while serving a trace.

For the demo target and inflated copies of it (about 80M and 350M parameters): start an
engine, measure and fit a profile, report the error on shapes that were not fitted, then
serve bursts of the demo prompts under AdaSpec's control and compare every round with
what the profile, and the profile refined online, had predicted before it.

Run it on a quiet machine, after `source scripts/env.sh`::

    python scripts/bench/time_model.py --json time_model.json
"""

from __future__ import annotations

import argparse
import gzip
import json
import logging
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import astuple
from pathlib import Path
from typing import Any

DEMO = Path(__file__).resolve().parents[1] / "demo"
INFLATE = DEMO.parent / "inflate_model.py"
MODELS: dict[str, list[str]] = {
    "demo": [],
    "80m": ["--intermediate-size", "16384"],
    "350m": ["--intermediate-size", "16384", "--extra-layers", "21"],
}
STEPS = 7


def main() -> int:
    """Measure every model in a process of its own; print and write the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--models", default=",".join(MODELS), help="of: %(default)s")
    parser.add_argument("--quick", action="store_true", help="a start-up's profile")
    parser.add_argument("--seconds", type=float, help="time to spend on a profile")
    parser.add_argument("--serve-seconds", type=float, default=60.0)
    parser.add_argument("--max-num-seqs", type=int, default=48)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--gpu-memory-utilization", type=float)
    parser.add_argument("--keep", type=Path, help="folder that keeps inflated targets")
    parser.add_argument("--raw", action="store_true", help="keep every round's times")
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one is not None:
        args.json.write_text(json.dumps(study(args.one, args)))
        return 0
    results = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name in args.models.split(","):
            target = prepare(name, args.keep or Path(scratch))
            part = Path(scratch) / f"{name}.json"
            command = [sys.executable, __file__, *sys.argv[1:]]
            command += ["--one", str(target), "--json", str(part)]
            subprocess.run(command, check=True)
            results[name] = json.loads(part.read_text())
            print_result(name, results[name])
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


def prepare(name: str, folder: Path) -> Path:
    """The demo target, or an inflated copy in `folder`."""
    if not MODELS[name]:
        return DEMO / "target"
    target = folder / name
    if not (target / "config.json").is_file():
        command = [sys.executable, str(INFLATE), str(DEMO / "target"), str(target)]
        subprocess.run(
            [*command, *MODELS[name], "--proof-tokens", "8"],
            check=True,
            stdout=subprocess.DEVNULL,
        )
    return target


def study(target: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Profile one target and serve a trace on it, in this process."""
    from vllm_tide.config import ControlConfig
    from vllm_tide.control.fit import fit
    from vllm_tide.control.online_time import OnlineTime, RoundSample
    from vllm_tide.engine.policy_start import start_policy, start_predicting
    from vllm_tide.engine.profiler import measure_worker, open_engine

    logging.basicConfig(format="%(message)s")
    logging.getLogger("vllm_tide").setLevel(logging.INFO)
    served: list[RoundSample] = []

    def listen(worker: Any) -> None:
        control, adaspec = worker.tide.control, ControlConfig(policy="adaspec")
        if worker.use_v2_model_runner:
            start_predicting(worker, control, adaspec, model)
        else:
            start_policy(worker, control, adaspec)
        control.on_round.append(served.append)

    arguments = ["--dtype", args.dtype]
    if args.gpu_memory_utilization is not None:
        arguments += ["--gpu-memory-utilization", str(args.gpu_memory_utilization)]
    arguments += ["--max-num-seqs", str(args.max_num_seqs), "--max-model-len", "2048"]
    began = time.monotonic()
    with open_engine(str(target), str(DEMO / "draft"), STEPS, arguments) as engine:
        ranks = engine.collective_rpc(
            measure_worker, args=(args.quick, STEPS, args.seconds)
        )
        measured = time.monotonic() - began
        samples, facts = ranks[0]
        model, report = fit(samples, tuple(facts["graph_sizes"]))
        engine.collective_rpc(listen)
        serve(engine, args.serve_seconds, args.max_num_seqs)
    online = OnlineTime(model)
    errors = [online.observe(sample) for sample in served]
    later = errors[len(errors) // 4 :]
    raw = {"measured": samples, "served": served} if args.raw else {}
    return {name: [astuple(s) for s in rounds] for name, rounds in raw.items()} | {
        "facts": facts,
        "samples": len(samples),
        "start_and_measure_s": measured,
        "fit": report.to_json(),
        "serving": {
            "rounds": len(served),
            "median_abs_error_profile": middle([error[1] for error in errors]),
            "median_abs_error_refined": middle([error[0] for error in errors]),
            "after_first_quarter_profile": middle([error[1] for error in later]),
            "after_first_quarter_refined": middle([error[0] for error in later]),
            "factors": {
                "target": online.model.target.value,
                "draft_first": online.model.draft_first.value,
                "draft_next": online.model.draft_next.value,
            },
        },
        "time_model": model.to_json(),
    }


def middle(values: list[float]) -> float | None:
    """Median of the known values."""
    known = [value for value in values if value == value]
    return statistics.median(known) if known else None


def serve(engine: Any, seconds: float, most: int) -> None:
    """Open-loop bursts: the rate steps through low, high and none every few seconds."""
    from vllm import SamplingParams

    rng = random.Random(0)
    prompts = []
    for path in sorted((DEMO / "prompts").glob("*.jsonl.gz")):
        with gzip.open(path, "rt") as lines:
            prompts += [json.loads(line)["prompt"] for line in lines]
    began = time.monotonic()
    count, due, running = 0, 0.0, 0
    while (now := time.monotonic() - began) < seconds or running:
        while now < seconds and due <= now and running < 2 * most:
            rate = (1.0, 6.0, 20.0, 3.0)[int(now / 5.0) % 4]
            due = max(due, now - 1.0) + rng.expovariate(rate)
            params = SamplingParams(
                temperature=rng.choice((0.0, 0.0, 0.8)),
                max_tokens=rng.randrange(16, 200),
                ignore_eos=True,
            )
            engine.add_request(f"trace-{count}", rng.choice(prompts), params)
            count += 1
            running += 1
        if running:
            running -= sum(output.finished for output in engine.step())
        else:
            time.sleep(0.01)


def print_result(name: str, result: dict[str, Any]) -> None:
    """One model in a few lines."""
    fit, serving = result["fit"], result["serving"]
    print(
        f"{name}: R2 {fit['r2']:.4f}, held-out shapes "
        f"{fit['held_out_median_abs_error']:.2%} (fitted "
        f"{fit['median_abs_error']:.2%}, {fit['num_samples']} shapes); serving "
        f"{serving['rounds']} rounds: {serving['median_abs_error_profile']:.2%} by the "
        f"profile, {serving['median_abs_error_refined']:.2%} refined"
    )
    for part, numbers in fit["parts"].items():
        print(
            f"  {part:12} R2 {numbers['r2']:.4f}, held out "
            f"{numbers['held_out_median_abs_error']:.2%}"
        )
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
