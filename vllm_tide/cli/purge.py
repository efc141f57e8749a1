"""`vllm-tide purge`: make running trainers, relays and a spool forget captured data.

Every trainer and relay of the run directory answers. A relay may have written what it
held a moment before it answered, so the spool is purged after that; a trainer may have
read it a moment before that, so trainers are then asked once more.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_tide.transport.purge import Keeper
    from vllm_tide.transport.spool_store import Store

POLL_S = 0.2
EXIT_ERROR, EXIT_UNANSWERED = 2, 1


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the command to the command line."""
    parser = subparsers.add_parser(
        "purge", help="make the running trainers and relays forget captured data"
    )
    who = parser.add_mutually_exclusive_group()
    who.add_argument(
        "--tenant",
        metavar="NAME",
        help="of this tenant (vllm_xargs: tide_tenant)",
    )
    who.add_argument(
        "--tenant-id",
        metavar="HEX",
        help="the same by id, for a trainer on another host: the id is printed by "
        "`purge --tenant` on the engine's",
    )
    who.add_argument("--all", action="store_true", help="everybody's")
    parser.add_argument("--run-dir", type=Path, help="run directory of the engines")
    parser.add_argument(
        "--state-dir", help="tide.train.state_dir, where it is set and no engine runs"
    )
    parser.add_argument(
        "--spool",
        help="directory or fsspec URL: also remove the shards that hold such data",
    )
    parser.add_argument(
        "--timeout", type=float, default=60.0, help="seconds to wait for the answers"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command; 0 when all have answered, 1 when one has not."""
    from vllm_tide.transport.header import TransportError

    try:
        return _run(args)
    except TransportError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_ERROR


def _run(args: argparse.Namespace) -> int:
    from vllm_tide.transport.header import TransportError
    from vllm_tide.transport.rendezvous import default_run_dir
    from vllm_tide.transport.spool_store import open_store

    if not args.all and args.tenant is None and args.tenant_id is None:
        raise TransportError(
            "purge: whose data? give --tenant NAME, --tenant-id HEX, or --all"
        )
    run_dir = args.run_dir or default_run_dir()
    store = None if args.spool is None else open_store(args.spool)
    tenant = _tenant(args, run_dir, store)
    print(f"purge {'of everything' if tenant is None else f'of tenant {tenant:016x}'}")
    counts: dict[Keeper, Counter[str]] = {}
    missing = _ask(run_dir, tenant, args.timeout, counts)
    if store is not None:
        print(f"spool: removed {_purge_spool(store, tenant)} shards")
        if not missing and any(keeper.kind == "trainer" for keeper in counts):
            missing = _ask(run_dir, tenant, args.timeout, counts)
    for keeper, found in sorted(counts.items()):
        said = ", ".join(f"{n} {name}" for name, n in sorted(found.items()))
        print(f"{keeper}: removed {said or 'nothing'}")
    if missing:
        print(missing, file=sys.stderr)
        return EXIT_UNANSWERED
    if all(keeper.kind == "relay" for keeper in counts):
        which = "--all" if tenant is None else f"--tenant-id {tenant:016x}"
        print(f"next, where a trainer reads the spool: vllm-tide purge {which}")
    return 0


def _ask(
    run_dir: Path,
    tenant: int | None,
    timeout_s: float,
    counts: dict[Keeper, Counter[str]],
) -> str:
    """Ask all once, and add up what they removed; who is missing, empty if nobody."""
    from vllm_tide.transport import purge

    request = purge.ask(run_dir, tenant)
    deadline = time.monotonic() + timeout_s
    while True:
        live = purge.live_keepers(run_dir)
        answered = purge.answers(run_dir, request)
        silent = live - set(answered)
        if not silent or time.monotonic() >= deadline:
            break
        time.sleep(POLL_S)
    for keeper, found in answered.items():
        counts.setdefault(keeper, Counter()).update(found)
    if silent:
        return (
            f"{min(silent)} has not answered; the request stays for it, or for the "
            "next one: purge again then, what it holds may get further"
        )
    if not answered:
        return (
            f"no trainer is running in {run_dir}, and no relay; the request stays for "
            "the next one"
        )
    purge.withdraw(run_dir, request)
    return ""


def _purge_spool(store: Store, tenant: int | None) -> int:
    from vllm_tide.transport.spool_writer import purge_records

    # Everything: clocks of two hosts may differ.
    before = math.inf if tenant is None else None
    return purge_records(store, tenant=tenant, before_unix=before)


def _named(args: argparse.Namespace, run_dir: Path, store: Store | None) -> int:
    """The id of a tenant's name.

    Raises:
        TransportError: Also if data are there whose tenants another key has named.
    """
    from vllm_tide.transport import purge, rendezvous, tenant
    from vllm_tide.transport.header import TransportError
    from vllm_tide.transport.spool import EngineFolder, engine_ids

    live = rendezvous.read_manifests(run_dir)
    told = [m.tide.get("train", {}).get("state_dir") for m in live]
    state_dir = args.state_dir or next(filter(None, told), None)
    key = tenant.tenant_key(run_dir, state_dir, create=False)
    name, mine = tenant.tenant_id(args.tenant, key), tenant.key_id(key)
    known = {m.tenant_key_id for m in live}.union(
        *purge.live_trainers(run_dir).values()
    )
    folders = [EngineFolder(store, i) for i in engine_ids(store)] if store else []
    for folder in folders:
        if folder.store.sizes(folder.path("records")) and (
            entry := folder.read_engine()
        ):
            known.add(entry.manifest.tenant_key_id)
    if others := known - {"", mine}:
        raise TransportError(
            f"--tenant: the tenants' key is another one ({mine}; there are data of "
            f"{', '.join(sorted(others))}), so nothing was removed: purge by "
            f"--tenant-id (by this key {name:016x}) or --all"
        )
    return name


def _tenant(args: argparse.Namespace, run_dir: Path, store: Store | None) -> int | None:
    from vllm_tide.transport.header import TransportError

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
