"""`vllm-tide purge`: make running trainers, and a spool, forget captured data."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from pathlib import Path

POLL_S = 0.2
EXIT_ERROR, EXIT_UNANSWERED = 2, 1


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the command to the command line."""
    parser = subparsers.add_parser(
        "purge", help="make the running trainers forget captured data"
    )
    who = parser.add_mutually_exclusive_group()
    who.add_argument(
        "--tenant",
        metavar="NAME",
        help="only of this tenant (vllm_xargs: tide_tenant); else everything",
    )
    who.add_argument(
        "--tenant-id",
        metavar="HEX",
        help="the same by id, for a trainer on another host: the id is printed by "
        "`purge --tenant` on the engine's",
    )
    parser.add_argument("--run-dir", type=Path, help="run directory of the trainers")
    parser.add_argument(
        "--spool",
        help="directory or fsspec URL: also remove the shards that hold such data",
    )
    parser.add_argument(
        "--timeout", type=float, default=60.0, help="seconds to wait for the trainers"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command; 0 when every trainer has answered, 1 when one has not."""
    from vllm_tide.transport.header import TransportError

    try:
        return _run(args)
    except TransportError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_ERROR


def _run(args: argparse.Namespace) -> int:
    from vllm_tide.train import purge
    from vllm_tide.transport.rendezvous import default_run_dir

    run_dir = args.run_dir or default_run_dir()
    tenant = _tenant(args, run_dir)
    request = purge.ask(run_dir, tenant)
    print(f"purge {'of everything' if tenant is None else f'of tenant {tenant:016x}'}")
    if args.spool is not None:
        print(f"spool: removed {_purge_spool(args.spool, tenant)} shards")
    deadline = time.monotonic() + args.timeout
    while True:
        live, answered = purge.live_trainers(run_dir), purge.answers(run_dir, request)
        if answered and live <= set(answered):
            break
        if not live or time.monotonic() >= deadline:
            break
        time.sleep(POLL_S)
    for pid, counts in sorted(answered.items()):
        removed = ", ".join(f"{n} {name}" for name, n in sorted(counts.items()))
        print(f"trainer {pid}: removed {removed or 'nothing'}")
    if answered and live <= set(answered):
        purge.withdraw(run_dir, request)
        return 0
    who = (
        f"trainer {min(live - set(answered))} has not answered"
        if live
        else (f"no trainer is running in {run_dir}")
    )
    print(f"{who}; the request stays for the next trainer", file=sys.stderr)
    return EXIT_UNANSWERED


def _purge_spool(url: str, tenant: int | None) -> int:
    from vllm_tide.transport.spool_store import open_store
    from vllm_tide.transport.spool_writer import purge_records

    now = time.time() if tenant is None else None
    return purge_records(open_store(url), tenant=tenant, before_unix=now)


def _tenant(args: argparse.Namespace, run_dir: Path) -> int | None:
    from vllm_tide.transport.header import TransportError
    from vllm_tide.transport.tenant import tenant_id, tenant_key

    if args.tenant is not None:
        return tenant_id(args.tenant, tenant_key(run_dir, create=False))
    if args.tenant_id is None:
        return None
    with contextlib.suppress(ValueError):
        if 0 <= (tenant := int(args.tenant_id, 16)) < 1 << 64:
            return tenant
    raise TransportError(
        f"--tenant-id: {args.tenant_id!r} is no id of 64 bits in hexadecimal; it is "
        "what `vllm-tide purge --tenant NAME` prints"
    )
