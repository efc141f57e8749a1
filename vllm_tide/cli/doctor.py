"""`vllm-tide doctor`: is this machine, installation and configuration fit to serve?"""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Checks versions, patches, configuration, draft, shared memory, directories, "
        "device and spool. Changes nothing, loads no weights, fetches nothing."
    )
    parser.epilog = (
        "Exit status: 0 nothing failed (1 with --strict, where there are warnings), 2 "
        "something failed. Checks that do not apply are skipped."
    )
    add = parser.add_argument
    text = "what --speculative-config would be given: JSON or YAML, or inline JSON"
    add("--config", metavar="FILE", help=text)
    text = "the target, to compare the draft with (a few seconds more)"
    add("--model", metavar="TARGET", help=text)
    text = "by default the configuration's, else the usual"
    add("--run-dir", type=Path, help=text)
    add("--json", action="store_true", help="print JSON")
    add("--strict", action="store_true", help="exit 1 on warnings")


def run(args: argparse.Namespace) -> int:
    from vllm_tide.cli.main import version
    from vllm_tide.doctor.run import as_json, as_text, examine, exit_code, make_subject

    subject = make_subject(args.config, args.model, args.run_dir)
    findings = list(examine(subject))
    code = exit_code(findings, strict=args.strict)
    print(as_json(findings, version(), code) if args.json else as_text(findings))
    return code
