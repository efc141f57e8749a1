"""The ``vllm-tide`` command: one parser, one module per sub-command."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from vllm_tide.cli import EXIT_ERROR, Parser, fail

# Name and help by group. Only the module of the sub-command that was asked for is
# imported, so `patch` works where torch, vLLM or half of this package cannot be.
GROUPS = {
    "set up": {
        "patch": "Install, judge and remove the vLLM patches.",
        "doctor": "Check installation, configuration and machine.",
        "config": "Explain and check the tide section of a speculative config.",
        "plan": "Say on which accelerators to train, if at all.",
        "dashboards": "Write the Grafana boards and the Prometheus rules.",
    },
    "watch": {
        "top": "Watch engines and trainers live.",
        "status": "Say what the running trainers do.",
        "compare": "Compare two results of `vllm bench serve`.",
    },
    "steer": {
        "pause": "Stop training and capture until `resume`.",
        "resume": "Train and capture again after `pause`.",
        "capture": "Switch capture on or off in every engine of a run directory.",
        "purge": "Make the running trainers and relays forget captured data.",
        "rollback": "Serve the draft before the newest one again.",
        "export": "Write a draft as a checkpoint that vLLM serves.",
    },
    "run by hand": {
        "train": "Train the draft beside a running engine.",
        "relay": "Carry records and drafts between an engine and a spool.",
    },
}
COMMANDS = {name: text for group in GROUPS.values() for name, text in group.items()}
EPILOG = """example:
  vllm-tide config example adapt > tide.json     # set "model" to your draft
  vllm-tide doctor --config tide.json --model MODEL
  vllm serve MODEL --speculative-config tide.json
  vllm-tide top --url http://localhost:8000

'vllm-tide COMMAND --help' has the options. Exit status: 0; 1 the answer is no, or
nobody is there; 2 an input is wrong."""

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
    except PermissionError as error:
        return fail(f"{error.filename}: {error.strerror}; run this as its user.")
    except ModuleNotFoundError as error:
        if str(error.name).startswith("vllm_tide"):
            raise
        return fail(
            f"this command needs {error.name}, which is not installed here; run it in "
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
    wanted = next((word for word in argv if not word.startswith("-")), "")
    near = difflib.get_close_matches(wanted, COMMANDS, n=1)
    if wanted and wanted not in COMMANDS:
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return fail(f"no command {wanted!r}{hint or '; see vllm-tide --help.'}")
    command = parser
    if wanted:
        command = subparsers.add_parser(wanted, description=COMMANDS[wanted])
        given = [wanted] if wanted in TO_TRAINERS else []
        module = import_module(f"vllm_tide.cli.{'trainer' if given else wanted}")
        module.add_arguments(command, *given)
        command.set_defaults(run=module.run)
    args = parser.parse_args(argv)
    if args.version:
        print(versions())
        return 0
    if not wanted or getattr(args, "action", "") is None:
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
