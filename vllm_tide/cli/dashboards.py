"""`vllm-tide dashboards`: Grafana's dashboard and Prometheus' rules, as files."""

from __future__ import annotations

import argparse
from pathlib import Path

from vllm_tide.cli import fail
from vllm_tide.dashboards import contents


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "dashboards", help="write the Grafana dashboard and the Prometheus rules"
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    export = actions.add_parser("export", help="write them to a directory")
    export.add_argument("directory", type=Path, metavar="DIR", help="made if missing")
    export.add_argument(
        "--force", action="store_true", help="overwrite files that are there"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    folder, texts = args.directory, contents()
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
