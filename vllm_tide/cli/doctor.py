"""`vllm-tide doctor`: check machine, installation and configuration."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from vllm_tide.cli import EXIT_ERROR, add_output, emit


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Checks versions, patches, configuration, draft, shared memory, directories, "
        "device and spool. Read-only: loads no weights and downloads nothing."
    )
    parser.epilog = (
        "Exit status: 0 no check failed; 1 a check failed, or with --strict there are "
        "warnings; 2 invalid configuration. Checks that do not apply are skipped."
    )
    add = parser.add_argument
    text = "value of --speculative-config: a JSON or YAML file, or inline JSON"
    add("--config", metavar="FILE", help=text)
    text = "target, to check the draft against it (takes a few seconds)"
    add("--model", metavar="TARGET", help=text)
    text = "run directory (default: the configuration's, $TIDE_RUN_DIR, the user's)"
    add("--run-dir", type=Path, metavar="DIR", help=text)
    add_output(parser)
    add("--strict", action="store_true", help="exit 1 on warnings")


def run(args: argparse.Namespace) -> int:
    from vllm_tide.doctor.run import (
        as_text,
        coloured,
        examine,
        exit_code,
        make_subject,
        report,
    )
    from vllm_tide.patching import installed_version

    subject = make_subject(args.config, args.model, args.run_dir)
    findings = list(examine(subject))
    code = exit_code(findings, strict=args.strict)
    if subject.error:
        code = EXIT_ERROR
    text = as_text(findings)
    if sys.stdout.isatty() and args.output is None and "NO_COLOR" not in os.environ:
        text = coloured(text)
    value = report(findings, installed_version("vllm-tide"), code)
    return emit(args, text, value) or code
