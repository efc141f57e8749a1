"""Commands to running trainers: status, pause, resume, capture, rollback and purge."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_tide.cli import EXIT_NO, add_output, add_run_dir, emit, fail
from vllm_tide.transport import purge
from vllm_tide.transport.admin import NoTrainerError, send_to_all
from vllm_tide.transport.rendezvous import (
    NotRunningError,
    default_run_dir,
    prepare_run_dir,
    read_manifests,
    require_readable,
    state_dirs,
)
from vllm_tide.transport.shm import TransportError

if TYPE_CHECKING:
    from vllm_tide.transport.spool_store import Store

Counts = dict[purge.DataHolder, Counter[str]]

MAX_SECONDS = 86400
POLL_S = 0.2
EPILOGS = {
    "status": "The loop of the trainer answers, so an answer means that it runs. `top` "
    "shows engines and servers too.",
    "rollback": "The canary rolls back automatically when served speed falls. Training "
    "continues from the older draft after two cycles; `pause` prevents further "
    "publications. Without a running trainer the command itself publishes the previous "
    "stored draft, else the initial one, to a running engine.",
    "pause": "Engines then send no data, not even token ids, so the canary decides "
    "after `resume`. The pause persists over restarts and reboots, and needs no "
    "trainer. Exit status: 0, or 1 without an engine or if a trainer does not answer.",
    "capture": "Engines follow within a second, with or without a trainer, also those "
    "that start later. Exit status: 0, or 1 without an engine.",
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
    if name in ("purge", "capture", "rollback"):
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
    runners = {"status": _status, "capture": _switch_capture, "purge": _purge}
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
    answers = send_to_all(run_dir, {"do": args.command}, args.timeout)
    return _print_answers(args, answers, describe)


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
    return status or EXIT_NO * (len(good) < len(answers))


def _outcome(answer: dict[str, Any]) -> str:
    if "served_as" in answer:
        return (
            f"rolled back from version {answer['version']} to {answer['to']}, served "
            f"as version {answer['served_as']} from the engine's next steps on"
        )
    was, note = answer["was_paused"], f"; {answer['note']}" if "note" in answer else ""
    if answer["paused"]:
        return ("was paused" if was else "paused") + note
    return ("resumed" if was else "was not paused") + note


def _status(args: argparse.Namespace, run_dir: Path) -> int:
    from vllm_tide.capture.switch import OFF, PAUSED, switch_folders, switches_on

    switched = {
        OFF: "capture is off: `vllm-tide capture on` switches it on",
        PAUSED: "paused, so nothing is captured: `vllm-tide resume` continues",
    }

    def describe(answer: dict[str, Any]) -> str:
        status = answer["status"]
        waiting = f", waiting for {why}" if (why := status["waiting_for"]) else ""
        decided = f"; last decision: {why}" if (why := status["last_decision"]) else ""
        engines = len(status["engines"])
        return (
            f"{status['state']}, engines: {engines}; cycles: {status['cycles']}, "
            f"steps: {status['steps']}; drafts published: {status['publications']}, "
            f"rolled back: {status['rollbacks']}; version "
            f"{status['installed_version']} served{waiting}{decided}"
        )

    try:
        return _send_to_trainers(run_dir, args, describe)
    finally:
        with contextlib.suppress(OSError, TransportError):
            folders = switch_folders(run_dir, *_state_dirs(args, run_dir))
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
        return _send_to_trainers(run_dir, args, _outcome)
    except NoTrainerError:
        if not os.path.lexists(run_dir):
            raise
    # Engines follow the files within a second; so does a trainer that starts or hangs.
    switch = Switch(run_dir, PAUSED, *_state_dirs(args, run_dir))
    was, on = switch.on, args.command == "pause"
    why = switch.set(on)
    answer = {"was_paused": was, "paused": on} | ({"note": why} if why else {})
    silent = _silent_trainers(args, run_dir)
    note = "no trainer is running"
    if silent:
        note = f"{silent[0]} does not answer; it follows when it does"
    elif _no_engine(run_dir):
        note = f"no engine is running in {run_dir}: is it the server's --run-dir?"
    status = emit(args, f"{_outcome(answer)} ({note})", answer)
    done = not (why or silent or _no_engine(run_dir))
    return status or EXIT_NO * (not done)


def _silent_trainers(args: argparse.Namespace, run_dir: Path) -> list[purge.DataHolder]:
    """Return live trainers, to be called if none has a socket."""
    holders = purge.live_data_holders(run_dir, *_state_dirs(args, run_dir))
    return sorted(holder for holder in holders if holder.kind == "trainer")


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
    folders = switch_folders(run_dir, *(dirs := _state_dirs(args, run_dir)))
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
    count = len(read_manifests(run_dir))
    follow = "engine follows" if count == 1 else "engines follow"
    text += f"; {count} {follow}"
    if not count:
        text += ": is it the server's --run-dir?"
    value = {"capture": args.switch, "run_dir": str(run_dir), "engines": count}
    return emit(args, text, value) or EXIT_NO * (not count)


def _state_dirs(args: argparse.Namespace, run_dir: Path) -> list[str | None]:
    return state_dirs(run_dir) or [getattr(args, "state_dir", None)]


def _purge(args: argparse.Namespace, run_dir: Path) -> int:
    """Purge the data holders, then the spool, then the trainers again.

    A relay may have written data just before it answered, and a trainer may have read
    them before the spool was purged.
    """
    from vllm_tide.transport.spool_store import open_store
    from vllm_tide.transport.spool_writer import purge_records

    if not args.all and not args.tenant and args.tenant_id is None:
        raise TransportError(
            "purge: no data selected; give --tenant NAME, --tenant-id HEX, or --all"
        )
    store = None if args.spool is None else open_store(args.spool)
    tenant = _tenant(args, run_dir, store)
    scope = "everything" if tenant is None else f"tenant {tenant:016x}"
    lines = [f"purge of {scope}"]
    counts: Counts = {}
    removed = 0
    missing = _purge_holders(run_dir, tenant, args, counts)
    if store is not None:
        # No time limit for --all: clocks of two hosts may differ.
        before = math.inf if tenant is None else None
        removed = purge_records(store, tenant=tenant, before_unix=before)
        lines.append(f"spool: removed {removed} shards")
        if not missing and any(holder.kind == "trainer" for holder in counts):
            missing = _purge_holders(run_dir, tenant, args, counts)
    for holder, removals in sorted(counts.items()):
        text = ", ".join(f"{n} {name}" for name, n in sorted(removals.items()))
        lines.append(f"{holder}: removed {text or 'nothing'}")
    if not missing and all(holder.kind == "relay" for holder in counts):
        which = "--all" if tenant is None else f"--tenant-id {tenant:016x}"
        lines.append(f"next, on the trainer's host: vllm-tide purge {which}")
    done = [{"who": str(holder), **removals} for holder, removals in counts.items()]
    value = {"removed": done, "spool_shards": removed, "missing": missing}
    status = emit(args, "\n".join(lines), value)
    if missing:
        fail(missing)
        return EXIT_NO
    return status


def _purge_holders(
    run_dir: Path, tenant: int | None, args: argparse.Namespace, counts: Counts
) -> str:
    """Send a purge to all data holders, add up the answers; return what is missing."""
    request, deadline = purge.ask(run_dir, tenant), time.monotonic() + args.timeout
    while True:
        live = purge.live_data_holders(run_dir, *_state_dirs(args, run_dir))
        answered = purge.answers(run_dir, request)
        silent = live - set(answered)
        unread = purge.unread_engines(run_dir) if answered else []
        if not (silent or unread) or time.monotonic() >= deadline:
            break
        time.sleep(POLL_S)
    for holder, removals in answered.items():
        counts.setdefault(holder, Counter()).update(removals)
    if silent:
        return (
            f"{min(silent)} has not answered; it, or its successor, removes the data "
            "when it does, and may pass them on until then: run purge again to confirm"
        )
    if unread:
        return (
            f"the ring of engine {unread[0]} is not empty and has no reader; the "
            "next reader removes the data: run purge again to confirm"
        )
    if not answered:
        return (
            f"no trainer is running in {run_dir}, and no relay; the next one removes "
            "the data"
        )
    purge.withdraw(run_dir, request)
    return ""


def _tenant(args: argparse.Namespace, run_dir: Path, store: Store | None) -> int | None:
    """Return the id of the given tenant; None for all."""
    if args.tenant is not None:
        return _named_tenant(args, run_dir, store)
    if args.tenant_id is None:
        return None
    with contextlib.suppress(ValueError):
        if 0 <= (tenant := int(args.tenant_id, 16)) < 1 << 64:
            return tenant
    raise TransportError(
        f"--tenant-id: {args.tenant_id!r} is not a hexadecimal id of 64 bits; "
        "`vllm-tide purge --tenant NAME` prints it"
    )


def _named_tenant(args: argparse.Namespace, run_dir: Path, store: Store | None) -> int:
    from vllm_tide.transport import tenant
    from vllm_tide.transport.spool import EngineFolder, engine_ids

    live = read_manifests(run_dir)
    state_dir = args.state_dir or next(filter(None, _state_dirs(args, run_dir)), None)
    key = tenant.tenant_key(run_dir, state_dir, create=False)
    tenant_id, own = tenant.tenant_id(args.tenant, key), tenant.key_id(key)
    known = {m.tenant_key_id for m in live}
    known.update(*purge.live_trainers(run_dir).values())
    for folder in [EngineFolder(store, i) for i in engine_ids(store)] if store else []:
        shards = folder.store.sizes(folder.path("records"))
        if shards and (entry := folder.read_engine()):
            known.add(entry.manifest.tenant_key_id)
    if others := known - {"", own}:
        raise TransportError(
            f"--tenant: nothing was removed, as the tenants' key is {own} but there "
            f"are data of {', '.join(sorted(others))}: purge by --tenant-id (by this "
            f"key {tenant_id:016x}) or --all"
        )
    return tenant_id
