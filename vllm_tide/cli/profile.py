"""`vllm-tide profile`: measures what rounds cost on this machine, and keeps it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_tide.cli import fail

if TYPE_CHECKING:
    from vllm_tide.control.fit import FitReport


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Options of `vllm serve` that change timing (parallelism, --max-num-seqs, "
        "--enforce-eager, ...) go after `--`."
    )
    add = parser.add_argument
    add("--model", required=True, help="the target")
    add("--draft", required=True, help="its EAGLE-3 draft")
    add("--out", type=Path, help="file; by default where a server looks for it")
    add("--num-speculative-tokens", type=int, default=5, metavar="K")
    add("--dtype", default="auto")
    text = "what a start-up without profile measures"
    add("--quick", action="store_true", help=text)
    add("--seconds", type=float, help="time to spend on measuring")
    add("serve_args", nargs="*", metavar="-- SERVE_ARGS")


def run(args: argparse.Namespace) -> int:
    from vllm_tide.config import ConfigError
    from vllm_tide.speculative import NO_MODEL, may_be_model

    try:
        for option, name in (("--model", args.model), ("--draft", args.draft)):
            if not may_be_model(name):
                raise ConfigError(f"{option}: no model at {name!r}: {NO_MODEL}")
        from vllm_tide.engine.profiler import measure_engine

        samples, facts = measure_engine(
            args.model,
            args.draft,
            num_speculative_tokens=args.num_speculative_tokens,
            dtype=args.dtype,
            quick=args.quick,
            seconds=args.seconds,
            serve_args=args.serve_args,
        )
    except ConfigError as error:
        return fail(error)
    from vllm_tide.control.fit import fit
    from vllm_tide.control.profile_store import default_path, profile_key, save

    model, report = fit(samples, tuple(facts["graph_sizes"]))
    path = args.out or default_path(profile_key(facts))
    save(path, model, facts, report)
    print_report(report)
    print(f"written: {path}")
    return 0


def print_report(report: FitReport) -> None:
    """Print how well the model fits."""
    print(
        f"R2 {report.r2:.4f}, median error {report.median_abs_error:.1%} over "
        f"{report.num_samples} shapes, {report.held_out_median_abs_error:.1%} on "
        "shapes not fitted"
    )
    for name, part in report.parts.items():
        print(
            f"  {name:12} R2 {part.r2:.4f}, error {part.median_abs_error:.1%}, "
            f"held out {part.held_out_median_abs_error:.1%}"
        )
