"""`vllm-tide dashboards`: export Grafana boards and Prometheus rules."""

from __future__ import annotations

import argparse
from pathlib import Path

from vllm_tide.cli import fail
from vllm_tide.dashboards import FORMATS, RUNBOOKS, exported


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    export = actions.add_parser("export", help="write the files to a directory")
    add = export.add_argument
    add("directory", type=Path, metavar="DIR", help="created if absent")
    text = (
        "grafana: boards, rules and runbooks as plain files (default); configmap: the "
        "boards for Grafana's sidecar; prometheusrule: the rules for Prometheus "
        "Operator"
    )
    add("--format", choices=FORMATS, default="grafana", help=text)
    text = (
        "base URL of runbook_url in alerts, to which #ALERT is appended (default: "
        f"{RUNBOOKS}, relative to the exported files; a prometheusrule then has none)"
    )
    add("--runbooks", default=RUNBOOKS, metavar="URL", help=text)
    add("--force", action="store_true", help="overwrite existing files")


def run(args: argparse.Namespace) -> int:
    if not args.runbooks or any(sign in args.runbooks for sign in " \t\n#'\""):
        return fail(f"--runbooks {args.runbooks!r} is not a URL without an anchor.")
    folder, texts = args.directory, exported(args.format, args.runbooks)
    try:
        existing = [name for name in texts if (folder / name).exists()]
        if existing and not args.force:
            name = str(folder / existing[0])
            return fail(f"{name!r} exists; give --force to overwrite it.")
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
            print(f"written: {folder / name}")
    except OSError as error:
        return fail(f"{str(folder)!r} cannot be written ({error.strerror}).")
    return 0
