"""`vllm-tide dashboards`: Grafana boards and Prometheus rules, as files."""

from __future__ import annotations

import argparse
from pathlib import Path

from vllm_tide.cli import fail
from vllm_tide.dashboards import FORMATS, RUNBOOKS, exported


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "dashboards", help="write the Grafana boards and the Prometheus rules"
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    export = actions.add_parser("export", help="write them to a directory")
    export.add_argument("directory", type=Path, metavar="DIR", help="made if missing")
    export.add_argument(
        "--format",
        choices=FORMATS,
        default="grafana",
        help="grafana: boards, rules and runbooks as plain files (default); configmap: "
        "the boards for Grafana's sidecar; prometheusrule: the rules for Prometheus "
        "Operator",
    )
    export.add_argument(
        "--runbooks",
        default=RUNBOOKS,
        metavar="URL",
        help=f"where alerts' runbook_url leads; #ALERT follows (default: {RUNBOOKS}, "
        "beside the plain files; without it a prometheusrule has no runbook_url)",
    )
    export.add_argument(
        "--force", action="store_true", help="overwrite files that are there"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if not args.runbooks or any(sign in args.runbooks for sign in " \t\n#'\""):
        return fail(f"--runbooks {args.runbooks!r} is no address without an anchor.")
    folder, texts = args.directory, exported(args.format, args.runbooks)
    there = [name for name in texts if (folder / name).exists()]
    if there and not args.force:
        name = str(folder / there[0])
        return fail(f"{name!r} exists; give --force to overwrite it.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
            print(f"written: {folder / name}")
    except OSError as error:
        return fail(f"{str(folder)!r} cannot be written ({error.strerror}).")
    return 0
