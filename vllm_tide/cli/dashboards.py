"""`vllm-tide dashboards`: Grafana boards and Prometheus rules, as files."""

from __future__ import annotations

import argparse
from pathlib import Path

from vllm_tide.cli import fail
from vllm_tide.dashboards import FORMATS, RUNBOOKS, exported


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    export = actions.add_parser("export", help="write them to a directory")
    add = export.add_argument
    add("directory", type=Path, metavar="DIR", help="made if missing")
    text = (
        "grafana: boards, rules and runbooks as plain files (default); configmap: the "
        "boards for Grafana's sidecar; prometheusrule: the rules for Prometheus "
        "Operator"
    )
    add("--format", choices=FORMATS, default="grafana", help=text)
    text = (
        f"where alerts' runbook_url leads; #ALERT follows (default: {RUNBOOKS}, beside "
        "the plain files; without it a prometheusrule has no runbook_url)"
    )
    add("--runbooks", default=RUNBOOKS, metavar="URL", help=text)
    add("--force", action="store_true", help="overwrite files that are there")


def run(args: argparse.Namespace) -> int:
    if not args.runbooks or any(sign in args.runbooks for sign in " \t\n#'\""):
        return fail(f"--runbooks {args.runbooks!r} is no address without an anchor.")
    folder, texts = args.directory, exported(args.format, args.runbooks)
    try:
        there = [name for name in texts if (folder / name).exists()]
        if there and not args.force:
            name = str(folder / there[0])
            return fail(f"{name!r} exists; give --force to overwrite it.")
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
            print(f"written: {folder / name}")
    except OSError as error:
        return fail(f"{str(folder)!r} cannot be written ({error.strerror}).")
    return 0
