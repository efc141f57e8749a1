"""The ``vllm-tide`` command: one parser, one module per sub-command."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from vllm_tide.cli import EXIT_ERROR, Parser, fail

# Name and help by group. Only the module of the given sub-command is imported, so that
# `patch` works without torch and vLLM.
GROUPS = {
    "setup": {
        "patch": "Install, check and remove the vLLM patches.",
        "doctor": "Check installation, configuration and machine.",
        "config": "Explain and check the tide section of a speculative config.",
        "plan": "Plan on which accelerators to train, if any.",
        "dashboards": "Write the Grafana boards and the Prometheus rules.",
    },
    "monitoring": {
        "top": "Show engines and trainers live.",
        "status": "Show the state of running trainers.",
        "compare": "Compare two results of `vllm bench serve`.",
    },
    "operation": {
        "pause": "Stop training and capture until `resume`.",
        "resume": "Train and capture again after `pause`.",
        "capture": "Switch capture on or off in every engine of a run directory.",
        "purge": "Delete captured data from running trainers and relays.",
        "rollback": "Serve the previous draft again.",
        "export": "Write a draft as a checkpoint that vLLM serves.",
    },
    "processes": {
        "train": "Train the draft of a running engine.",
        "relay": "Carry records and drafts between an engine and a spool.",
    },
}
COMMANDS = {name: text for group in GROUPS.values() for name, text in group.items()}
EPILOG = """example:
  vllm-tide config example adapt > tide.json     # set "model" to your draft
  vllm-tide doctor --config tide.json --model MODEL
  vllm serve MODEL --speculative-config tide.json
  vllm-tide top --url http://localhost:8000

'vllm-tide COMMAND --help' shows the options. Exit status: 0 success; 1 negative
result, or no process to answer; 2 invalid input."""

# Commands of `cli/trainer.py`; other commands have a module of the same name.
TO_TRAINERS = ("status", "rollback", "pause", "resume", "capture", "purge")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one sub-command and return its exit code."""
    try:
        status = _main(argv)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # The reader of the output is gone: avoid another error at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except PermissionError as error:
        return fail(f"{error.filename}: {error.strerror}; run it as the owner.")
    except ModuleNotFoundError as error:
        if str(error.name).startswith("vllm_tide"):
            raise
        return fail(
            f"this command needs {error.name}, which is not installed; run it in "
            "vLLM's environment."
        )


def _main(argv: Sequence[str] | None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] == ["help"]:
        argv = [*argv[1:2], "--help"]
    lines = ["Trains vLLM's draft on live traffic.", ""]
    for group, commands in GROUPS.items():
        lines += [f"{group}:", *(f"  {n:11} {text}" for n, text in commands.items())]
    parser = Parser(
        prog="vllm-tide",
        usage="vllm-tide [--help] [--version] COMMAND ...",
        description="\n".join(lines),
        epilog=EPILOG,
    )
    text = "print the versions of vllm-tide and vLLM, and the state of its patches"
    parser.add_argument("--version", action="store_true", help=text)
    subparsers = parser.add_subparsers(
        dest="command", prog="vllm-tide", help=argparse.SUPPRESS
    )
    name = next((arg for arg in argv if not arg.startswith("-")), "")
    near = difflib.get_close_matches(name, COMMANDS, n=1)
    if name and name not in COMMANDS:
        hint = f"; did you mean {near[0]!r}?" if near else "; see vllm-tide --help."
        return fail(f"no command {name!r}{hint}")
    command = parser
    if name:
        command = subparsers.add_parser(name, description=COMMANDS[name])
        names = [name] if name in TO_TRAINERS else []
        module = import_module(f"vllm_tide.cli.{'trainer' if names else name}")
        module.add_arguments(command, *names)
        command.set_defaults(run=module.run)
    args = parser.parse_args(argv)
    if args.version:
        print(versions())
        return 0
    if not name or getattr(args, "action", "") is None:
        command.print_help()
        return EXIT_ERROR
    return int(args.run(args))


def versions() -> str:
    """Return the versions of this package and of vLLM, and the state of its patches."""
    from vllm_tide.doctor.install import patch_state, vllm_device, vllm_distribution
    from vllm_tide.patching import installed_version

    own, vllm = installed_version("vllm-tide"), vllm_distribution()
    if vllm is None:
        return f"vllm-tide {own}, no vLLM"
    state = patch_state()
    return (
        f"vllm-tide {own}, vLLM {vllm.version} ({vllm_device() or 'unknown'}), "
        f"patches {'applied' if state.status == 'ok' else state.sentence}"
    )


if __name__ == "__main__":
    sys.exit(main())
