"""`vllm-tide bench`: measure speculation, and learning, on real servers; report."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

EXIT_BAD_INPUT = 2
# Options that the suites read in their own way; the rest are fields of their options.
_COMMON = ("command", "action", "run")


def _list(kind: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    def parse(text: str) -> tuple[Any, ...]:
        try:
            return tuple(kind(part.strip()) for part in text.split(",") if part.strip())
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not a list such as 1,2,4"
            ) from None

    return parse


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the command to the command line."""
    parser = subparsers.add_parser(
        "bench", help="Measure speculation policies on real servers, and report."
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    run_parser = actions.add_parser("run", help="Run a suite; writes JSON.")
    _add_run(run_parser)
    report = actions.add_parser("report", help="Turn a run's JSON into HTML.")
    report.add_argument("file", type=Path, metavar="FILE", help="JSON of `bench run`")
    report.add_argument("--out", type=Path, required=True, metavar="HTML")
    parser.set_defaults(run=run)


def _add_run(p: argparse.ArgumentParser) -> None:
    text, whole, real = _list(str), _list(int), _list(float)
    # A name not given is left out, so that a default is written once, in RunOptions.
    unset = argparse.SUPPRESS
    p.add_argument(
        "--suite",
        required=True,
        help="control, traces, ablation; learning, day0, loss, rollback, multi",
    )
    p.add_argument("--json", type=Path, required=True, metavar="FILE")
    p.add_argument("--yes", action="store_true", help="start, without --target too")
    p.add_argument("--target", type=Path, default=unset, help="served model folder")
    p.add_argument("--draft", type=Path, default=unset, help="EAGLE-3 draft folder")
    p.add_argument(
        "--prompts", type=Path, default=unset, help="folder of <domain>.jsonl.gz"
    )
    p.add_argument("--venv", type=Path, default=unset, help="patched vLLM (this one)")
    p.add_argument("--work", type=Path, help="logs and inflated models (FILE.work)")
    p.add_argument("--arms", type=text, default=unset, help="none,static3,adaspec,...")
    p.add_argument("--batches", type=whole, default=unset, help="requests in flight")
    p.add_argument("--domains", type=text, default=unset, help="matched,unmatched")
    p.add_argument("--model-sizes", type=text, default=unset, help="inflate: 6m,90m")
    p.add_argument("--seconds", type=float, default=unset, help="window of a visit")
    p.add_argument("--repeats", type=int, default=unset)
    p.add_argument("--output-tokens", type=int, default=unset, help="per request")
    p.add_argument("--trace-dir", type=Path, default=unset, help="CSV traces")
    p.add_argument("--traces", help="NAME[@START],...; default: the three patterns")
    p.add_argument("--trace-seconds", type=float, default=unset, help="window replayed")
    p.add_argument(
        "--keep",
        "--rate-scale",
        type=float,
        default=unset,
        help="probability of keeping a request (default: fits --load)",
    )
    p.add_argument(
        "--load", type=float, default=unset, help="share of plain decoding's capacity"
    )
    p.add_argument("--slo-scales", type=real, default=unset, help="0.8,0.9,1.0,1.1,1.2")
    p.add_argument("--max-input-tokens", type=int, default=unset)
    p.add_argument("--max-output-tokens", type=int, default=unset)
    p.add_argument("--drain-s", type=float, default=unset)
    p.add_argument("--calibration-seconds", type=float, default=unset)
    p.add_argument("--max-num-seqs", type=int, default=unset)
    p.add_argument("--max-model-len", type=int, default=unset)
    p.add_argument("--dtype", choices=("float32", "bfloat16"), default=unset)
    p.add_argument("--engine-cpus", type=whole, default=unset, help="default: all")
    p.add_argument("--other-cpus", type=whole, default=unset, help="API server, client")
    p.add_argument(
        "--compile", action="store_true", default=unset, help="no --enforce-eager"
    )
    p.add_argument(
        "--control",
        type=_object,
        default=unset,
        help="JSON put into tide.control of every tide arm; {target} in a string is "
        "the model size",
    )
    p.add_argument("--serve-args", type=str.split, help="further `vllm serve` options")
    p.add_argument(
        "--resident", type=int, default=unset, help="most servers alive at once"
    )
    p.add_argument("--seed", type=int, default=unset)
    p.add_argument("--max-minutes", type=float, default=unset)
    _add_learning(p.add_argument_group("suites that learn while serving"))


def _add_learning(p: argparse._ArgumentGroup) -> None:
    text, whole = _list(str), _list(int)
    unset = argparse.SUPPRESS
    p.add_argument(
        "--requests", type=whole, default=unset, help="one number, or one a domain"
    )
    p.add_argument(
        "--concurrency",
        type=whole,
        default=unset,
        help="requests in flight, block by block: 1,2,4,3",
    )
    p.add_argument("--num-speculative-tokens", type=int, default=unset)
    p.add_argument(
        "--tide",
        type=_object,
        default=unset,
        help="JSON put into the tide section of every trained arm",
    )
    p.add_argument(
        "--resume",
        action="store_true",
        default=unset,
        help="keep what FILE and the work folder have of the same run",
    )
    p.add_argument("--traffic", default=unset, help="learning: shift, mixed or both")
    p.add_argument("--window-s", type=float, default=unset, help="of curves over time")
    p.add_argument("--final-share", type=float, default=unset, help="day0")
    p.add_argument("--fit-steps", type=int, default=unset, help="day0: ceiling")
    p.add_argument("--fit-tokens", type=int, default=unset, help="day0: ceiling")
    p.add_argument("--window-requests", type=int, default=unset, help="day0")
    p.add_argument("--share", type=float, default=unset, help="day0: of the ceiling")
    p.add_argument(
        "--losses", type=text, default=unset, help="loss: forward_kl+discard:0.5,..."
    )
    p.add_argument("--lookaheads", type=whole, default=unset, help="loss: 5,10")
    p.add_argument("--seeds", type=whole, default=unset, help="loss: 0,1,2")
    p.add_argument("--steps", type=int, default=unset, help="loss: of each training")
    p.add_argument("--batch-tokens", type=int, default=unset, help="loss: of a step")
    p.add_argument(
        "--holdout-every", type=int, default=unset, help="loss: n-th request"
    )
    p.add_argument("--start", default=unset, help="loss: draft or fresh")
    p.add_argument("--samples", type=Path, default=unset, help="loss: captured before")
    p.add_argument("--workers", type=int, default=unset, help="loss: processes")
    p.add_argument(
        "--plants", type=text, default=unset, help="rollback: nan,permuted,noise0.1"
    )
    p.add_argument("--baseline-requests", type=int, default=unset, help="rollback")
    p.add_argument("--trial-requests", type=int, default=unset, help="rollback")
    p.add_argument(
        "--stall-s", type=float, default=unset, help="multi: one server stopped"
    )


def run(args: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    needed = ["aiohttp", "psutil"] if args.action == "run" else ["matplotlib"]
    for name in needed:
        if find_spec(name) is None:
            how = "pip install 'vllm-tide[report]'" if name == "matplotlib" else "vLLM"
            print(f"error: {name} is missing; it comes with {how}", file=sys.stderr)
            return EXIT_BAD_INPUT
    from vllm_tide.bench.control_arms import BenchError

    try:
        return _run(args) if args.action == "run" else _report(args)
    except BenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT


def _run(args: argparse.Namespace) -> int:
    from vllm_tide.bench.control_arms import BenchError
    from vllm_tide.bench.learning_suites import LEARNING_SUITES
    from vllm_tide.bench.run_options import SUITES

    # What was not given is not there, or None.
    given = {
        name: value
        for name, value in vars(args).items()
        if name not in _COMMON and value is not None
    }
    given.setdefault("work", args.json.with_name(args.json.name + ".work"))
    for name in ("target", "draft", "prompts", "trace_dir", "work", "samples"):
        if given.get(name) is not None:
            given[name] = given[name].resolve()
    if "serve_args" in given:
        given["serve_args"] = tuple(given["serve_args"])
    sure = given.pop("yes") or "target" in given
    runner: Any
    options: Any
    if args.suite in LEARNING_SUITES:
        from vllm_tide.bench import learning_suites as runner

        options = runner.options_of(given.pop("suite"), given)
        arms = getattr(options, "arms", ())
        size = f"{sum(options.counts())} requests of {options.output_tokens} tokens"
    elif args.suite in SUITES:
        from vllm_tide.bench import control_run as runner

        options = _control_options(given)
        arms = options.arm_names
        size = f"at least {options.minutes:.0f} minutes, and a start of each server"
    else:
        known = ", ".join((*SUITES, *LEARNING_SUITES))
        raise BenchError(f"--suite is one of {known}")
    options.check()
    limit = options.max_minutes and f"; ends after {options.max_minutes:g} minutes"
    servers = ", ".join(arms) or "one by one"
    print(f"{options.target.name}: servers {servers}; {size}{limit or ''}", flush=True)
    if not sure:
        raise BenchError("--target: none given; --yes runs this on the demo model")
    return int(runner.run(options))


def _control_options(given: dict[str, Any]) -> Any:
    from dataclasses import fields

    from vllm_tide.bench.control_arms import BenchError
    from vllm_tide.bench.run_options import RunOptions
    from vllm_tide.bench.traces import Limits, parse_choices

    limits = Limits(
        max_input=given.pop("max_input_tokens", 128),
        max_output=given.pop("max_output_tokens", 128),
    )
    traces = tuple(parse_choices(given.pop("traces", "")))
    foreign = sorted(given.keys() - {item.name for item in fields(RunOptions)})
    if foreign:
        flag = foreign[0].replace("_", "-")
        raise BenchError(f"--{flag} is no option of --suite {given['suite']}")
    return RunOptions(**given, limits=limits, traces=traces)


def _report(args: argparse.Namespace) -> int:
    from vllm_tide.bench.control_arms import BenchError
    from vllm_tide.bench.document import read_document
    from vllm_tide.bench.html_report import write_html

    data = read_document(args.file)
    try:
        write_html(data, args.out)
    except OSError as error:
        raise BenchError(f"--out {args.out}: {error.strerror}") from None
    print(args.out)
    return 0
