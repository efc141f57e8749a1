r"""What capture costs: output tokens/s with capture on and off, trainer off.

Two servers are up at once, on the same core, the same draft in both; one captures.
They are loaded alternately in short blocks, A B B A, so that drift of the machine
falls on both alike, and only one ever has work (an idle vLLM sleeps after a second).
A small process empties the ring, since without a consumer capture drops everything
and would look free.  Reported: the ratio on/off of each adjacent pair, its median,
quartiles, and a bootstrap interval of the median; and the same for tokens per CPU
second of the engine, which a busy neighbour disturbs far less.  Example::

    python scripts/bench/capture_cost.py --venv .venv --target build/.../target-X \
        --draft scripts/demo/draft --prompts scripts/demo/prompts --work build/cost

With `--off-venv` the other server is that environment's vLLM, which may be an unpatched
one without this package; `--tide` adds to the `tide` section, so that everything the
package does can be weighed against none of it. `--full` weighs the full mode while
nothing is learnt: a trainer is attached and reads every row, and no cycle ever begins;
both servers draft the same static length.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import aiohttp

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]
from bench.harness.arm import LiveView, wait_for_trainer
from bench.harness.client import RequestResult, make_session, replay
from bench.harness.common import environment, write_json
from bench.harness.scrape import Scraper
from bench.harness.server import SERVED_NAME, ServerOptions, VllmServer, end_on_signals
from bench.harness.stream import StreamRequest, read_prompts
from bench.harness.trainers import trainer_statuses
from bench.suites.quickstart import speculative_config

# An idle server's processes spin for one second before they sleep.
PAUSE_S = 1.3
DRAIN = """
import sys, time
from vllm_tide.transport.ring import RingReader
reader = RingReader.attach(sys.argv[1])
rows = 0
while True:
    record = reader.read()
    if record is None:
        reader.heartbeat()
        time.sleep(0.02)
"""


def _block(prompts: list[str], args: argparse.Namespace) -> list[StreamRequest]:
    return [
        StreamRequest(i, "block", False, "", p, args.max_tokens, args.concurrency)
        for i, p in enumerate(prompts)
    ]


def _engine_cpu_s(server: VllmServer) -> float:
    """Return CPU seconds the engine's processes have used."""
    times = [p.cpu_times() for p in server.processes()["engine"]]
    return float(sum(t.user + t.system for t in times))


async def _load(
    session: aiohttp.ClientSession, server: VllmServer, block: list[StreamRequest]
) -> tuple[float, float, list[RequestResult]]:
    """Return output tokens/s and tokens per engine CPU second, and the results."""
    cpu_s = _engine_cpu_s(server)
    origin_s = time.perf_counter()
    results = await replay(
        session, server.url, SERVED_NAME, block, origin_s, lambda _: None
    )
    cpu_s = _engine_cpu_s(server) - cpu_s
    failed = [r.error for r in results if not r.ok]
    if failed:
        raise RuntimeError(f"{len(failed)} requests failed: {failed[0]}")
    duration_s = max(r.end_s or 0.0 for r in results) - results[0].start_s
    await asyncio.sleep(PAUSE_S)
    tokens = sum(len(r.token_ids) for r in results)
    return tokens / duration_s, tokens / cpu_s, results


async def _measure(
    on: VllmServer, off: VllmServer, prompts: list[str], args: argparse.Namespace
) -> dict[str, object]:
    rates: dict[str, list[float]] = {"on": [], "off": []}
    cpu_rates: dict[str, list[float]] = {"on": [], "off": []}
    per_block = args.requests_per_block
    needed = (args.pairs + 1) * per_block
    if args.repeat_prompts:
        prompts = [prompts[i % len(prompts)] for i in range(needed)]
    if len(prompts) < needed:
        raise SystemExit(f"{needed} prompts are needed, there are {len(prompts)}")
    identical = True
    async with make_session() as session:
        scraper = Scraper(on.url, time.perf_counter())
        for pair in range(args.pairs + 1):
            # New prompts for every pair: no block profits from the prefix cache.
            block = _block(prompts[pair * per_block :][:per_block], args)
            order = [("off", off), ("on", on)]
            outputs = {}
            for name, server in order if pair % 2 else order[::-1]:
                rate, cpu_rate, results = await _load(session, server, block)
                outputs[name] = [r.token_ids for r in results]
                if pair:  # the first pair warms up
                    rates[name].append(rate)
                    cpu_rates[name].append(cpu_rate)
            identical &= outputs["on"] == outputs["off"]
            if pair:
                ratio = rates["on"][-1] / rates["off"][-1]
                cpu_ratio = cpu_rates["on"][-1] / cpu_rates["off"][-1]
                print(
                    f"pair {pair}: off {rates['off'][-1]:.2f} tok/s, on/off "
                    f"{ratio:.4f}, per CPU second {cpu_ratio:.4f}"
                )
                sys.stdout.flush()
        last = await scraper.read(session)
    rows = last.value("vllm_tide:captured_rows")
    trainers = trainer_statuses(args.run_dir) if args.full else []
    if args.full and [(t["cycles"], t["rows_read"] > 0) for t in trainers] != [
        (0, True)
    ]:
        raise RuntimeError(f"not one trainer that reads and never trains: {trainers}")
    if rows == 0:
        raise RuntimeError("nothing was captured: the comparison would mean nothing")
    return {
        "rates": rates,
        "rates_per_engine_cpu_s": cpu_rates,
        "captured_rows": int(rows),
        "faults": int(last.value("vllm_tide:faults")),
        "trainers": trainers,
        "dropped": last.by_label("vllm_tide:dropped_rows", "reason"),
        "outputs_equal": identical,
    }


def statistics_of(on: list[float], off: list[float]) -> dict[str, object]:
    """Return median, quartiles and a 95% bootstrap interval of the paired ratios."""
    ratios = [a / b for a, b in zip(on, off, strict=True)]
    rng = random.Random(0)
    medians = sorted(
        statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(4000)
    )
    quartiles = statistics.quantiles(ratios, n=4)
    return {
        "median_ratio": round(statistics.median(ratios), 5),
        "quartiles": [round(q, 5) for q in quartiles],
        "min": round(min(ratios), 5),
        "max": round(max(ratios), 5),
        "interval95_of_median": [round(medians[99], 5), round(medians[3899], 5)],
        "cost_percent": round(100 * (1 - statistics.median(ratios)), 3),
        "ratios": [round(r, 5) for r in ratios],
    }


def _server(args: argparse.Namespace, name: str, venv: Path, config: str) -> VllmServer:
    more = ("--no-enable-prefix-caching",) if args.repeat_prompts else ()
    return VllmServer(
        ServerOptions(
            venv=venv,
            model=args.target,
            log_path=args.work / f"server-{name}.log",
            speculative_config=config,
            dtype=args.dtype,
            max_num_seqs=max(8, args.concurrency),
            extra_args=(*more, *args.serve_args),
        )
    )


def _parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    for name in ("--venv", "--target", "--draft", "--prompts", "--work"):
        p.add_argument(name, type=Path, required=True)
    p.add_argument("--off-venv", type=Path, help="of the other server (--venv)")
    p.add_argument("--tide", type=json.loads, default={}, help="JSON: more of `tide`")
    p.add_argument("--full", action="store_true", help="trainer attached, no cycle")
    p.add_argument("--domain", default="python")
    p.add_argument("--pairs", type=int, default=16)
    p.add_argument("--requests-per-block", type=int, default=4)
    p.add_argument("--concurrency", type=int, default=4)
    p.add_argument("--max-tokens", type=int, default=128)
    p.add_argument("--dtype", default="float32")
    p.add_argument("--num-speculative-tokens", type=int, default=3)
    p.add_argument(
        "--repeat-prompts", action="store_true", help="too few: no prefix is cached"
    )
    p.add_argument("--serve-args", type=str.split, default=[], help="of `vllm serve`")
    here = Path(__file__).parent / "results" / "capture_cost.json"
    p.add_argument("--json", type=Path, default=here)
    return p


def main(argv: list[str] | None = None) -> int:
    """Start both servers, measure, write the JSON."""
    args = _parser().parse_args(argv)
    args.work.mkdir(parents=True, exist_ok=True)
    spec = speculative_config(args.draft, args.num_speculative_tokens)
    run_dir = Path(tempfile.mkdtemp(prefix="vllm_tide_cost_"))
    path = args.work / "tide.json"
    args.run_dir = run_dir
    train = {"min_new_tokens": 1 << 40} if args.full else {"autostart": False}
    # Of the presets the one with everything at a static length.
    tide = {"preset": "learn", **args.tide, "run_dir": str(run_dir), "train": train}
    path.write_text(json.dumps({**spec, "tide": tide}, indent=2))
    prompts = read_prompts(args.prompts, args.domain)
    on = _server(args, "on", args.venv, str(path))
    off = _server(args, "off", args.off_venv or args.venv, json.dumps(spec))
    os.sched_setaffinity(0, on.options.other_cpus)
    with on, off:
        for server in (on, off):
            server.wait_ready(lambda _: None, timeout_s=600)
            print(f"{server.options.log_path.stem} ready, {server.startup_s:.0f} s")
        from vllm_tide.transport.rendezvous import read_manifests

        (manifest,) = read_manifests(run_dir)
        command = [sys.executable, "-c", DRAIN, manifest.ring]
        if args.full:
            wait_for_trainer(run_dir, LiveView("on", 0, run_dir))
            measured = asyncio.run(_measure(on, off, prompts, args))
        else:
            with subprocess.Popen(command) as drain:
                try:
                    measured = asyncio.run(_measure(on, off, prompts, args))
                finally:
                    drain.terminate()
        misplaced = on.misplaced_threads() + off.misplaced_threads()
    rates, cpu_rates = measured["rates"], measured["rates_per_engine_cpu_s"]
    report = {
        "what": "output tokens/s with capture on / "
        + ("off" if args.off_venv is None else "of the other environment")
        + (", trainer attached, no cycle" if args.full else ", trainer off")
        + ", paired",
        **statistics_of(rates["on"], rates["off"]),
        "per_engine_cpu_second": statistics_of(cpu_rates["on"], cpu_rates["off"]),
        **measured,
        "misplaced_threads": misplaced,
        "settings": {k: str(v) for k, v in vars(args).items()},
        "environment": environment({}),
    }
    write_json(args.json, report)
    per_cpu = report["per_engine_cpu_second"]
    print(
        f"median on/off {report['median_ratio']}, cost {report['cost_percent']}%; "
        f"per CPU second {per_cpu['median_ratio']}, cost {per_cpu['cost_percent']}%"
    )
    return int(bool(misplaced))


if __name__ == "__main__":
    end_on_signals()
    sys.exit(main())
