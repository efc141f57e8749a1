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

MOST_SECONDS = 86400
POLL_S = 0.2
EPILOGS = {
    "status": "The trainer itself answers, so its loop turns. `top` watches engines "
    "and servers too.",
    "rollback": "The canary does this by itself when served acceptance falls. Training "
    "goes on from the older draft after two cycles; `pause` keeps it from publishing "
    "another. Where no trainer runs the command itself sends the engines the stored "
    "draft before, else the one that they started with.",
    "pause": "Nothing leaves the engine then, token ids neither, so a draft on trial "
    "is judged after `resume`. The pause outlives a restart and a reboot, and needs no "
    "trainer.",
    "capture": "They follow within a second, with or without a trainer, and so do "
    "those that start later. Exit status: 0, or 1 when no engine is there to follow.",
}
TENANT = "of this tenant (vllm_xargs: tide_tenant)"
TENANT_ID = """the same by id, for a trainer on another host: the id is printed by
    `purge --tenant` on the engine's"""
STATE_DIR = "tide.train.state_dir, where it is set and no engine runs"
SPOOL = "directory or fsspec URL: also remove the shards that hold such data"
PROBE = "exit 0 as well while no engine is there: a trainer that waits is healthy"


def add_arguments(parser: argparse.ArgumentParser, name: str) -> None:
    parser.epilog = EPILOGS.get(name)
    parser.set_defaults(command=name)
    add = parser.add_argument
    if name == "purge":
        whose = parser.add_mutually_exclusive_group().add_argument
        whose("--tenant", metavar="NAME", help=TENANT)
        whose("--tenant-id", metavar="HEX", help=TENANT_ID)
        whose("--all", action="store_true", help="everybody's")
    add_run_dir(parser)
    if name in ("purge", "capture", "rollback"):
        add("--state-dir", metavar="DIR", help=STATE_DIR)
    if name == "purge":
        add("--spool", metavar="URL", help=SPOOL)
    default = 60.0 if name == "purge" else 30.0
    text = "seconds to wait for the answers"
    add("--timeout", type=_seconds, default=default, metavar="SECONDS", help=text)
    add_output(parser)
    if name == "capture":
        add("wanted", choices=("on", "off"), metavar="on|off")
    if name == "status":
        add("--probe", action="store_true", help=PROBE)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= MOST_SECONDS:
        said = f"give seconds, more than 0 and at most {MOST_SECONDS}"
        raise argparse.ArgumentTypeError(f"{text!r} is no time to wait; {said}")
    return seconds


def run(args: argparse.Namespace) -> int:
    """Runs a command; 1 when a trainer refused or was silent, or none is there."""
    runners = {"status": _status, "capture": _switch_capture, "purge": _purge}
    runners |= {"rollback": _roll_back, "pause": _pause, "resume": _pause}
    try:
        run_dir = args.run_dir or default_run_dir()
        require_readable(run_dir)
        return runners[args.command](args, run_dir)
    except TransportError as error:
        status = fail(error)
        if getattr(args, "probe", False) and _no_engine(args.run_dir):
            print("no engine is there either: a trainer would be waiting for one")
            return 0
        return status


def _ask_trainers(
    run_dir: Path, args: argparse.Namespace, words: Callable[[Any], str]
) -> int:
    answers = send_to_all(run_dir, {"do": args.command}, args.timeout)
    return _answered(args, answers, words)


def _answered(
    args: argparse.Namespace,
    answers: dict[str, dict[str, Any]],
    words: Callable[[Any], str],
) -> int:
    """Print what trainers or engines answered, by name, as text or JSON."""
    good = {name: a for name, a in sorted(answers.items()) if a.get("ok")}
    for name in sorted(answers.keys() - good.keys()):
        fail(f"{name}: {answers[name].get('error')}")
    lines = [f"{name}: {words(answer)}" for name, answer in good.items()]
    status = 0
    if lines or args.json:
        values = {name: a.get("status", a) for name, a in answers.items()}
        status = emit(args, "\n".join(lines), values)
    return status or EXIT_NO * (len(good) < len(answers))


def _outcome(answer: dict[str, Any]) -> str:
    if "served_as" in answer:
        return (
            f"from version {answer['version']} back to {answer['to']}, which is served "
            f"as version {answer['served_as']} as soon as the engines have it"
        )
    was, note = answer["was_paused"], f"; {answer['note']}" if "note" in answer else ""
    if answer["paused"]:
        return ("was paused" if was else "paused") + note
    return ("resumed" if was else "was not paused") + note


def _status(args: argparse.Namespace, run_dir: Path) -> int:
    from vllm_tide.capture.switch import switch_folders, switches_on

    def words(answer: dict[str, Any]) -> str:
        status = answer["status"]
        waiting = f", waits for {why}" if (why := status["waiting_for"]) else ""
        decided = f"; last decision: {why}" if (why := status["last_decision"]) else ""
        engines = len(status["engines"])
        return (
            f"{status['state']}, {engines} engine{'s' * (engines != 1)}, "
            f"{status['cycles']} cycles, {status['steps']} steps, "
            f"{status['publications']} drafts published, {status['rollbacks']} rolled "
            f"back, version {status['installed_version']} served{waiting}{decided}"
        )

    try:
        return _ask_trainers(run_dir, args, words)
    finally:
        with contextlib.suppress(OSError, TransportError):
            folders = switch_folders(run_dir, *_state_dirs(args, run_dir))
            if not args.json and (off := switches_on(folders)):
                print(f"capture is off ({', '.join(off)})")


def _roll_back(args: argparse.Namespace, run_dir: Path) -> int:
    try:
        return _ask_trainers(run_dir, args, _outcome)
    except NoTrainerError as error:
        _require_engines_alone(args, run_dir, error)
    from vllm_tide.deploy.rollback import roll_back
    from vllm_tide.draft.config import DraftError

    answers: dict[str, dict[str, Any]] = {}
    for manifest in read_manifests(run_dir):
        name = f"engine {manifest.engine_id}"
        kept = args.state_dir or manifest.tide.get("train", {}).get("state_dir")
        folder = Path(kept).expanduser() if kept else run_dir / "heads"
        try:
            answers[name] = {"ok": True, **roll_back(manifest, folder)}
        except (DraftError, TransportError) as error:
            answers[name] = {"ok": False, "error": str(error)}
    return _answered(
        args, answers, lambda answer: f"{_outcome(answer)} (no trainer is running)"
    )


def _pause(args: argparse.Namespace, run_dir: Path) -> int:
    from vllm_tide.capture.switch import PAUSED, Switch

    try:
        return _ask_trainers(run_dir, args, _outcome)
    except NoTrainerError as error:
        _require_engines_alone(args, run_dir, error)
    switch = Switch(run_dir, PAUSED, *_state_dirs(args, run_dir))
    was, on = switch.on, args.command == "pause"
    why = switch.set(on)
    answer = {"was_paused": was, "paused": on} | ({"note": why} if why else {})
    status = emit(args, f"{_outcome(answer)} (no trainer is running)", answer)
    return status or EXIT_NO * bool(why)


def _require_engines_alone(
    args: argparse.Namespace, run_dir: Path, error: NoTrainerError
) -> None:
    """Raise where a trainer lives all the same, and `error` without an engine."""
    kept = _state_dirs(args, run_dir)
    for keeper in sorted(purge.live_data_holders(run_dir, *kept)):
        if keeper.kind == "trainer":
            raise TransportError(
                f"{keeper} has no socket in {run_dir} now and makes it anew within a "
                "second or two: try again; if it hangs, stop it"
            )
    if _no_engine(run_dir):
        raise error


def _no_engine(run_dir: Path | None) -> bool:
    try:
        return not read_manifests(run_dir or default_run_dir())
    except TransportError:  # the directory is another user's: no trainer runs there
        return False


def _switch_capture(args: argparse.Namespace, run_dir: Path) -> int:
    from vllm_tide.capture.switch import OFF, Switch, switch_folders, switches_on

    there, off = os.path.lexists(run_dir), args.wanted == "off"
    if there:
        prepare_run_dir(run_dir)
    folders = switch_folders(run_dir, *(kept := _state_dirs(args, run_dir)))
    if (there or not off) and (why := Switch(run_dir, OFF, *kept).set(off)):
        if not (off and OFF in switches_on([run_dir])):
            raise TransportError(why)
        lasts = "capture is off, but that may not outlive a reboot: set"
        print(f"{lasts} tide.train.state_dir ({why})", file=sys.stderr)
    if not there and off:
        return fail(
            NotRunningError(f"no run directory {run_dir}: nothing set; give --run-dir")
        )
    said = f"capture is {args.wanted} in {run_dir}"
    if not off and switches_on(folders):
        said += ", but paused: `vllm-tide resume`"
    count = len(read_manifests(run_dir))
    follow = "engine follows" if count == 1 else "engines follow"
    said += f"; {count} {follow}"
    if not count:
        said += ": is it the server's --run-dir?"
    value = {"capture": args.wanted, "run_dir": str(run_dir), "engines": count}
    return emit(args, said, value) or EXIT_NO * (not count)


def _state_dirs(args: argparse.Namespace, run_dir: Path) -> list[str | None]:
    return state_dirs(run_dir) or [getattr(args, "state_dir", None)]


def _purge(args: argparse.Namespace, run_dir: Path) -> int:
    """Purges keepers, then the spool, then the trainers once more.

    A relay may have written what it held a moment before it answered, and a trainer may
    have read it a moment before that.
    """
    from vllm_tide.transport.spool_store import open_store
    from vllm_tide.transport.spool_writer import purge_records

    if not args.all and args.tenant is None and args.tenant_id is None:
        raise TransportError(
            "purge: whose data? give --tenant NAME, --tenant-id HEX, or --all"
        )
    store = None if args.spool is None else open_store(args.spool)
    tenant = _tenant(args, run_dir, store)
    lines = [
        f"purge {'of everything' if tenant is None else f'of tenant {tenant:016x}'}"
    ]
    counts: Counts = {}
    removed = 0
    missing = _ask_keepers(run_dir, tenant, args, counts)
    if store is not None:
        # Everything: clocks of two hosts may differ.
        before = math.inf if tenant is None else None
        removed = purge_records(store, tenant=tenant, before_unix=before)
        lines.append(f"spool: removed {removed} shards")
        if not missing and any(keeper.kind == "trainer" for keeper in counts):
            missing = _ask_keepers(run_dir, tenant, args, counts)
    for keeper, found in sorted(counts.items()):
        said = ", ".join(f"{n} {name}" for name, n in sorted(found.items()))
        lines.append(f"{keeper}: removed {said or 'nothing'}")
    if not missing and all(keeper.kind == "relay" for keeper in counts):
        which = "--all" if tenant is None else f"--tenant-id {tenant:016x}"
        lines.append(f"next, where a trainer reads the spool: vllm-tide purge {which}")
    done = [{"who": str(keeper), **found} for keeper, found in counts.items()]
    value = {"removed": done, "spool_shards": removed, "missing": missing}
    status = emit(args, "\n".join(lines), value)
    if missing:
        fail(missing)
        return EXIT_NO
    return status


def _ask_keepers(
    run_dir: Path, tenant: int | None, args: argparse.Namespace, counts: Counts
) -> str:
    """Asks all once, and adds up what they removed; who is missing, empty if nobody."""
    request, deadline = purge.ask(run_dir, tenant), time.monotonic() + args.timeout
    while True:
        live = purge.live_data_holders(run_dir, *_state_dirs(args, run_dir))
        answered = purge.answers(run_dir, request)
        silent = live - set(answered)
        unread = purge.unread_engines(run_dir) if answered else []
        if not (silent or unread) or time.monotonic() >= deadline:
            break
        time.sleep(POLL_S)
    for keeper, found in answered.items():
        counts.setdefault(keeper, Counter()).update(found)
    if silent:
        return (
            f"{min(silent)} has not answered; the request stays for it, or for the "
            "next one: purge again then, what it holds may get further"
        )
    if unread:
        return (
            f"nobody reads the ring of engine {unread[0]}, which is not empty; the "
            "request stays for the next one who does: purge again then"
        )
    if not answered:
        return (
            f"no trainer is running in {run_dir}, and no relay; the request stays for "
            "the next one"
        )
    purge.withdraw(run_dir, request)
    return ""


def _tenant(args: argparse.Namespace, run_dir: Path, store: Store | None) -> int | None:
    """Id of the tenant that is named; None for everybody."""
    if args.tenant is not None:
        return _named(args, run_dir, store)
    if args.tenant_id is None:
        return None
    with contextlib.suppress(ValueError):
        if 0 <= (tenant := int(args.tenant_id, 16)) < 1 << 64:
            return tenant
    raise TransportError(
        f"--tenant-id: {args.tenant_id!r} is no id of 64 bits in hexadecimal; it is "
        "what `vllm-tide purge --tenant NAME` prints"
    )


def _named(args: argparse.Namespace, run_dir: Path, store: Store | None) -> int:
    from vllm_tide.transport import tenant
    from vllm_tide.transport.spool import EngineFolder, engine_ids

    live = read_manifests(run_dir)
    state_dir = args.state_dir or next(filter(None, _state_dirs(args, run_dir)), None)
    key = tenant.tenant_key(run_dir, state_dir, create=False)
    name, mine = tenant.tenant_id(args.tenant, key), tenant.key_id(key)
    known = {m.tenant_key_id for m in live}
    known.update(*purge.live_trainers(run_dir).values())
    for folder in [EngineFolder(store, i) for i in engine_ids(store)] if store else []:
        held = folder.store.sizes(folder.path("records"))
        if held and (entry := folder.read_engine()):
            known.add(entry.manifest.tenant_key_id)
    if others := known - {"", mine}:
        raise TransportError(
            f"--tenant: the tenants' key is another one ({mine}; there are data of "
            f"{', '.join(sorted(others))}), so nothing was removed: purge by "
            f"--tenant-id (by this key {name:016x}) or --all"
        )
    return name
