"""`vllm-tide export`: write a trained draft as a checkpoint for unpatched vLLM."""

from __future__ import annotations

import argparse
import json
import logging
import re
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from vllm_tide.cli import add_output, add_run_dir, emit, fail
from vllm_tide.config import ConfigError
from vllm_tide.deploy.store import DraftStore, fingerprint_of
from vllm_tide.draft.config import DraftError, read_config
from vllm_tide.draft.export import ExportedDraft, from_directory, write_export
from vllm_tide.draft.kind import draft_config
from vllm_tide.draft.speculators import Verifier, read_verifier
from vllm_tide.draft.tensor_bytes import from_bytes
from vllm_tide.transport.rendezvous import (
    EngineManifest,
    NotRunningError,
    default_run_dir,
    newest_engine,
)
from vllm_tide.transport.shm import TransportError
from vllm_tide.transport.versions import is_fast, number_of
from vllm_tide.transport.weights import WeightsSegment

_SNAPSHOT = re.compile(r".*/models--([^/]+)/snapshots/[^/]+/?")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Writes weights, configuration and a model card with measured figures. Without "
        "--engine, --from and --state-dir it exports the live draft of the newest "
        "running engine. Stored drafts have no configuration: with --state-dir it is "
        "read from the running engine's draft, or from --from and --target."
    )
    add = parser.add_argument
    add("directory", type=Path, metavar="DIR", help="absent or empty")
    text = "default: speculators (`vllm serve DIR`) for a target on a hub, else hf"
    add("--format", choices=("hf", "speculators"), help=text)
    source = parser.add_mutually_exclusive_group().add_argument
    source("--engine", metavar="ID", help="a running engine (default: the newest)")
    text = "draft directory of either form"
    source("--from", dest="source", type=Path, metavar="DIR", help=text)
    text = "directory of a trainer's stored drafts; exports the newest valid one"
    add("--state-dir", type=Path, metavar="DIR", help=text)
    add_run_dir(parser)
    add("--target", metavar="NAME", help="hub name (is exported) or directory")
    text = "draft length to write to the export"
    add("--num-speculative-tokens", type=int, metavar="N", help=text)
    add_output(parser)


def run(args: argparse.Namespace) -> int:
    logging.basicConfig(format="%(message)s")
    try:
        draft = _with_target(_read(args), args.target, args.num_speculative_tokens)
        target = draft.verifier.hub_name if draft.verifier else ""
        if args.format is None:
            args.format = "speculators" if target else "hf"
        folder = write_export(args.directory, draft, args.format)
    except (ConfigError, DraftError, TransportError) as error:
        return fail(error)
    text = f"written: {folder} ({args.format}, from {draft.source}); its README.md "
    text += "has the command that serves it"
    if not target and args.format == "speculators":
        text += (
            "\n`vllm serve DIR` finds its target by a hub name: export with --target "
            "HUB_NAME. With a local target, use --format hf and --speculative-config."
        )
    value = {"directory": str(folder), "source": draft.source}
    return emit(args, text, value | {"version": draft.version, "target": target})


def _read(args: argparse.Namespace) -> ExportedDraft:
    local = args.target is not None and Path(args.target).is_dir()
    if args.source is not None and args.state_dir is None:
        return from_directory(args.source, read_config(args.target) if local else None)
    if args.source is not None:
        if not local:
            hint = "give the target's directory, to check stored drafts against it,"
            raise ConfigError(f"--target: {hint} with --state-dir and --from.")
        return from_state_dir(args.state_dir, args.source, args.target)
    run_dir = args.run_dir or default_run_dir()
    hint = "give --run-dir; for a stored draft --state-dir, --from and --target"
    if args.state_dir is not None:
        hint = "give --from and --target, as stored drafts have no configuration"
    manifest = newest_engine(run_dir, args.engine, hint)
    assert manifest is not None  # noqa: S101 - raises if a hint is given
    if args.state_dir is None:
        return from_engine(manifest, run_dir)
    target = manifest.target_path
    draft = from_state_dir(args.state_dir, Path(manifest.draft_path), target)
    verifier = target_facts(target, manifest.num_speculative_tokens)
    return replace(draft, verifier=verifier)


def _with_target(
    draft: ExportedDraft, target: str | None, num_speculative_tokens: int | None
) -> ExportedDraft:
    """Override the draft's facts about the target by the command's options."""
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
    """Return the facts on a target, with its hub name for a hub snapshot."""
    architectures: tuple[str, ...] = ()
    if (Path(target) / "config.json").is_file():
        architectures = tuple(read_config(target).get("architectures") or ())
    snapshot = _SNAPSHOT.fullmatch(target)
    name = snapshot.group(1).replace("--", "/", 1) if snapshot else target
    return Verifier(name, architectures, num_speculative_tokens)


def from_engine(manifest: EngineManifest, run_dir: Path) -> ExportedDraft:
    """Read the draft that a running engine serves."""
    target = read_config(manifest.target_path)
    verifier = target_facts(manifest.target_path, manifest.num_speculative_tokens)
    engine = f"engine {manifest.engine_id}"
    weights = None
    if manifest.weights:
        with closing(WeightsSegment.attach(manifest.weights)) as segment:
            weights = segment.read() if segment.latest_version() else None
    if weights is None:
        draft = from_directory(manifest.draft_path, target)
        source = f"{engine}, its initial draft"
        return replace(draft, verifier=verifier, source=source, version=0)
    version = number_of(weights.version)
    if is_fast(weights.version):
        raise DraftError(
            f"export: over version {version} a fast draft is served "
            "(tide.test_time.adapt), trained on running requests; retry after "
            "`vllm-tide pause`, or export --state-dir."
        )
    _check_served(run_dir, manifest.engine_id, version)
    config = draft_config(read_config(manifest.draft_path), target)
    tensors, meta = from_bytes(weights.tensors), weights.meta
    initial = not version or bool(meta.get("initial"))
    return ExportedDraft(config, tensors, verifier, version, engine, meta, not initial)


def from_state_dir(folder: Path, draft_dir: Path, target_dir: str) -> ExportedDraft:
    """Read a trainer's newest valid stored draft, with the config of `draft_dir`."""
    if not folder.is_dir():  # a store would create it
        raise DraftError(f"--state-dir: no directory {str(folder)!r}.")
    raw = read_config(draft_dir)
    store = DraftStore(folder, fingerprint_of(target_dir, draft_dir))
    draft = store.newest()
    if draft is None:
        why = f" ({store.refused[-1]})" if store.refused else ""
        problem = f"{str(folder)!r} has no usable draft for this target and draft{why}."
        raise DraftError(f"--state-dir: {problem}")
    config = draft_config(raw, read_config(target_dir))
    verifier, figures = read_verifier(raw), {**draft.holdout, **draft.served}
    source = "a trainer's stored drafts"
    return ExportedDraft(
        config, draft.tensors, verifier, draft.version, source, figures, True
    )


def _check_served(run_dir: Path, engine_id: str, version: int) -> None:
    """Raise DraftError for a publication that its engine has not installed."""
    try:
        path = run_dir / f"trainer-{engine_id}.json"
        served = json.loads(path.read_text(encoding="utf-8"))["installed_version"]
    except (OSError, ValueError, KeyError, TypeError):
        return  # no trainer status to compare with
    if served != version:
        raise NotRunningError(
            f"export: version {version} is published, but version {served} is served; "
            "an idle server installs it with its next request: retry then, or give "
            "--state-dir (by default a folder of the run directory)."
        )
