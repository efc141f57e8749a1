r"""Swap soak under load: 200 swaps by default, alternating between two drafts.

There is one server with capture and no trainer.  The request set first runs without a
swap (the reference), then repeatedly while this process publishes drafts like a
trainer, each as soon as the engine reports the previous one.  The report compares
outputs with the reference (near ties re-scored) and has failed requests, memory and
shared memory before and after, and pauses in ms and in decode steps.  Example::

    python scripts/bench/swap_soak.py --venv .venv --target build/.../target-X \
        --draft scripts/demo/draft --prompts scripts/demo/prompts --work /tmp/soak
"""

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import aiohttp
import numpy as np
import safetensors

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]
from bench.harness.client import RequestResult, make_session, replay
from bench.harness.common import environment, write_json
from bench.harness.identity import compare, rescore_all
from bench.harness.scrape import Scraper
from bench.harness.server import SERVED_NAME, ServerOptions, VllmServer, end_on_signals
from bench.harness.stream import StreamRequest, read_prompts
from bench.harness.summary import acceptance_length, step_ms, swap_pauses_s
from bench.suites.quickstart import speculative_config
from vllm_tide.transport.draft_weights import DraftWeights, TensorBytes
from vllm_tide.transport.rendezvous import EngineManifest, read_manifests
from vllm_tide.transport.versions import first_version, number_of
from vllm_tide.transport.weights import WeightsWriter

DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64"}
Tensors = dict[str, TensorBytes]


def read_draft(folder: Path) -> Tensors:
    """Read a draft's published tensors, without the vocabulary maps."""
    tensors: Tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, info in safetensors.deserialize(path.read_bytes()):
            if name not in ("d2t", "t2d"):
                data = np.frombuffer(info["data"], np.uint8)
                dtype, shape = DTYPES[info["dtype"]], tuple(info["shape"])
                tensors[name] = TensorBytes(dtype, shape, data)
    return tensors


def damaged(tensors: Tensors, seed: int) -> Tensors:
    """Return another valid draft: the rows of ``fc`` permuted."""
    dtype, shape, data = tensors["fc.weight"]
    rows = np.frombuffer(data, np.uint8).reshape(shape[0], -1)
    order = np.random.default_rng(seed).permutation(shape[0])
    data = rows[order].copy().ravel()
    return {**tensors, "fc.weight": TensorBytes(dtype, shape, data)}


def shared_memory(manifest: EngineManifest) -> dict[str, dict[str, int]]:
    """Return size and used bytes of each of the engine's segments."""
    segments = {}
    for name in (manifest.ring, manifest.weights):
        path = Path("/dev/shm") / name
        if path.exists():
            stat = path.stat()
            segments[name] = {"size": stat.st_size, "in_use": stat.st_blocks * 512}
    return segments


async def publish_all(
    writer: WeightsWriter, drafts: list[Tensors], num_swaps: int, period_s: float
) -> None:
    """Publish the drafts alternately, each after the previous one is installed."""
    first = number_of(writer.latest_version) + 1
    for number in range(first, first + num_swaps):
        version = first_version(number)
        writer.publish(DraftWeights.encode(drafts[number % 2], version))
        began = time.monotonic()
        while (feedback := writer.feedback()).installed_version < version:
            if feedback.refused_version == version:
                raise RuntimeError(f"refused: {feedback.refused_reason}")
            if time.monotonic() - began > 60:
                raise RuntimeError(f"version {number} was not installed in 60 s")
            await asyncio.sleep(0.01)
        await asyncio.sleep(max(0.0, period_s - (time.monotonic() - began)))


def _engine_mib(server: VllmServer) -> dict[str, float]:
    engine = server.memory_mib().get("engine", {})
    return {name: round(mib, 1) for name, mib in engine.items()}


async def soak(
    server: VllmServer,
    requests: list[StreamRequest],
    writer: WeightsWriter,
    drafts: list[Tensors],
    args: argparse.Namespace,
) -> dict[str, object]:
    """Run the reference, then the load with swaps; return the measurements."""
    origin_s = time.perf_counter()
    results: list[RequestResult] = []

    async def once(session: aiohttp.ClientSession) -> list[RequestResult]:
        return await replay(
            session, server.url, SERVED_NAME, requests, origin_s, results.append
        )

    async with make_session() as session:
        await once(session)  # warm up, and touch all pages of the ring
        reference = await once(session)
        before = _engine_mib(server)
        scraper = Scraper(server.url, origin_s, period_s=0.25)
        first = await scraper.read(session)
        watcher = asyncio.create_task(scraper.run(session, lambda _: None))
        publisher = asyncio.create_task(
            publish_all(writer, drafts, args.swaps, args.period_s)
        )
        passes: list[list[RequestResult]] = []
        halfway: dict[str, float] = {}
        while not publisher.done():
            passes.append(await once(session))
            count = scraper.samples[-1].value("vllm_tide:swaps")
            if not halfway and count >= args.swaps / 2:
                halfway = _engine_mib(server)
            print(f"pass {len(passes)}: {count:.0f} swaps, {_engine_mib(server)}")
            sys.stdout.flush()
        await publisher
        await asyncio.sleep(1)
        watcher.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watcher
        last = await scraper.read(session)
    return {
        "reference": reference,
        "passes": passes,
        "samples": scraper.samples,
        "acceptance_length": acceptance_length([(first, last)]),
        "swaps": int(last.value("vllm_tide:swaps") - first.value("vllm_tide:swaps")),
        "refused": last.by_label("vllm_tide:refused_drafts", "reason"),
        "max_s": last.value("vllm_tide:longest_swap_seconds"),
        "mean_s": last.value("vllm_tide:swap_seconds_sum")
        / max(1.0, last.value("vllm_tide:swap_seconds_count")),
        "memory_mib": {
            "before": before,
            "halfway": halfway,
            "after": _engine_mib(server),
        },
    }


def report_of(measured: dict, args: argparse.Namespace) -> dict[str, object]:
    """Return the JSON: comparisons, pauses, memory."""
    passes = measured["passes"]
    differences = []
    for number, results in enumerate(passes, start=1):
        names = ("reference", f"pass {number}")
        differences += compare(names, measured["reference"], results)
    rescored = rescore_all(differences, args.target, args.dtype)
    every = [r for results in passes for r in results]
    pauses = swap_pauses_s(measured["samples"])
    exact = pauses is not None and len(pauses) == measured["swaps"]
    one_step_ms = step_ms(measured["reference"]) or 0.0
    p50 = statistics.median(pauses) if exact and pauses else measured["mean_s"]
    return {
        "what": "drafts swapped under load, two drafts alternately",
        "swaps": measured["swaps"],
        "refused": measured["refused"],
        "requests": len(every),
        "failed_requests": sum(not r.ok for r in every),
        "outputs_identical": all(item.near_tie for item in rescored),
        "near_ties": sum(item.near_tie for item in rescored),
        "differences": [item.summary() for item in rescored][:50],
        "pause_ms": {
            "p50": round(1e3 * p50, 3),
            "p50_is": "median" if exact else "mean (some swaps were not seen singly)",
            "max": round(1e3 * measured["max_s"], 3),
        },
        "step_ms": round(one_step_ms, 3),
        "pause_steps": {
            "p50": round(1e3 * p50 / one_step_ms, 3),
            "max": round(1e3 * measured["max_s"] / one_step_ms, 3),
        },
        "longest_gap_ms": {
            "without_swaps": round(
                1e3 * max(r.max_gap_s for r in measured["reference"]), 1
            ),
            "with_swaps": round(1e3 * max(r.max_gap_s for r in every), 1),
        },
        "acceptance_length": measured["acceptance_length"],
        "memory_mib": measured["memory_mib"],
    }


def _parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    for name in ("--venv", "--target", "--draft", "--prompts", "--work"):
        p.add_argument(name, type=Path, required=True)
    p.add_argument("--domain", default="python")
    p.add_argument("--swaps", type=int, default=200)
    p.add_argument(
        "--period-s", type=float, default=0.5, help="seconds between two swaps"
    )
    p.add_argument("--requests", type=int, default=16)
    p.add_argument("--concurrency", type=int, default=4)
    p.add_argument("--max-tokens", type=int, default=96)
    p.add_argument("--dtype", default="float32")
    p.add_argument(
        "--compile", action="store_true", help="serve without --enforce-eager"
    )
    p.add_argument("--num-speculative-tokens", type=int, default=3)
    here = Path(__file__).parent / "results" / "swap_soak.json"
    p.add_argument("--json", type=Path, default=here)
    return p


def main(argv: list[str] | None = None) -> int:
    """Serve, soak, report; return exit status 0 only without problems."""
    args = _parser().parse_args(argv)
    args.work.mkdir(parents=True, exist_ok=True)
    run_dir = Path(tempfile.mkdtemp(prefix="vllm_tide_soak_"))
    spec = speculative_config(args.draft, args.num_speculative_tokens)
    # With a static length the damaged draft drafts too.
    tide = {"run_dir": str(run_dir), "preset": "learn", "train": {"autostart": False}}
    config = args.work / "tide.json"
    config.write_text(json.dumps({**spec, "tide": tide}, indent=2))
    first = read_draft(args.draft)
    drafts = [first, damaged(first, 0)]
    prompts = read_prompts(args.prompts, args.domain)[: args.requests]
    blank = StreamRequest(0, "soak", "", "", args.max_tokens, args.concurrency)
    requests = [replace(blank, index=i, prompt=p) for i, p in enumerate(prompts)]
    options = ServerOptions(
        venv=args.venv,
        model=args.target,
        log_path=args.work / "server.log",
        speculative_config=str(config),
        dtype=args.dtype,
        enforce_eager=not args.compile,
    )
    os.sched_setaffinity(0, options.other_cpus)
    with VllmServer(options) as server:
        server.wait_ready(lambda _: None, timeout_s=600)
        print(f"server ready after {server.startup_s:.0f} s")
        (manifest,) = read_manifests(run_dir)
        segments_up = shared_memory(manifest)
        writer = WeightsWriter.attach(manifest.weights)
        measured = asyncio.run(soak(server, requests, writer, drafts, args))
        segments_end = shared_memory(manifest)
        clean = server.stop()
    left = shared_memory(manifest)
    report = report_of(measured, args) | {
        "shared_memory_bytes": {
            "server_up": list(segments_up.values()),
            "after_swaps": list(segments_end.values()),
            "left_after_stop": sorted(left),
        },
        "stopped_cleanly": clean,
        "settings": {k: str(v) for k, v in vars(args).items()},
        "environment": environment({}),
    }
    write_json(args.json, report)
    shown = {k: v for k, v in report.items() if k not in ("settings", "environment")}
    print(json.dumps(shown, indent=1))
    good = (
        report["outputs_identical"]
        and not report["failed_requests"]
        and report["swaps"] >= args.swaps
        and not left
        and clean
    )
    return int(not good)


if __name__ == "__main__":
    end_on_signals()
    sys.exit(main())
