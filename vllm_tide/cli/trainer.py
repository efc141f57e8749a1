"""Commands to running trainers: status, pause, resume, capture, rollback and purge."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm_tide.cli import EXIT_NO, add_output, add_run_dir, emit, fail
from vllm_tide.config import ConfigError, parse_tide, starts_trainer
from vllm_tide.transport.admin import (
    Answer,
    display_names,
    is_served,
    send_to_all,
    sockets,
)
from vllm_tide.transport.rendezvous import (
    EngineManifest,
    NotRunningError,
    default_run_dir,
    is_spooled,
    prepare_run_dir,
    read_manifests,
    require_readable,
    state_dirs,
)
from vllm_tide.transport.ring import ring_consumer
from vllm_tide.transport.shm import TransportError, sanitize_for_log

MAX_SECONDS = 86400


class NoTrainerError(NotRunningError):
    """No trainer is running in the run directory."""


_LATE = (
    "captured_rows_total may grow once more, as engines report twice a second and with "
    "the next step: by rows of the last half second before it."
)
_WAITS = (
    "Engines follow within a second, with or without a trainer, also those that start "
    "later; the command waits a second."
)
EPILOGS = {
    "status": "The loop of the trainer answers, so an answer means that it runs. `top` "
    "shows engines and servers too.",
    "rollback": "Repeat it for earlier drafts (the newest three that passed the canary "
    "are stored), at last the initial one. The canary rolls back automatically when "
    "served speed falls. Training continues from the older draft after two cycles; "
    "`pause` prevents further publications. Without a running trainer the command "
    "itself publishes the previous stored draft, else the initial one, to a running "
    "engine.",
    "pause": "Engines then send no data, not even token ids, so the canary decides "
    "after `resume`. The pause persists over restarts and reboots, and needs no "
    f"trainer. {_LATE} Exit status: 0, or 1 without an engine, without an answer of a "
    "trainer, or if the file of the pause cannot be written.",
    "resume": f"{_WAITS} A request that began during the pause stays out: its rows are "
    "dropped as `paused`. Exit status: as of `pause`.",
    "capture": f"{_WAITS} A request that began while capture was off stays out: its "
    f"rows are dropped as `paused`. {_LATE} Exit status: 0, or 1 without an engine.",
}
TENANT = "data of this tenant (vllm_xargs: tide_tenant)"
TENANT_ID = (
    "data of a tenant by the id that `purge --tenant` prints on the engine's host"
)
STATE_DIR = "tide.train.state_dir, if it is set and no engine runs"
SPOOL = "directory or fsspec URL of a spool to remove shards from"
PROBE = "exit 0 also without an engine: a waiting trainer is healthy"


def add_arguments(parser: argparse.ArgumentParser, name: str) -> None:
    parser.epilog = EPILOGS.get(name)
    parser.set_defaults(command=name)
    add = parser.add_argument
    if name == "purge":
        scope = parser.add_mutually_exclusive_group().add_argument
        scope("--tenant", metavar="NAME", help=TENANT)
        scope("--tenant-id", metavar="HEX", help=TENANT_ID)
        scope("--all", action="store_true", help="all data")
    add_run_dir(parser)
    if name != "status":
        add("--state-dir", metavar="DIR", help=STATE_DIR)
    if name == "purge":
        add("--spool", metavar="URL", help=SPOOL)
    default = 60.0 if name == "purge" else 30.0
    text = "seconds to wait for answers"
    add("--timeout", type=_seconds, default=default, metavar="SECONDS", help=text)
    add_output(parser)
    if name == "capture":
        add("switch", choices=("on", "off"), metavar="on|off")
    if name == "status":
        add("--probe", action="store_true", help=PROBE)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= MAX_SECONDS:
        hint = f"give seconds, more than 0 and at most {MAX_SECONDS}"
        raise argparse.ArgumentTypeError(f"{text!r} is not a time; {hint}")
    return seconds


def run(args: argparse.Namespace) -> int:
    """Run a command; return 1 without a trainer, or if one refused or timed out."""
    from vllm_tide.cli.purge import run_purge

    runners = {"status": _status, "capture": _switch_capture, "purge": run_purge}
    runners |= {"rollback": _roll_back, "pause": _pause, "resume": _pause}
    try:
        run_dir = args.run_dir or default_run_dir()
        require_readable(run_dir)
        return runners[args.command](args, run_dir)
    except TransportError as error:
        status = fail(error)
        if getattr(args, "probe", False) and _no_engine(args.run_dir):
            print("no engine runs either: a trainer may be waiting for one")
            return 0
        return status


def _send_to_trainers(
    run_dir: Path, args: argparse.Namespace, describe: Callable[[Any], str]
) -> int:
    request = {"do": args.command}
    answers = send_to_all(sockets([run_dir], "trainer"), request, args.timeout)
    if not answers:
        raise NoTrainerError(_why_no_trainer(run_dir))
    return _print_answers(args, displayed(answers), describe)


def displayed(answers: dict[str, Answer]) -> dict[str, Answer]:
    names = display_names(answers)
    return {names[name]: answer for name, answer in answers.items()}


def _why_no_trainer(run_dir: Path) -> str:
    engines = read_manifests(run_dir)
    if not engines:
        return (
            f"no trainer is running in {run_dir}, and no engine: give the server's run "
            "directory (--run-dir)"
        )
    if any(map(is_spooled, engines)):
        return (
            f"no trainer answers in {run_dir}: its server has a relay (relay-*.log), "
            "and the trainer runs where `vllm-tide train --spool` was started"
        )
    if any(map(_starts_trainer, engines)):
        return (
            f"no trainer answers in {run_dir}: it may be starting, see its "
            f"trainer-*.log{_last_line(run_dir)}"
        )
    return (
        f"no trainer answers in {run_dir}, and its server starts none (tide.preset, "
        "capture, swap, train.autostart): see `vllm-tide top`"
    )


def _last_line(run_dir: Path) -> str:
    """Return the last line of the newest trainer's log, which has a failure's cause."""
    with contextlib.suppress(OSError):
        newest = max(run_dir.glob("trainer-*.log"), key=os.path.getmtime, default=None)
        lines = newest.read_text("utf-8", "replace").splitlines() if newest else []
        if lines:
            return f"; its last line: {sanitize_for_log(lines[-1])}"
    return ""


def _starts_trainer(engine: EngineManifest) -> bool:
    try:
        return starts_trainer(parse_tide(engine.tide))
    except ConfigError:  # of another version
        return True


def _captures(engine: EngineManifest) -> bool:
    try:
        capture = parse_tide(engine.tide).capture
    except ConfigError:  # of another version
        return True
    return capture.enabled and capture.consent != "off"


def _print_answers(
    args: argparse.Namespace,
    answers: dict[str, dict[str, Any]],
    describe: Callable[[Any], str],
) -> int:
    """Print the answers of trainers or engines by name, as text or JSON."""
    good = {name: a for name, a in sorted(answers.items()) if a.get("ok")}
    for name in sorted(answers.keys() - good.keys()):
        fail(f"{name}: {answers[name].get('error')}")
    lines = [f"{name}: {describe(answer)}" for name, answer in good.items()]
    status = 0
    if lines or args.json:
        values = {name: a.get("status", a) for name, a in answers.items()}
        status = emit(args, "\n".join(lines), values)
    partly = any("note" in answer for answer in good.values())
    return status or EXIT_NO * (len(good) < len(answers) or partly)


def _outcome(answer: dict[str, Any]) -> str:
    if "served_as" in answer:
        to = f"{answer['to']}{'' if answer['to'] else ' (the initial draft)'}"
        if stored := answer.get("stored"):
            to = f"the draft stored as version {stored}"
        return (
            f"rolled back from version {answer['version']} to {to}, served as version "
            f"{answer['served_as']} from the engine's next steps on"
        )
    was, note = answer["was_paused"], f"; {answer['note']}" if "note" in answer else ""
    if answer["paused"]:
        return ("was paused" if was else "paused") + note
    return ("resumed" if was else "was not paused") + note


def status_text(status: dict[str, Any]) -> str:
    """Describe a trainer's status in one line."""
    waiting = f", waiting for {why}" if (why := status["waiting_for"]) else ""
    decided = f"; last decision: {why}" if (why := status["last_decision"]) else ""
    canary, trial = status.get("canary") or {}, ""
    if canary.get("undecided"):
        trial = f" (canary undecided after {canary.get('requests', 0)} requests)"
    back = status["rollbacks"]
    by_command = back - canary.get("rollbacks", back)
    ordered = f" ({by_command} by command)" if by_command else ""
    engines, newest = status["engines"], status.get("published_version", 0)
    installed = {each["installed"] for each in engines.values()}
    served = sorted(installed) or [status["installed_version"]]
    origin = f" ({name})" if (name := status.get("origin")) else ""
    if newest > served[-1]:
        refused = engines and all(e.get("refused") == newest for e in engines.values())
        what = "was refused" if refused else "is installed with the next step"
        origin = f"; version {newest}{origin} {what}"
    return (
        f"{status['state']}, engines: {len(engines)}; cycles: {status['cycles']}, "
        f"steps: {status['steps']}; drafts published: {status['publications']}, "
        f"rolled back: {back}{ordered}; version{'s' * (len(served) > 1)} "
        f"{', '.join(map(str, served))} served{trial}{origin}{waiting}{decided}"
    )


def _status(args: argparse.Namespace, run_dir: Path) -> int:
    from vllm_tide.capture.switch import OFF, PAUSED, switch_folders, switches_on

    switched = {
        OFF: "capture is off: `vllm-tide capture on` switches it on",
        PAUSED: "paused, so nothing is captured: `vllm-tide resume` continues",
    }

    try:
        return _send_to_trainers(run_dir, args, lambda a: status_text(a["status"]))
    finally:
        with contextlib.suppress(OSError, TransportError):
            folders = switch_folders(run_dir, *running_state_dirs(args, run_dir))
            if not args.json and (off := switches_on(folders)):
                print(*(switched[name] for name in off), sep="\n")


def _roll_back(args: argparse.Namespace, run_dir: Path) -> int:
    try:
        return _send_to_trainers(run_dir, args, _outcome)
    except NoTrainerError as error:
        if silent := _silent_trainers(args, run_dir):
            raise NotRunningError(
                f"{silent[0]} does not answer, so nothing was rolled back: it may be "
                "starting; retry in some seconds, and if it hangs, stop it"
            ) from None
        if _no_engine(run_dir):
            raise error
    from vllm_tide.deploy.rollback import roll_back
    from vllm_tide.draft.config import DraftError

    answers: dict[str, dict[str, Any]] = {}
    for manifest in read_manifests(run_dir):
        name = f"engine {manifest.engine_id}"
        state_dir = args.state_dir or manifest.tide.get("train", {}).get("state_dir")
        folder = Path(state_dir).expanduser() if state_dir else run_dir / "heads"
        try:
            answers[name] = {"ok": True, **roll_back(manifest, folder)}
        except (DraftError, TransportError) as error:
            answers[name] = {"ok": False, "error": str(error)}
    return _print_answers(
        args, answers, lambda answer: f"{_outcome(answer)} (no trainer is running)"
    )


def _pause(args: argparse.Namespace, run_dir: Path) -> int:
    from vllm_tide.capture.switch import PAUSED, Switch

    try:
        status = _send_to_trainers(run_dir, args, _outcome)
        _wait_for_engines(args, run_dir)
        return status
    except NoTrainerError:
        if not os.path.lexists(run_dir):
            raise
    # Engines follow the files within a second; so does a trainer that starts or hangs.
    switch = Switch(run_dir, PAUSED, *running_state_dirs(args, run_dir))
    was, on = switch.on, args.command == "pause"
    why = switch.set(on)
    answer = {"was_paused": was, "paused": on} | ({"note": why} if why else {})
    silent = _silent_trainers(args, run_dir)
    note = "no trainer is running"
    if silent:
        note = f"{silent[0]} does not answer; it follows when it does"
    elif _no_engine(run_dir):
        note = f"no engine is running in {run_dir}; servers that start there follow"
    status = emit(args, f"{_outcome(answer)} ({note})", answer)
    _wait_for_engines(args, run_dir)
    done = not (why or silent or _no_engine(run_dir))
    return status or EXIT_NO * (not done)


def _wait_for_engines(args: argparse.Namespace, run_dir: Path) -> None:
    """Wait until engines have read the switches, unless capture ends."""
    from vllm_tide.capture.switch import OFF, POLL_S, switches_on

    # A paused trainer itself stops capture at once.
    if args.command == "pause" or not read_manifests(run_dir):
        return
    time.sleep(2 * POLL_S)
    folders = socket_folders(args, run_dir)
    if args.command == "resume" and not args.json and OFF in switches_on(folders):
        print("capture is off: `vllm-tide capture on` switches it on")


def socket_folders(args: argparse.Namespace, run_dir: Path) -> list[Path]:
    """Return the folders of sockets: the run directory, and what outlives it."""
    from vllm_tide.capture.switch import switch_folders

    return switch_folders(run_dir, *running_state_dirs(args, run_dir))


def _silent_trainers(args: argparse.Namespace, run_dir: Path) -> list[str]:
    """Return live trainers, to be called if none has a socket in the run directory."""
    paths = sockets(socket_folders(args, run_dir), "trainer")
    names = display_names(name for name, path in paths.items() if is_served(path))
    result = sorted(names.values())
    for manifest in read_manifests(run_dir):
        reader = ring_consumer(manifest.ring)
        if reader is not None and not is_spooled(manifest):
            result.append(f"trainer {reader}")
    return result


def _no_engine(run_dir: Path | None) -> bool:
    try:
        return not read_manifests(run_dir or default_run_dir())
    except TransportError:  # the directory has another owner: no trainer runs there
        return False


def _switch_capture(args: argparse.Namespace, run_dir: Path) -> int:
    from vllm_tide.capture.switch import OFF, Switch, switch_folders, switches_on

    exists, off = os.path.lexists(run_dir), args.switch == "off"
    if exists:
        prepare_run_dir(run_dir)
    folders = switch_folders(run_dir, *(dirs := running_state_dirs(args, run_dir)))
    if (exists or not off) and (why := Switch(run_dir, OFF, *dirs).set(off)):
        if not (off and OFF in switches_on([run_dir])):
            raise TransportError(why)
        text = "capture is off, but possibly not after a reboot: set"
        print(f"{text} tide.train.state_dir ({why})", file=sys.stderr)
    if not exists and off:
        return fail(
            NotRunningError(f"no run directory {run_dir}: nothing set; give --run-dir")
        )
    text = f"capture is {args.switch} in {run_dir}"
    if not off and switches_on(folders):
        text += ", but paused: run `vllm-tide resume`"
    _wait_for_engines(args, run_dir)
    engines = read_manifests(run_dir)
    count = sum(map(_captures, engines))
    if count or not engines:
        text += f"; {count} engine{' follows' if count == 1 else 's follow'}"
    if never := len(engines) - count:
        text += f"; {never} configured to capture nothing (tide.preset, tide.capture)"
    if not engines:
        text += "; servers that start there do"
    value = {"capture": args.switch, "run_dir": str(run_dir)}
    value |= {"engines": len(engines), "follow": count}
    return emit(args, text, value) or EXIT_NO * (not engines)


def running_state_dirs(args: argparse.Namespace, run_dir: Path) -> list[str | None]:
    return state_dirs(run_dir) or [getattr(args, "state_dir", None)]
