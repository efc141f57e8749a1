"""`vllm-tide doctor`: is this machine, installation and configuration fit to serve?"""

from __future__ import annotations

import argparse
from pathlib import Path


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "doctor",
        help="check installation, configuration and machine",
        description="Checks versions, patches, configuration, draft, shared memory, "
        "directories, GPUs and spool. Changes nothing, loads no weights, fetches "
        "nothing.",
        epilog="Exit status: 0 nothing failed (1 with --strict, where there are "
        "warnings), 2 something failed. Checks that do not apply are skipped.",
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="what --speculative-config would be given: JSON or YAML, or inline JSON",
    )
    parser.add_argument(
        "--model",
        metavar="TARGET",
        help="the target, to compare the draft with (a few seconds more)",
    )
    parser.add_argument(
        "--run-dir", type=Path, help="by default the configuration's, else the usual"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--strict", action="store_true", help="exit 1 on warnings")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from vllm_tide.cli.main import version
    from vllm_tide.doctor.run import as_json, as_text, examine, exit_code, make_subject

    subject = make_subject(args.config, args.model, args.run_dir)
    findings = list(examine(subject))
    code = exit_code(findings, strict=args.strict)
    print(as_json(findings, version(), code) if args.json else as_text(findings))
    return code
