"""`vllm-tide purge`: remove captured data from trainers, relays and a spool."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_tide.cli import EXIT_NO, emit, fail
from vllm_tide.cli.trainer import (
    displayed,
    running_state_dirs,
    socket_folders,
)
from vllm_tide.transport import tenant
from vllm_tide.transport.admin import Answer, send_to_all, sockets
from vllm_tide.transport.rendezvous import is_spooled, read_manifests
from vllm_tide.transport.ring import peek_ring, ring_consumer
from vllm_tide.transport.shm import TransportError

if TYPE_CHECKING:
    from vllm_tide.transport.spool import Store

Counts = dict[str, Counter[str]]

POLL_S = 0.2


def run_purge(args: argparse.Namespace, run_dir: Path) -> int:
    """Purge the data holders, then the spool, then the trainers again.

    A relay may have written data just before it answered, and a trainer may have read
    them before the spool was purged.
    """
    from vllm_tide.transport.spool import Store, engine_folders
    from vllm_tide.transport.spool_shard import purge_shards

    if not args.all and not args.tenant and args.tenant_id is None:
        raise TransportError(
            "purge: no data selected; give --tenant NAME, --tenant-id HEX, or --all"
        )
    store = None if args.spool is None else Store(args.spool, create=False)
    tenant = _tenant(args, run_dir, store)
    scope = "everything" if tenant is None else f"tenant {tenant:016x}"
    lines = [f"purge of {scope}"]
    counts: Counts = {}
    removed = 0
    missing = _purge_holders(run_dir, tenant, args, counts)
    if store is not None:
        try:
            removed = purge_shards(engine_folders(store), tenant)
            lines.append(f"spool: removed {removed} shards")
        except TransportError as error:
            missing = missing or f"spool: {error}"
        if not missing and any(name.startswith("trainer") for name in counts):
            missing = _purge_holders(run_dir, tenant, args, counts)
    for holder, removals in sorted(counts.items()):
        text = ", ".join(f"{n} {name}" for name, n in sorted(removals.items()) if n)
        text = text.replace("_", " ") or "nothing, it had no such data"
        lines.append(f"{holder}: removed {text}")
    if not missing and not counts and store is None:
        lines.append("no trainer, no relay and no rows in a ring: nothing to remove")
    elif not missing and all(name.startswith("relay") for name in counts):
        which = "--all" if tenant is None else f"--tenant-id {tenant:016x}"
        lines.append(f"next, on the trainer's host: vllm-tide purge {which}")
    done = [{"who": holder, **removals} for holder, removals in counts.items()]
    value = {"removed": done, "spool_shards": removed, "missing": missing}
    status = emit(args, "\n".join(lines), value)
    if missing:
        fail(missing)
        return EXIT_NO
    return status


def _purge_holders(
    run_dir: Path, tenant: int | None, args: argparse.Namespace, counts: Counts
) -> str:
    """Send a purge to trainers and relays; return what is missing, empty if nothing."""
    request = {"do": "purge", "tenant": None if tenant is None else f"{tenant:016x}"}
    deadline, answers = time.monotonic() + args.timeout, dict[str, Answer]()
    while True:
        paths = sockets(socket_folders(args, run_dir), "trainer", "relay")
        # A process that starts, or one without its file, has a socket later.
        answers = {name: answer for name, answer in answers.items() if answer.get("ok")}
        paths = {name: path for name, path in paths.items() if name not in answers}
        left = max(deadline - time.monotonic(), POLL_S)
        answers |= send_to_all(paths, request, left)
        missing = _unconfirmed(run_dir, answers)
        if not missing or time.monotonic() >= deadline:
            break
        time.sleep(POLL_S)
    for name, answer in displayed(answers).items():
        if answer.get("ok"):
            counts.setdefault(name, Counter()).update(answer["removed"])
    if missing or answers:
        return missing
    engines = read_manifests(run_dir)
    if not engines:
        return (
            f"no engine, trainer or relay runs in {run_dir}, so no data are in memory "
            "there: give a server's run directory (--run-dir)"
        )
    if any(is_spooled(engine) or _has_rows(engine.ring) for engine in engines):
        return (
            f"no trainer is running in {run_dir}, and no relay: nothing was removed; "
            "rows in the server's ring stay until a trainer reads them or the server "
            "stops"
        )
    return _unconfirmed(run_dir, answers)  # a trainer may have attached meanwhile


def _has_rows(ring: str) -> bool:
    """Return whether a ring has rows; also if it cannot be read here."""
    stats = peek_ring(ring)
    return bool(ring) and (stats is None or stats.used_bytes > 0)


def _unconfirmed(run_dir: Path, answers: dict[str, Answer]) -> str:
    """Return which live process has not confirmed a purge; empty if all have."""
    for name, answer in sorted(displayed(answers).items()):
        if not answer.get("ok"):
            return f"{name}: {answer.get('error')}; run purge again to confirm"
    read = {engine for answer in answers.values() for engine in answer["engines"]}
    for manifest in read_manifests(run_dir):
        reader, stats = ring_consumer(manifest.ring), peek_ring(manifest.ring)
        if reader is not None and manifest.engine_id not in read:
            who = "relay" if is_spooled(manifest) else "trainer"
            return (
                f"{who} {reader}, which reads engine {manifest.engine_id}, has not "
                "answered: it may be starting; run purge again to confirm"
            )
        if answers and reader is None and stats is not None and stats.used_bytes:
            return (
                f"the ring of engine {manifest.engine_id} is not empty and has no "
                "reader: start a trainer or stop the server, and run purge again"
            )
    return ""


def _tenant(args: argparse.Namespace, run_dir: Path, store: Store | None) -> int | None:
    """Return the id of the given tenant; None for all."""
    if args.tenant is not None:
        return _named_tenant(args, run_dir, store)
    if args.tenant_id is None:
        return None
    try:
        return tenant.parse_id(args.tenant_id)
    except TransportError as error:
        raise TransportError(
            f"--tenant-id: {error}; `vllm-tide purge --tenant NAME` prints it"
        ) from None


def _named_tenant(args: argparse.Namespace, run_dir: Path, store: Store | None) -> int:
    from vllm_tide.transport.spool import engine_folders

    live = read_manifests(run_dir)
    state_dir = args.state_dir or next(
        filter(None, running_state_dirs(args, run_dir)), None
    )
    key = tenant.tenant_key(run_dir, state_dir, create=False)
    tenant_id, own = tenant.tenant_id(args.tenant, key), tenant.key_id(key)
    known = {m.tenant_key_id for m in live}
    trainers = sockets(socket_folders(args, run_dir), "trainer")
    answers = send_to_all(trainers, {"do": "status"}, args.timeout)
    for name, answer in displayed(answers).items():
        if not answer.get("ok"):
            raise TransportError(f"{name}: {answer.get('error')}; nothing was removed")
        known.update(answer["status"]["tenant_keys"])
    for folder in engine_folders(store) if store else ():
        if folder.shards() and (entry := folder.read_engine()):
            known.add(entry.manifest.tenant_key_id)
    if others := known - {"", own}:
        raise TransportError(
            f"--tenant: nothing was removed, as the tenants' key is {own} but there "
            f"are data of {', '.join(sorted(others))}: purge by --tenant-id (by this "
            f"key {tenant_id:016x}) or --all"
        )
    return tenant_id
