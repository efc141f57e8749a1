"""The ``vllm-tide`` command: one parser, one module per sub-command."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Sequence
from importlib import import_module, metadata

from vllm_tide.cli import fail

# Name, help. Only the module of the sub-command that was asked for is imported, so
# `patch` works where torch, vLLM or half of this package cannot be imported.
COMMANDS = (
    ("patch", "Install, judge and remove the vLLM patches."),
    ("doctor", "Check installation, configuration and machine."),
    ("config", "Explain and check the tide section of a speculative config."),
    ("train", "Train the draft beside a running engine."),
    ("top", "Watch engines and trainers live."),
    ("status", "Say what the running trainers do."),
    ("rollback", "Serve the draft before the newest one again."),
    ("pause", "Stop training and capture until `resume`."),
    ("resume", "Train and capture again after `pause`."),
    ("capture", "Switch capture on or off in every engine of a run directory."),
    ("relay", "Carry records and drafts between an engine and a spool."),
    ("export", "Write a draft as a checkpoint that vLLM serves."),
    ("purge", "Make the running trainers and relays forget captured data."),
    ("compare", "Compare two results of `vllm bench serve`."),
    ("plan", "Say on which accelerators to train, if at all."),
    ("dashboards", "Write the Grafana boards and the Prometheus rules."),
)

# Commands of `cli/trainer.py`; the others have a module of their name.
TO_TRAINERS = ("status", "rollback", "pause", "resume", "capture", "purge")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one sub-command and returns its exit code."""
    try:
        status = _main(argv)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # Whoever read the output is gone; nothing is to be said at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except ModuleNotFoundError as error:
        if str(error.name).startswith("vllm_tide"):
            raise
        return fail(
            f"this command needs {error.name}, which is not installed here; run it in "
            "vLLM's environment."
        )


def _main(argv: Sequence[str] | None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="vllm-tide", description="Trains vLLM's draft on live traffic."
    )
    parser.add_argument("--version", action="version", version=version())
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    wanted = next((word for word in argv if not word.startswith("-")), None)
    names = [name for name, _ in COMMANDS]
    near = difflib.get_close_matches(str(wanted), names, n=1)
    if near and wanted not in names:
        parser.error(f"no command {wanted!r}; did you mean {near[0]!r}?")
    for name, summary in COMMANDS:
        command = subparsers.add_parser(name, help=summary, description=summary)
        if name == wanted:
            given = [name] if name in TO_TRAINERS else []
            module = import_module(f"vllm_tide.cli.{'trainer' if given else name}")
            module.add_arguments(command, *given)
            command.set_defaults(run=module.run)
    if not argv:
        parser.print_help()
        return 2
    args = parser.parse_args(argv)
    return int(args.run(args))


def version() -> str:
    try:
        return metadata.version("vllm-tide")
    except metadata.PackageNotFoundError:
        return "unknown"


if __name__ == "__main__":
    sys.exit(main())
