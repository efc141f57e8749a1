"""`vllm-tide export`: a trained draft as a directory that unpatched vLLM serves."""

from __future__ import annotations

import argparse
import logging
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_tide.config import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from vllm_tide.draft.export import ExportedDraft
    from vllm_tide.draft.speculators import Verifier
    from vllm_tide.transport.rendezvous import EngineManifest

_SNAPSHOT = re.compile(r".*/models--([^/]+)/snapshots/[^/]+/?")


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the command to the command line."""
    parser = subparsers.add_parser(
        "export",
        help="write a trained draft as a directory that vLLM serves",
        description="Writes weights, configuration and a model card of measured "
        "figures. Without --engine, --from and --state-dir the newest running engine's "
        "live draft is taken. Kept heads carry no configuration: with --state-dir it "
        "is read from the running engine's draft, or from --from and --target.",
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="must be empty")
    parser.add_argument(
        "--format",
        choices=("hf", "speculators"),
        default="speculators",
        help="hf: for --speculative-config; speculators: `vllm serve DIR` (default)",
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--engine", help="id of a running engine")
    source.add_argument(
        "--from", dest="source", type=Path, help="draft directory of either form"
    )
    parser.add_argument(
        "--state-dir", type=Path, help="heads kept by a trainer; the newest good one"
    )
    parser.add_argument(
        "--run-dir", type=Path, help="where engines announce themselves"
    )
    parser.add_argument("--target", help="hub name, written down, or directory")
    parser.add_argument(
        "--num-speculative-tokens", type=int, help="draft length written down"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    from vllm_tide.draft.config import DraftError
    from vllm_tide.draft.export import write_export
    from vllm_tide.swap.verify import DraftRefused
    from vllm_tide.transport.header import TransportError

    logging.basicConfig(format="%(message)s")
    try:
        draft = _named(_read(args), args.target, args.num_speculative_tokens)
        folder = write_export(args.directory, draft, args.format)
    except (ConfigError, DraftError, DraftRefused, TransportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"written: {folder} ({args.format}, from {draft.source})")
    if draft.verifier is None or not draft.verifier.hub_name:
        print("its target is not named: give --target HUB_NAME for `vllm serve DIR`")
    return 0


def _read(args: argparse.Namespace) -> ExportedDraft:
    from vllm_tide.draft.config import read_config
    from vllm_tide.draft.export import from_directory
    from vllm_tide.transport.rendezvous import default_run_dir

    local = args.target is not None and Path(args.target).is_dir()
    if args.source is not None and args.state_dir is None:
        return from_directory(args.source, read_config(args.target) if local else None)
    if args.source is not None:
        if not local:
            raise ConfigError(
                "--target: kept heads are checked against their target; give its "
                "directory with --state-dir and --from."
            )
        return from_state_dir(args.state_dir, args.source, args.target)
    run_dir = args.run_dir or default_run_dir()
    manifest = _find(run_dir, args.engine)
    if args.state_dir is None:
        return from_engine(manifest, run_dir)
    draft = from_state_dir(
        args.state_dir, Path(manifest.draft_path), manifest.target_path
    )
    verifier = target_facts(manifest.target_path, manifest.num_speculative_tokens)
    return replace(draft, verifier=verifier)


def _named(
    draft: ExportedDraft, target: str | None, num_speculative_tokens: int | None
) -> ExportedDraft:
    """What the operator says about the target wins over what the draft says."""
    from vllm_tide.draft.speculators import Verifier

    if num_speculative_tokens is not None and num_speculative_tokens < 1:
        raise ConfigError("--num-speculative-tokens: must be at least 1.")
    verifier = draft.verifier
    if target is not None:
        known = verifier or Verifier()
        verifier = target_facts(target, known.num_speculative_tokens)
        if not verifier.architectures:
            verifier = replace(verifier, architectures=known.architectures)
    if verifier is not None and num_speculative_tokens is not None:
        verifier = replace(verifier, num_speculative_tokens=num_speculative_tokens)
    return replace(draft, verifier=verifier)


def target_facts(target: str, num_speculative_tokens: int) -> Verifier:
    """The target as an export names it: by its hub name if it came from there.

    Args:
        target: Hub name, directory, or a snapshot in the hub's cache.
        num_speculative_tokens: Draft length written down.
    """
    from vllm_tide.draft.config import read_config
    from vllm_tide.draft.speculators import Verifier

    architectures: tuple[str, ...] = ()
    if (Path(target) / "config.json").is_file():
        architectures = tuple(read_config(target).get("architectures") or ())
    snapshot = _SNAPSHOT.fullmatch(target)
    name = snapshot.group(1).replace("--", "/", 1) if snapshot else target
    return Verifier(name, architectures, num_speculative_tokens)


def from_engine(manifest: EngineManifest, run_dir: Path) -> ExportedDraft:
    """The draft a running engine serves.

    Args:
        manifest: The engine.
        run_dir: Where its trainer's status is.

    Raises:
        DraftError: The last publication is not what is served.
        TransportError: The weights segment cannot be read.
    """
    from vllm_tide.draft.config import Eagle3Config, read_config
    from vllm_tide.draft.export import ExportedDraft, from_directory
    from vllm_tide.swap.stage import tensors_of
    from vllm_tide.transport.weights import WeightsSegment

    target = read_config(manifest.target_path)
    verifier = target_facts(manifest.target_path, manifest.num_speculative_tokens)
    engine = f"engine {manifest.engine_id}"
    publication = None
    if manifest.weights:
        segment = WeightsSegment.attach(manifest.weights)
        try:
            if segment.latest_version():
                publication = segment.read()
        finally:
            segment.close()
    if publication is None:
        draft = from_directory(manifest.draft_path, target)
        source = f"{engine}, the draft it started with"
        return replace(draft, verifier=verifier, source=source, version=0)
    _check_served(run_dir, manifest.engine_id, publication.version)
    config = Eagle3Config.from_json(read_config(manifest.draft_path), target)
    tensors: dict[str, Tensor] = {
        name: tensor.clone() for name, tensor in tensors_of(publication).items()
    }
    return ExportedDraft(
        config,
        tensors,
        verifier,
        publication.version,
        engine,
        publication.meta,
        trained=publication.meta.get("to") != 0,  # no rollback to the checkpoint
    )


def from_state_dir(folder: Path, draft_dir: Path, target_dir: str) -> ExportedDraft:
    """The newest good head that a trainer keeps.

    Args:
        folder: `tide.train.state_dir`.
        draft_dir: Directory of the draft the server started with: the shape.
        target_dir: Directory of the target.

    Raises:
        DraftError: There is none for this target and draft.
    """
    from vllm_tide.draft.config import DraftError, Eagle3Config, read_config
    from vllm_tide.draft.export import ExportedDraft
    from vllm_tide.draft.speculators import read_verifier
    from vllm_tide.draft.target import rows_fingerprint
    from vllm_tide.train.head_store import HeadStore, head_fingerprint

    if not folder.is_dir():  # a store would make it
        raise DraftError(f"--state-dir: no directory {str(folder)!r}.")
    raw = read_config(draft_dir)
    store = HeadStore(folder, head_fingerprint(rows_fingerprint(target_dir), raw))
    head = store.newest()
    if head is None:
        why = f" ({store.refused[-1]})" if store.refused else ""
        raise DraftError(
            f"--state-dir: {str(folder)!r} keeps no usable head for this target and "
            f"draft{why}."
        )
    return ExportedDraft(
        Eagle3Config.from_json(raw, read_config(target_dir)),
        head.tensors,
        read_verifier(raw),
        head.version,
        "a trainer's kept heads",
        {**head.held_out, **head.served},
        trained=True,
    )


def _check_served(run_dir: Path, engine_id: str, version: int) -> None:
    """Refuse a publication that its engine has not installed.

    Raises:
        DraftError: The trainer's status names another version.
    """
    import json

    from vllm_tide.draft.config import DraftError

    try:
        path = run_dir / f"trainer-{engine_id}.json"
        served = json.loads(path.read_text(encoding="utf-8"))["installed_version"]
    except (OSError, ValueError, KeyError, TypeError):
        return  # no trainer wrote here: the segment is all there is
    if served != version:
        raise DraftError(
            f"export: version {version} was published last but version {served} is "
            "served; try again once it is installed, or export --state-dir."
        )


def _find(run_dir: Path, engine_id: str | None) -> EngineManifest:
    from vllm_tide.transport.header import TransportError
    from vllm_tide.transport.rendezvous import read_manifests

    found = [
        manifest
        for manifest in read_manifests(run_dir)
        if engine_id is None or manifest.engine_id == engine_id
    ]
    if not found:
        which = f"engine {engine_id!r}" if engine_id else "engine"
        raise TransportError(
            f"no live {which} in {run_dir}: give --run-dir, or export a directory with "
            "--from"
        )
    return found[-1]
