"""`vllm-tide doctor`: is this machine, installation and configuration fit to serve?"""

from __future__ import annotations

import argparse
from importlib import metadata
from pathlib import Path


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the command to the command line."""
    parser = subparsers.add_parser(
        "doctor",
        help="check installation, configuration and machine",
        description="Checks versions, patches, configuration, draft, shared memory, "
        "run directory, cores or GPUs, ports, profile and storage. Changes nothing, "
        "loads no weights, fetches nothing.",
        epilog="Exit status: 0 all is well, 1 there are warnings, 2 something failed. "
        "Checks that do not apply are skipped and count for nothing.",
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="what --speculative-config would be given: a file, or JSON",
    )
    parser.add_argument(
        "--model",
        metavar="TARGET",
        help="the target, to compare the draft with (a few seconds more)",
    )
    parser.add_argument(
        "--run-dir", type=Path, help="by default the configuration's, else the usual"
    )
    parser.add_argument(
        "--port", type=_port, default=8000, help="port of the server (8000)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    from vllm_tide.doctor.examination import examine
    from vllm_tide.doctor.finding import worst
    from vllm_tide.doctor.report import EXIT_CODES, as_json, as_text
    from vllm_tide.doctor.subject import make_subject

    subject = make_subject(args.config, args.model, args.run_dir, args.port)
    findings = list(examine(subject))
    print(as_json(findings, _version()) if args.json else as_text(findings))
    return EXIT_CODES[worst(findings)]


def _version() -> str:
    try:
        return metadata.version("vllm-tide")
    except metadata.PackageNotFoundError:
        return "unknown"


def _port(text: str) -> int:
    port = int(text)
    if not 0 < port < 65536:
        raise argparse.ArgumentTypeError(f"{port} is no port (1 to 65535)")
    return port
