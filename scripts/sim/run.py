"""Comparison of policies on simulated engines.

scripts/sim/run.py --suite published --json FILE --table
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]
from json_text import json_text
from sim.acceptance import REGIMES, TRUTHS
from sim.arrivals import MAX_INPUT, PATTERNS, SimError, Trace, synthetic
from sim.arrivals import load as load_trace
from sim.state import Server
from sim.suite import ARMS, Options, run_cells, suite_cells
from sim.table import markdown, ratios, summary
from sim.truth import Mismatch


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="run.py",
        description="Replay traces on a model of continuous batching that runs the "
        "engine's control code, and compare every policy with the best possible one.",
    )
    parser.add_argument(
        "--suite",
        default="published",
        help="published (the TIDE paper's four models; default) or quick",
    )
    parser.add_argument("--json", type=Path, help="file for the rows")
    parser.add_argument("--table", action="store_true", help="print a Markdown table")
    parser.add_argument(
        "--trace",
        type=Path,
        action="append",
        help="CSV file (arrival_s,input_tokens,output_tokens), optionally .gz; "
        "repeatable (default: three synthetic patterns)",
    )
    parser.add_argument(
        "--regime", action="append", help="low, high or shifting; repeatable"
    )
    parser.add_argument(
        "--truth",
        default="family",
        help="dependence of acceptance on confidence: " + ", ".join(TRUTHS),
    )
    parser.add_argument("--arm", action="append", help="run only this arm; repeatable")
    parser.add_argument(
        "--seconds", type=_positive, default=600.0, help="length of traces (600)"
    )
    parser.add_argument(
        "--rate", type=_positive, default=5.0, help="requests/s of synthetic traces (5)"
    )
    parser.add_argument(
        "--pace",
        choices=("progress", "time"),
        default="progress",
        help="progress: a request arrives when the arm has written as many tokens as "
        "plain decoding at its arrival time, so all arms have the same load; time: at "
        "its exact time, for latencies and limits",
    )
    parser.add_argument(
        "--max-input",
        type=_count,
        help="clip prompts to this many tokens (1024)",
    )
    parser.add_argument("--max-num-seqs", type=_count, default=256)
    parser.add_argument("--max-num-batched-tokens", type=_count, default=2048)
    parser.add_argument("--num-speculative-tokens", type=_count, default=7)
    parser.add_argument(
        "--slo-tpot-ms", type=_positive, help="limit on a request's time per token"
    )
    parser.add_argument(
        "--wrong-target",
        type=_positive,
        default=1.0,
        help="factor on the target's time in the policy's initial time model (1)",
    )
    parser.add_argument(
        "--wrong-draft", type=_positive, default=1.0, help="the same for the draft (1)"
    )
    parser.add_argument(
        "--cold",
        action="store_true",
        help="policies start with a default guess of all times, as at an engine start",
    )
    parser.add_argument(
        "--noise", type=float, default=0.0, help="relative noise of measured times (0)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=_count, default=1)
    try:
        return _run(parser.parse_args(argv))
    except SimError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _run(args: argparse.Namespace) -> int:
    if args.json is not None and not args.json.parent.is_dir():
        raise SimError(
            f"cannot write {args.json}: folder {args.json.parent} does not exist"
        )
    if args.max_num_batched_tokens < args.max_num_seqs:
        raise SimError("--max-num-batched-tokens must be at least --max-num-seqs")
    options = Options(
        seed=args.seed,
        top=args.num_speculative_tokens,
        server=Server(
            args.max_num_seqs,
            args.max_num_batched_tokens,
            args.slo_tpot_ms / 1e3 if args.slo_tpot_ms else None,
        ),
        by_progress=args.pace == "progress",
        mismatch=Mismatch(args.wrong_target, args.wrong_draft, args.noise, args.cold),
        truth=args.truth,
    )
    regimes, arms = args.regime or tuple(REGIMES), args.arm or ARMS
    cells = suite_cells(args.suite, _traces(args), regimes=regimes)
    rows, began = [], time.monotonic()
    for row in run_cells(cells, arms, options, args.processes):
        rows.append(row)
        _print_progress(len(rows), len(cells), began, row)
    result: dict[str, Any] = {
        "suite": args.suite,
        "options": asdict(options),
        "summary": {m: summary(rows, m) for m in ("throughput", "speed")},
        "rows": rows,
    }
    if args.json is not None:
        args.json.write_text(json_text(_rounded(result)), encoding="utf-8")
    if args.table:
        print(markdown(rows))
    elif args.json is None:
        print(json.dumps(result["summary"], indent=1))
    return 0


def _traces(args: argparse.Namespace) -> list[Trace]:
    if args.trace:
        traces = [load_trace(path) for path in args.trace]
    else:
        drawn = args.seconds, args.rate, args.seed
        traces = [synthetic(pattern, *drawn) for pattern in PATTERNS]
    chosen = []
    for trace in traces:
        trace = trace.clipped(args.max_input or MAX_INPUT).window(args.seconds)
        if not len(trace):
            raise SimError(f"trace {trace.name} has no request to replay")
        chosen.append(trace)
    return chosen


def _print_progress(done: int, cells: int, began: float, row: dict[str, Any]) -> None:
    """Print a line on standard error: the ratios of a cell and the time left."""
    passed = time.monotonic() - began
    left = passed / done * (cells - done)
    texts = [f"{value:.1%} of {name}" for name, value in ratios(row).items()]
    print(
        f"[{done}/{cells}] {row['model']} {row['trace']} {row['regime']}: "
        f"{', '.join(texts) or 'done'} ({passed:.0f} s, about {left:.0f} s left)",
        file=sys.stderr,
    )


def _positive(text: str) -> float:
    with suppress(ValueError):
        if 0 < float(text) < float("inf"):
            return float(text)
    raise argparse.ArgumentTypeError(f"{text} is not a positive number")


def _count(text: str) -> int:
    with suppress(ValueError):
        if int(text) >= 1:
            return int(text)
    raise argparse.ArgumentTypeError(f"{text} is not a positive whole number")


def _rounded(value: Any) -> Any:
    """Return the value with five significant digits; others depend on the seed."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _rounded(part) for key, part in value.items()}
    return [_rounded(part) for part in value] if isinstance(value, list) else value


if __name__ == "__main__":
    sys.exit(main())
