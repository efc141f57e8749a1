"""Four arms on one stream: none, a frozen draft, all but learning, everything.

Run by `scripts/quickstart.sh`; every arm gets the same prompts in the same order, the
same number of tokens, the same cores, in turns of a few requests while the others are
stopped. The frozen draft is served at the static length that was the fastest on other
prompts of the domain before the shift. Exit status 0 only if the run was sound.
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
from operator import attrgetter
from pathlib import Path
from typing import Any

import aiohttp

from vllm_tide.config import parse_tide
from vllm_tide.speculative import merged

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]
from bench.harness.arm import ArmOptions, ArmRun
from bench.harness.arms import STATIC
from bench.harness.common import (
    ServerError,
    StreamError,
    cell_text,
    columns_text,
    environment,
)
from bench.harness.identity import Rescored, compare_arms, rescore_all
from bench.harness.options import all_cpus, json_object, list_of
from bench.harness.plots import draw
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
    read_prompts,
)
from bench.harness.summary import (
    arm_figures,
    capture_figures,
    first_swap_after_shift_s,
    first_swap_split_s,
    request_columns,
    step_ms,
    swap_figures,
    swap_times_s,
    throughput,
)
from bench.harness.turns import TURN_REQUESTS, TurnTaker, turns

ARMS = ("none", "frozen", "no_learning", "tide")
STATIC_LENGTHS = (1, 3, 5)


def build_report(
    runs: Mapping[str, ArmRun], rescored: Sequence[Rescored], facts: Mapping[str, Any]
) -> dict[str, Any]:
    """Documented JSON object (with a few keys more)."""
    run = runs.get("tide", ArmRun("tide", [], [], 0.0))
    tide = run.samples
    failed = sum(not r.ok for run in runs.values() for r in run.results)
    compared = len(runs) > 1 and all(run.results for run in runs.values())
    return {
        "arms": {
            name: {**arm_figures(run), "requests": _requests(run)}
            for name, run in runs.items()
        },
        "swaps": {**swap_figures(tide), "at_s": swap_times_s(tide)},
        "first_swap_after_shift_s": first_swap_after_shift_s(run),
        "first_swap_split_s": first_swap_split_s(run),
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
        "verify_step_price": verify_step_price(runs),
        "environment": environment(facts),
    }


def _requests(run: ArmRun) -> dict[str, list[Any]]:
    """Answered requests of an arm in the order of the stream."""
    answered = [result for result in run.results if result.ok]
    return request_columns(sorted(answered, key=attrgetter("index")))


def gains(runs: Mapping[str, ArmRun]) -> dict[str, Any]:
    """TIDE against the other arms in the final quarter, for a reader."""
    figures: dict[str, Any] = {name: arm_figures(runs[name]) for name in runs}
    result: dict[str, Any] = {}
    tide = figures.pop("tide", None)
    if tide is None:
        return result
    for name, other in figures.items():
        for key, faster in (
            ("output_tokens_per_s", f"tokens_per_s_speedup_over_{name}"),
            ("mean_e2e_s", f"latency_speedup_over_{name}"),
        ):
            new, old = (f[f"{key}_by_phase"]["final"] for f in (tide, other))
            if new and old:
                ratio = new / old if key == "output_tokens_per_s" else old / new
                result[f"final_{faster}"] = round(ratio, 4)
        new, old = tide["output_tokens_per_s"], other["output_tokens_per_s"]
        if new and old:
            result[f"whole_tokens_per_s_speedup_over_{name}"] = round(new / old, 4)
    if "frozen" in figures:
        lengths = (f["acceptance_length"]["final"] for f in (tide, figures["frozen"]))
        new, old = lengths
        if new is not None and old is not None:
            result["final_acceptance_length_over_frozen"] = round(new - old, 4)
    return result


def verify_step_price(runs: Mapping[str, ArmRun]) -> float | None:
    """Time of a verify step of the frozen draft over a plain one; medians."""
    if not {"none", "frozen"} <= set(runs):
        return None
    plain, verify = (step_ms(runs[name].results) for name in ("none", "frozen"))
    return round(verify / plain, 4) if plain and verify else None


def problems(
    report: Mapping[str, Any], runs: Mapping[str, ArmRun], min_swaps: int = 1
) -> list[str]:
    """Reasons for which the run is not sound."""
    found = [f"arm {name} is missing" for name in ARMS if name not in runs]
    for name, run in runs.items():
        found += [f"{name}: {problem}" for problem in run.problems]
        if run.segments and not run.results:
            found.append(f"{name}: no request ran")
    if report["failed_requests"]:
        found.append(f"{report['failed_requests']} requests failed")
    if len(runs) < 2:
        found.append("outputs were not compared")
    elif not report["outputs_identical"]:
        wrong = sum(not d["near_tie"] for d in report["differences"])
        found.append(f"outputs differ between arms ({wrong} not near ties)")
    for name in ("frozen", "no_learning", "tide"):
        figures = report["arms"].get(name)
        if not figures or None not in figures["acceptance_length"].values():
            continue
        # Control may find that no draft pays; it counts the rounds it leaves out.
        if not any(s.value("vllm_tide:off_rounds") for s in runs[name].samples[-1:]):
            found.append(f"{name}: nothing was drafted in some phase")
    if "tide" in runs:
        if report["swaps"]["count"] < min_swaps:
            found.append(
                f"{report['swaps']['count']} swaps, at least {min_swaps} wanted"
            )
        if report["capture"]["rows"] == 0:
            found.append("nothing was captured")
        if report["capture"].get("faults"):
            found.append(
                f"{report['capture']['faults']} faults in the engine's tide code"
            )
    return found


def table(report: Mapping[str, Any]) -> str:
    figures = list(report["arms"].values())
    rows = {
        "output tokens/s": [f["output_tokens_per_s"] for f in figures],
        "  final quarter": [
            f["output_tokens_per_s_by_phase"]["final"] for f in figures
        ],
        "mean end-to-end latency, s": [f["mean_e2e_s"] for f in figures],
        "TPOT, ms": [f["tpot_ms"] for f in figures],
        **{
            f"acceptance length, {phase}": [
                f["acceptance_length"][phase] for f in figures
            ]
            for phase in ("before_shift", "after_shift", "final")
        },
        "failed requests": [f["failed_requests"] for f in figures],
    }
    lines = [columns_text(34, list(report["arms"]), rows)]
    swaps, capture = report["swaps"], report["capture"]
    lines += [f"rolled back: {event}" for event in report["rolled_back"]]
    lines += [
        "",
        f"swaps {swaps['count']}, pause p50 {cell_text(swaps['pause_ms_p50'])} ms, "
        f"max {cell_text(swaps['pause_ms_max'])} ms; captured rows {capture['rows']}, "
        f"dropped {capture['dropped']}",
        f"outputs identical: {report['outputs_identical']} "
        f"(near ties: {report['near_ties']})",
        f"verify step over a plain one: {cell_text(report['verify_step_price'])}",
    ]
    split = report["first_swap_split_s"] or {}
    lines.append(
        f"first swap {cell_text(report['first_swap_after_shift_s'])} s after the shift"
        + (": " if split else "")
        + ", ".join(f"{name} {seconds:.1f}" for name, seconds in split.items())
    )
    lines += [f"{name}: {value}" for name, value in report["gain"].items()]
    return "\n".join(lines)


def speculative_config(draft: Path, num_speculative_tokens: int) -> dict[str, Any]:
    """Configuration that the frozen and the TIDE arm share."""
    return {
        "method": "eagle3",
        "model": str(draft),
        "num_speculative_tokens": num_speculative_tokens,
    }


def tide_section(run_dir: Path) -> dict[str, Any]:
    """Demo's `tide` section: the full mode, sized for a short stream."""
    return {
        "run_dir": str(run_dir),
        "train": {
            "batch_tokens": 1024,
            # A new cycle as soon as two requests came; few steps, since more of them
            # on so few requests only cost the core that the client needs too.
            "min_new_tokens": 256,
            "steps_per_cycle": 12,
            "holdout_share": 0.15,
            # The stream is short and public: what is learnt by heart harms nobody.
            "max_passes": 24,
        },
    }


def mode_of(section: Mapping[str, Any]) -> str:
    """Returns "full" if a `tide` section leaves every part as it is by default."""
    tide, full = parse_tide(dict(section)), parse_tide({})
    parts = ("capture.enabled", "train.autostart", "deploy.canary", "swap.enabled")
    same = all(attrgetter(p)(tide) == attrgetter(p)(full) for p in parts)
    return "full" if same and tide.control == full.control else "changed"


def _arm_options(args: argparse.Namespace, name: str) -> ArmOptions:
    config: str | None = None
    run_dir: Path | None = None
    spec = speculative_config(args.draft, args.num_speculative_tokens)
    if name == "frozen":
        config = json.dumps(speculative_config(args.draft, args.frozen_length))
    elif static := STATIC.match(name):
        config = json.dumps(speculative_config(args.draft, int(static[1])))
    elif name in ("no_learning", "tide"):
        # Short: also a place for sockets; private: mode 0700.
        run_dir = Path(tempfile.mkdtemp(prefix="vllm_tide_quickstart_"))
        section = tide_section(run_dir)
        if name == "no_learning":
            section = {"run_dir": str(run_dir), "preset": "control"}
        path = args.work / f"{name}.json"
        text = json.dumps({**spec, "tide": merged(section, args.tide)}, indent=2)
        path.write_text(text + "\n", encoding="utf-8")
        print(f"{path}:\n{text}", flush=True)
        config = str(path)
    server = ServerOptions(
        venv=args.venv,
        model=args.target,
        log_path=args.work / f"server-{name}.log",
        speculative_config=config,
        dtype=args.dtype,
        engine_cpus=args.engine_cpus,
        other_cpus=args.other_cpus,
        enforce_eager=not args.compile,
    )
    return ArmOptions(name, server, run_dir, args.time_limit_s, name == "tide")


def _keep_logs(name: str, run_dir: Path | None, work: Path) -> None:
    if run_dir is None or not run_dir.exists():
        return
    kept = work / f"{name}-run"
    shutil.rmtree(kept, ignore_errors=True)
    shutil.copytree(run_dir, kept)
    shutil.rmtree(run_dir, ignore_errors=True)


CANNOT = (ServerError, TimeoutError, RuntimeError, OSError, aiohttp.ClientError)
"""What serving an arm may end in."""


def _can(name: str, serve: Callable[[], object]) -> bool:
    """Whether `serve` worked; a line says why it did not."""
    try:
        serve()
    except CANNOT as error:
        what = str(error) or "took longer than its limit"
        print(f"[{name:>6}] left out: {type(error).__name__}: {what}", flush=True)
        return False
    return True


def serve_in_turns(
    args: argparse.Namespace, names: Sequence[str], stream: Sequence[StreamRequest]
) -> dict[str, ArmRun]:
    """Arms whose servers are resident together; one that cannot be served is left out.

    Controlled arms measure steps as they start, so each of them starts alone.
    """
    takers: dict[str, TurnTaker] = {}
    with ExitStack() as stack:

        def leave_out(name: str) -> None:
            takers.pop(name).server.stop()

        def start(name: str) -> None:
            options = _arm_options(args, name)
            stack.callback(_keep_logs, name, options.run_dir, args.work)
            server = stack.enter_context(VllmServer(options.server))
            takers[name] = TurnTaker(server, options, len(stream))

        def in_time(name: str) -> bool:
            leave_if_ended()
            if time.monotonic() < args.deadline:
                return True
            print(f"[{name:>6}] left out: the time limit is over", flush=True)
            return False

        plain = [name for name in names if name not in CONTROLLED]
        for group in (plain, *([name] for name in names if name in CONTROLLED)):
            started = [n for n in group if in_time(n) and _can(n, partial(start, n))]
            for name in started:
                if not _can(name, takers[name].ready):
                    leave_out(name)
        for part, ends in turns(stream):
            for name, taker in list(takers.items()):
                turn = partial(taker.take, part, ends)
                if not (in_time(name) and _can(name, turn)):
                    leave_out(name)
        return {name: taker.end() for name, taker in takers.items()}


CONTROLLED = ("no_learning", "tide")
SERVER_MIB = 3200.0
"""Of one server on the inflated demo target: four and the trainer took 12.4 GiB."""


def num_together(args: argparse.Namespace) -> int:
    """Servers that are resident together: all, or one where memory is short."""
    wanted = max(len(args.arms), len(args.static_lengths) if args.probes else 0)
    need, have = wanted * SERVER_MIB, available_mib() - RESERVE_MIB
    if need <= have:
        return wanted
    print(
        f"{wanted} servers need {need / 1024:.1f} GiB together and "
        f"{max(0.0, have) / 1024:.1f} GiB are free: arms run one after another, so "
        "what else the machine does meanwhile is in their ratios",
        flush=True,
    )
    return 1


def serve_all(
    args: argparse.Namespace,
    stream: Sequence[StreamRequest],
    probe: Sequence[StreamRequest],
) -> dict[str, ArmRun]:
    """Every arm; sets `args.together`, `args.static_rates`, `args.frozen_length`."""
    args.together = num_together(args)

    def serve(names: list[str], stream: Sequence[StreamRequest]) -> dict[str, ArmRun]:
        runs: dict[str, ArmRun] = {}
        for first in range(0, len(names), args.together):
            group = names[first : first + args.together]
            runs |= serve_in_turns(args, group, stream)
        return runs

    if args.probes:
        lengths = {f"static{n}": n for n in args.static_lengths}
        tried = serve(list(lengths), probe)
        rates = {lengths[n]: throughput(run.segments) for n, run in tried.items()}
        args.static_rates = {n: round(rate or 0.0, 3) for n, rate in rates.items()}
        if rates:
            args.frozen_length = max(args.static_rates, key=args.static_rates.get)
    return serve(args.arms, stream)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="quickstart", description=__doc__.split("\n")[0])
    p.add_argument("--venv", type=Path, default=Path(sys.prefix), help="patched vLLM")
    p.add_argument("--target", type=Path, required=True, help="served (inflated) model")
    p.add_argument("--draft", type=Path, required=True, help="EAGLE-3 draft folder")
    p.add_argument("--prompts", type=Path, required=True, help="<domain>.jsonl.gz")
    p.add_argument("--work", type=Path, required=True, help="logs and configuration")
    p.add_argument("--json", type=Path, help="write the report here")
    p.add_argument("--picture", type=Path, help="write the PNG here")
    p.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    p.add_argument("--min-swaps", type=int, default=1, help="fewer are not sound")
    d = StreamOptions()
    p.add_argument("--before-domain", default=d.before_domain)
    p.add_argument("--after-domain", default=d.after_domain)
    p.add_argument("--num-before", type=int, default=d.num_before, help="requests")
    p.add_argument("--num-after", type=int, default=d.num_after, help="requests")
    p.add_argument("--max-tokens", type=int, default=d.max_tokens)
    p.add_argument(
        "--concurrency",
        type=list_of(int),
        default=d.concurrency_cycle,
        help="requests in flight, by blocks of four, as in 1,2,4",
    )
    p.add_argument("--seed", type=int, default=d.seed)
    p.add_argument("--num-speculative-tokens", type=int, default=5)
    p.add_argument(
        "--static-lengths",
        type=list_of(int),
        default=STATIC_LENGTHS,
        help="tried for the frozen draft, as in 1,3,5",
    )
    p.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    p.add_argument("--engine-cpus", type=list_of(int), default=all_cpus()[:1])
    p.add_argument(
        "--other-cpus",
        type=list_of(int),
        default=all_cpus()[1:2] or all_cpus(),
        help="API, client, trainer",
    )
    p.add_argument("--compile", action="store_true", help="no --enforce-eager")
    p.add_argument(
        "--tide", type=json_object, default={}, help="JSON merged into the tide section"
    )
    p.add_argument("--time-limit-s", type=float, default=600.0, help="of a stream")
    p.add_argument("--total-limit-s", type=float, default=1800.0, help="of all arms")
    return p


def _streams(
    args: argparse.Namespace,
) -> tuple[list[StreamRequest], list[StreamRequest], dict[str, Any]]:
    """The stream; as many others as before its shift, to try lengths; its options.

    Raises:
        StreamError: There are too few prompts.
    """
    options = StreamOptions(
        before_domain=args.before_domain,
        after_domain=args.after_domain,
        num_before=args.num_before,
        num_after=args.num_after,
        max_tokens=args.max_tokens,
        concurrency_cycle=args.concurrency,
        seed=args.seed,
    )
    if min(args.num_before, args.num_after) < 1:
        raise StreamError("--num-before and --num-after must be at least 1")
    count = args.num_before
    tries = " (as many again to try --static-lengths)" if args.probes else ""
    both = {
        f"--num-before{tries}": (options.before_domain, count * (1 + args.probes)),
        "--num-after": (options.after_domain, args.num_after),
    }
    prompts = {}
    for knob, (domain, wanted) in both.items():
        prompts[knob] = read_prompts(args.prompts, domain)
        have = len(set(prompts[knob]))
        if have < wanted:
            raise StreamError(
                f"{knob}: {wanted} prompts of domain {domain!r} are needed and "
                f"{args.prompts} has {have}; ask for fewer requests"
            )
    before, after = prompts.values()
    stream, more = build_stream(before, after, options), []
    if args.probes:
        more = build_stream(before, after, replace(options, num_before=2 * count))
    return stream, more[count : 2 * count], asdict(options)


def main(argv: Sequence[str] | None = None) -> int:
    args = (options := parser()).parse_args(argv)
    args.work.mkdir(parents=True, exist_ok=True)
    args.static_lengths = tuple(dict.fromkeys(args.static_lengths))
    args.probes = "frozen" in args.arms and len(args.static_lengths) > 1
    try:
        stream, probe, stream_facts = _streams(args)
    except StreamError as error:
        options.error(str(error))
    began = time.monotonic()
    # The engine's cores are left to the engine: the client belongs with the rest.
    os.sched_setaffinity(0, args.other_cpus)
    args.deadline = began + args.total_limit_s
    args.frozen_length, args.static_rates = args.static_lengths[0], {}
    runs = serve_all(args, stream, probe)
    differences = compare_arms({name: run.results for name, run in runs.items()})
    print(f"comparing outputs: {len(differences)} first differences", flush=True)
    rescored = rescore_all(differences, args.target, args.dtype)
    inflated = args.target / "inflated.json"
    facts = {
        "target_dtype": args.dtype,
        "target_inflation": json.loads(inflated.read_text())
        if inflated.exists()
        else None,
        "engine_cpus": args.engine_cpus,
        "client_api_trainer_cpus": args.other_cpus,
        "enforce_eager": not args.compile,
        "num_speculative_tokens": args.num_speculative_tokens,
        "frozen_length": args.frozen_length,
        "static_tokens_per_s_before_shift": args.static_rates,
        "stream": stream_facts,
        "requests_in_a_turn": TURN_REQUESTS,
        "servers_together": args.together,
        "wall_clock_s": round(time.monotonic() - began, 1),
    }
    report = {"mode": mode_of(args.tide), **build_report(runs, rescored, facts)}
    reasons = problems(report, runs, args.min_swaps)
    report["sound"], report["problems"] = not reasons, reasons
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if args.picture and runs:
        draw(report, args.picture)
    print(table(report) if runs else "no arm ran")
    for reason in reasons:
        print(f"NOT SOUND: {reason}")
    return int(bool(reasons))


if __name__ == "__main__":
    end_on_signals()
    sys.exit(main())
