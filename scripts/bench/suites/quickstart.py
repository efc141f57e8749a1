"""Three arms on one stream of a real model: no speculation, frozen draft, vllm_tide.

Run by `scripts/quickstart.sh`. Every arm serves the same prompts in the model's chat
template, in the same order and on the same cores, in slices of a few requests while the
others are stopped. The static length of the frozen draft is the fastest one on other
prompts of the first domain. The exit status is 0 only if the run was sound.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any

import aiohttp

from vllm_tide.config import parse_tide
from vllm_tide.speculative import FRESH, METHODS, merged
from vllm_tide.train.step import has_fast_bfloat16

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]
from bench.harness.arm import ArmOptions, ArmRun
from bench.harness.arms import STATIC
from bench.harness.common import (
    ServerError,
    StreamError,
    clock_text,
    draft_method,
)
from bench.harness.identity import Rescored, compare_arms, rescore_all
from bench.harness.interleave import SLICE_REQUESTS, InterleavedArm, slices
from bench.harness.options import all_cpus, json_object, list_of
from bench.harness.plots import draw
from bench.harness.quickstart_report import (
    ARMS,
    answers_text,
    build_report,
    problems,
    sentence,
    table,
)
from bench.harness.server import (
    RESERVE_MIB,
    ServerOptions,
    VllmServer,
    available_mib,
    end_on_signals,
    leave_if_ended,
)
from bench.harness.stream import (
    StreamOptions,
    StreamRequest,
    build_stream,
    chat_prompts,
    segments,
)
from bench.harness.summary import stretches, throughput

CONTROLLED = ("control", "tide")
"""Arms with a `tide` section; `control` does not learn and is not an arm by default."""
STATIC_LENGTHS = (3,)
"""For the committed draft on math 3 is as fast as 1 and faster than 5."""
PROMPTS = Path(__file__).resolve().parents[2] / "demo" / "chat_prompts"
IDENTITY_REQUESTS = 24
IDENTITY_TOKENS = 32
"""Output tokens of the comparison in float32, if another type is served."""


def speculative_config(
    draft: Path, num_speculative_tokens: int, method: str | None = None
) -> dict[str, Any]:
    """Return the speculative config shared by the frozen and the TIDE arm.

    Args:
        method: Kind of a fresh draft; None: EAGLE-3.
    """
    return {
        "method": method if method and str(draft) == FRESH else draft_method(draft),
        "model": str(draft),
        "num_speculative_tokens": num_speculative_tokens,
    }


def tide_section(run_dir: Path) -> dict[str, Any]:
    """Return the `tide` section of the trained arm: the defaults."""
    return {"run_dir": str(run_dir)}


def mode_of(section: Mapping[str, Any]) -> str:
    """Return "full" if a `tide` section keeps the default of every part."""
    tide, full = parse_tide(dict(section)), parse_tide({})
    parts = ("capture.enabled", "train.autostart", "deploy.canary", "swap.enabled")
    same = all(attrgetter(p)(tide) == attrgetter(p)(full) for p in parts)
    return "full" if same and tide.control == full.control else "changed"


def _is_fresh(args: argparse.Namespace) -> bool:
    return str(args.draft) == FRESH


def _arm_options(args: argparse.Namespace, name: str) -> ArmOptions:
    config: str | None = None
    run_dir: Path | None = None
    trains = False
    spec = speculative_config(args.draft, args.num_speculative_tokens, args.method)
    if name == "frozen":
        config = json.dumps(speculative_config(args.draft, args.frozen_length))
    elif static := STATIC.match(name):
        config = json.dumps(speculative_config(args.draft, int(static[1])))
    elif name in CONTROLLED:
        # A short path, because sockets are there too; mode 0700.
        run_dir = Path(tempfile.mkdtemp(prefix="vllm_tide_quickstart_"))
        path = args.work / f"{name}.json"
        section = merged(tide_section(run_dir), args.tide)
        if name == "control":
            section = merged(section, {"preset": "control"})
        trains = name == "tide" and parse_tide(section).train.autostart
        path.write_text(json.dumps({**spec, "tide": section}, indent=2) + "\n")
        config = str(path)
    server = ServerOptions(
        venv=args.venv,
        model=args.target,
        log_path=args.work / f"server-{name}.log",
        speculative_config=config,
        dtype=args.dtype,
        engine_cpus=args.engine_cpus,
        other_cpus=args.other_cpus,
        scheduler_apart=True,
        enforce_eager=not args.compile,
    )
    return ArmOptions(name, server, run_dir, args.time_limit_s, trains)


def _keep_logs(name: str, run_dir: Path | None, work: Path) -> None:
    if run_dir is None or not run_dir.exists():
        return
    archive = work / f"{name}-run"
    shutil.rmtree(archive, ignore_errors=True)
    shutil.copytree(run_dir, archive)
    shutil.rmtree(run_dir, ignore_errors=True)


ARM_ERRORS = (ServerError, TimeoutError, RuntimeError, OSError, aiohttp.ClientError)
"""Exceptions after which an arm is skipped."""


def _try(name: str, serve: Callable[[], object]) -> bool:
    """Return whether `serve` succeeded; print the reason if not."""
    try:
        serve()
    except ARM_ERRORS as error:
        reason = str(error) or "took longer than its limit"
        print(f"[{name:>6}] left out: {type(error).__name__}: {reason}", flush=True)
        return False
    return True


def serve_interleaved(
    args: argparse.Namespace, names: Sequence[str], stream: Sequence[StreamRequest]
) -> dict[str, ArmRun]:
    """Serve the stream by all arms, with resident servers; leave out failing arms.

    `CONTROLLED` arms start alone, because they measure step times at the start.
    """
    arms: dict[str, InterleavedArm] = {}
    with ExitStack() as stack:

        def leave_out(name: str) -> None:
            arms.pop(name).server.stop()

        def start(name: str) -> None:
            options = _arm_options(args, name)
            stack.callback(_keep_logs, name, options.run_dir, args.work)
            server = stack.enter_context(VllmServer(options.server))
            arms[name] = InterleavedArm(server, options, len(stream))

        def in_time(name: str) -> bool:
            leave_if_ended()
            if time.monotonic() < args.deadline:
                return True
            print(f"[{name:>6}] left out: the time limit is over", flush=True)
            return False

        plain = [name for name in names if name not in CONTROLLED]
        alone = [[name] for name in names if name in CONTROLLED]
        for group in filter(None, (plain, *alone)):
            print(f"starting {', '.join(group)}", flush=True)
            started = [n for n in group if in_time(n) and _try(n, partial(start, n))]
            for name in started:
                if not _try(name, arms[name].ready):
                    leave_out(name)
        began, done = time.monotonic(), 0
        for part, ends in slices(stream, args.limits):
            for name, arm in list(arms.items()):
                serve = partial(arm.serve, part, ends)
                if not (in_time(name) and _try(name, serve)):
                    leave_out(name)
            done += len(part)
            spent = time.monotonic() - began
            total = sum(args.limits.values()) or spent * len(stream) / done
            print(
                f"{part[-1].domain:>6} {done:4}  tokens/s: "
                + "  ".join(f"{name} {arm.recent()}" for name, arm in arms.items())
                + f"  left: {clock_text(max(0.0, total - spent))}",
                flush=True,
            )
        return {name: arm.end() for name, arm in arms.items()}


FIRST_SHARE = 0.15
"""Share of the time for the domain before the first shift."""
ALONE_REQUESTS = 64
"""Maximum requests of each domain if arms run one after another."""
SERVER_MIB = 4100.0
"""Memory of a server of SmolLM2 in float32: three servers and the trainer took 12.2
GiB without shared file pages."""


def num_together(args: argparse.Namespace) -> int:
    """Return the number of resident servers: all, or one if memory is short."""
    count = max(len(args.arms), len(args.static_lengths) if args.probes else 0)
    need, have = count * SERVER_MIB, available_mib() - RESERVE_MIB
    if need <= have:
        return count
    print(
        f"{count} servers need {need / 1024:.1f} GiB together and "
        f"{max(0.0, have) / 1024:.1f} GiB are free: arms run one after another, so "
        "other load on the machine affects their ratios",
        flush=True,
    )
    return 1


def serve_all(
    args: argparse.Namespace,
    stream: Sequence[StreamRequest],
    probe: Sequence[StreamRequest],
) -> dict[str, ArmRun]:
    """Serve all arms; set `args.together`, `args.static_rates`, `args.frozen_length`.

    Arms that run one after another serve the same number of requests without a time
    limit.
    """
    args.together = num_together(args)
    limits, args.limits = args.limits if args.together > 1 else {}, {}
    if args.minutes and not limits:
        stream = [r for part in segments(stream) for r in part[:ALONE_REQUESTS]]

    def serve(names: list[str], stream: Sequence[StreamRequest]) -> dict[str, ArmRun]:
        runs: dict[str, ArmRun] = {}
        for first in range(0, len(names), args.together):
            group = names[first : first + args.together]
            runs |= serve_interleaved(args, group, stream)
        return runs

    if args.probes:
        lengths = {f"static{n}": n for n in args.static_lengths}
        probes = serve(list(lengths), probe)
        rates = {lengths[n]: throughput(run.segments) for n, run in probes.items()}
        args.static_rates = {n: round(rate or 0.0, 3) for n, rate in rates.items()}
        if rates:
            args.frozen_length = max(args.static_rates, key=args.static_rates.get)
    args.limits = limits
    return serve(args.arms, stream)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="quickstart", description=__doc__.split("\n")[0])
    p.add_argument(
        "--venv",
        type=Path,
        default=Path(sys.prefix),
        help="environment with patched vLLM",
    )
    p.add_argument(
        "--target",
        "--model",
        type=Path,
        required=True,
        help="folder of the served model",
    )
    text = "draft folder, or `fresh` (default)"
    p.add_argument("--draft", type=Path, default=Path(FRESH), help=text)
    text = "kind of a fresh draft (default: eagle3)"
    p.add_argument("--method", choices=METHODS, help=text)
    text = "folder of <domain>.jsonl.gz (default: the demo's)"
    p.add_argument("--prompts", type=Path, default=PROMPTS, help=text)
    text = "folder for logs and configuration (default: FILE.work)"
    p.add_argument("--work", type=Path, help=text)
    p.add_argument("--json", type=Path, help="write the report here")
    p.add_argument("--picture", type=Path, help="write the PNG here")
    text = "default: none frozen tide, without `frozen` for a fresh draft; `control` "
    text += "is the frozen draft with control and memory"
    p.add_argument("--arms", nargs="+", choices=(*ARMS, "control"), help=text)
    p.add_argument(
        "--min-swaps", type=int, default=1, help="a run with fewer is not sound"
    )
    d = StreamOptions()
    text = "domains in order, as in math,sql,tools,math"
    p.add_argument("--domains", type=list_of(str), default=d.domains, help=text)
    text = "maximum requests of each domain, as in 16,64,64,16"
    p.add_argument("--requests", type=list_of(int), default=d.counts, help=text)
    text = "total time of all arms; 0: until --requests are served"
    p.add_argument("--minutes", type=float, default=8.0, help=text)
    text = "requests of the first domain for the choice of the static length"
    p.add_argument("--probe-requests", type=int, default=12, help=text)
    p.add_argument("--max-tokens", type=int, default=d.max_tokens)
    p.add_argument(
        "--concurrency",
        type=list_of(int),
        default=d.concurrency_cycle,
        help="requests in flight, per block of four requests, as in 1,2,4",
    )
    p.add_argument("--seed", type=int, default=d.seed)
    p.add_argument("--num-speculative-tokens", type=int, default=5)
    p.add_argument(
        "--static-lengths",
        type=list_of(int),
        default=STATIC_LENGTHS,
        help="candidates for the frozen draft, as in 1,3,5",
    )
    text = "auto: bfloat16 if the CPU has fast bfloat16"
    choices = ("auto", "float32", "bfloat16")
    p.add_argument("--dtype", choices=choices, default="auto", help=text)
    p.add_argument("--engine-cpus", type=list_of(int), default=all_cpus()[:1])
    p.add_argument(
        "--other-cpus",
        type=list_of(int),
        default=all_cpus()[1:2] or all_cpus(),
        help="cores of API server, client and trainer",
    )
    p.add_argument(
        "--compile", action="store_true", help="serve without --enforce-eager"
    )
    p.add_argument(
        "--tide", type=json_object, default={}, help="JSON merged into the tide section"
    )
    p.add_argument(
        "--time-limit-s", type=float, default=1800.0, help="time limit of an arm"
    )
    p.add_argument(
        "--total-limit-s", type=float, default=5400.0, help="time limit of all arms"
    )
    return p


def _streams(
    args: argparse.Namespace,
) -> tuple[list[StreamRequest], list[StreamRequest], dict[str, Any]]:
    """Return the stream, probe requests for the static length, and the options.

    Sets `args.limits`: seconds of each segment.

    Raises:
        StreamError: There are too few prompts, or not one number per domain.
    """
    options = StreamOptions(
        domains=args.domains,
        counts=args.requests,
        max_tokens=args.max_tokens,
        concurrency_cycle=args.concurrency,
        seed=args.seed,
    )
    if len(args.domains) != len(args.requests) or min(args.requests, default=0) < 1:
        raise StreamError("--requests: give a number of at least 1 for each domain")
    if any(a == b for a, b in pairwise(args.domains)):
        raise StreamError("--domains: a domain is repeated in a row; give it once")
    prompts = {
        name: chat_prompts(args.prompts, name, args.target)
        for name in dict.fromkeys(args.domains)
    }
    more = args.probe_requests if args.probes else 0
    stream, probe = build_stream(prompts, options, more)
    first, *later = (part[0].segment for part in segments(stream))
    args.limits = {}
    if args.minutes:
        seconds = 60 * args.minutes * (1 - FIRST_SHARE * bool(later))
        args.limits = {name: seconds / max(1, len(later)) for name in later}
        args.limits[first] = 60 * args.minutes - sum(args.limits.values())
    return stream, probe, asdict(options)


def in_float32(
    args: argparse.Namespace, stream: Sequence[StreamRequest]
) -> tuple[list[Rescored], list[str]]:
    """Compare `none` and `tide` in float32, on requests of all domains.

    Returns:
        The differences, and the reasons why the comparison is incomplete.
    """
    step = max(1, len(stream) // IDENTITY_REQUESTS)
    sample = [
        replace(request, max_tokens=IDENTITY_TOKENS)
        for request in stream[::step][:IDENTITY_REQUESTS]
    ]
    print(f"answering {len(sample)} requests in float32 as well", flush=True)
    args = argparse.Namespace(**{**vars(args), "dtype": "float32"})
    args.limits = {}
    runs = serve_interleaved(args, ("none", "tide"), sample)
    answered = [r for run in runs.values() for r in run.results if r.ok]
    reasons = []
    if len(answered) < 2 * len(sample):
        reasons.append(
            f"{len(answered)} of {2 * len(sample)} requests were answered in float32"
        )
    differences = compare_arms({name: run.results for name, run in runs.items()})
    return rescore_all(differences, args.target, "float32"), reasons


def main(argv: Sequence[str] | None = None) -> int:
    args = (options := parser()).parse_args(argv)
    if args.work is None:
        if args.json is None:
            options.error("give --json FILE or --work DIR")
        args.work = args.json.with_name(args.json.name + ".work").resolve()
    if args.arms is None:
        args.arms = [name for name in ARMS if name != "frozen" or not _is_fresh(args)]
    args.work.mkdir(parents=True, exist_ok=True)
    if args.dtype == "auto":
        args.dtype = "bfloat16" if has_fast_bfloat16() else "float32"
    args.static_lengths = tuple(dict.fromkeys(args.static_lengths))
    args.probes = "frozen" in args.arms and len(args.static_lengths) > 1
    try:
        stream, probe, stream_facts = _streams(args)
    except StreamError as error:
        options.error(str(error))
    began = time.monotonic()
    # The engine's cores are reserved; the client runs on the other cores.
    os.sched_setaffinity(0, args.other_cpus)
    args.deadline = began + args.total_limit_s
    args.frozen_length, args.static_rates = args.static_lengths[0], {}
    print(
        f"{args.target.name} in {args.dtype}, arms {', '.join(args.arms)}: prompts of "
        + " then ".join(args.domains)
        + (f", for {args.minutes:g} minutes" if args.minutes else ""),
        flush=True,
    )
    runs = serve_all(args, stream, probe)
    differences = compare_arms({name: run.results for name, run in runs.items()})
    print(f"comparing answers: {len(differences)} first differences", flush=True)
    rescored = rescore_all(differences, args.target, args.dtype)
    incomplete: list[str] = []
    if args.dtype != "float32" and {"none", "tide"} <= runs.keys():
        more, incomplete = in_float32(args, stream)
        rescored += more
    served = next(iter(runs.values()), ArmRun("", [], [], 0.0))
    counts = [
        sum(len(part.results) for part in parts) for parts in stretches(served).values()
    ]
    facts = {
        "model": args.target.name,
        "dtype": args.dtype,
        "draft": Path(args.draft).name,
        "engine_cpus": args.engine_cpus,
        "client_api_trainer_cpus": args.other_cpus,
        "enforce_eager": not args.compile,
        "num_speculative_tokens": args.num_speculative_tokens,
        "frozen_length": args.frozen_length,
        "static_tokens_per_s_before_shift": args.static_rates,
        "stream": stream_facts | {"counts": counts},
        "requests_in_a_turn": SLICE_REQUESTS,
        "servers_together": args.together,
        "wall_clock_s": round(time.monotonic() - began, 1),
    }
    report = {"mode": mode_of(args.tide), **build_report(runs, rescored, facts)}
    reasons = problems(report, runs, args.min_swaps) + incomplete
    report["sound"], report["problems"] = not reasons, reasons
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if args.picture and runs:
        draw(report, args.picture)
    if {"none", "tide"} <= runs.keys() and not reasons:
        text = answers_text(runs, stream, args.target)
        (args.work / "answers.md").write_text(text + "\n", encoding="utf-8")
    print(table(report) if runs else "no arm ran")
    for reason in reasons:
        print(f"NOT SOUND: {reason}")
    print(sentence(report))
    return int(bool(reasons))


if __name__ == "__main__":
    end_on_signals()
    sys.exit(main())
