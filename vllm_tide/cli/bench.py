"""`vllm-tide bench`: measure speculation policies on real servers, and report."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

EXIT_BAD_INPUT = 2


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
    p.add_argument("--suite", required=True, help="control, traces or ablation")
    p.add_argument("--json", type=Path, required=True, metavar="FILE")
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
    p.add_argument("--max-input-tokens", type=int, default=128)
    p.add_argument("--max-output-tokens", type=int, default=128)
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
    from vllm_tide.bench import control_run
    from vllm_tide.bench.run_options import RunOptions
    from vllm_tide.bench.traces import Limits, parse_choices

    given = dict(vars(args))
    for name in ("command", "action", "run"):
        given.pop(name, None)
    work = given.pop("work") or args.json.with_name(args.json.name + ".work")
    limits = Limits(
        max_input=given.pop("max_input_tokens"),
        max_output=given.pop("max_output_tokens"),
    )
    traces = tuple(parse_choices(given.pop("traces") or ""))
    serve_args = tuple(given.pop("serve_args") or ())
    for name in ("target", "draft", "prompts", "trace_dir"):
        if given.get(name) is not None:
            given[name] = given[name].resolve()
    options = RunOptions(
        **given, work=work, limits=limits, traces=traces, serve_args=serve_args
    )
    return control_run.run(options)


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
