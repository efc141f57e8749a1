"""Sharded checkpoints of a training run; an incomplete one is not read.

torch.distributed.checkpoint writes one safetensors file per rank (Hugging Face writer,
no pickle) and reads them back with any number of ranks. `state.json` in the same folder
holds everything that is not a tensor, the size and SHA-256 of each file, and its own
SHA-256. A checkpoint is written under a temporary name and renamed when complete.

The directory must be on a file system that all ranks share.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vllm_tide.draft.config import DraftError
from vllm_tide.draft.module import Draft
from vllm_tide.train.step import TrainStep
from vllm_tide.transport.rendezvous import read_small, sync_directory
from vllm_tide.transport.shm import MALFORMED

FORMAT = 3
KEEP = 2
STATE_FILE = "state.json"
_MAX_STATE_BYTES = 1 << 28
_NAME = re.compile(r"checkpoint-(\d{8})")
_STAGED = ".writing-"
_MOMENTS = ("exp_avg", "exp_avg_sq")
PARSE_ERRORS = (*MALFORMED, OSError, RuntimeError)
"""Errors that reading and parsing untrusted JSON may raise."""


@dataclass(frozen=True)
class TrainState:
    """State of a run that is not a tensor.

    Attributes:
        published_version: Version published last at the time of writing. Training must
            not resume from an older version than the engine serves.
        extra: Further state of the caller (JSON).
    """

    steps: int
    cycles: int = 0
    published_version: int = 0
    extra: dict[str, Any] = field(default_factory=dict)


def draft_fingerprint(draft: Draft) -> str:
    """Return a digest of the config and vocabulary that a checkpoint must match.

    `lm_head` is stored whether it is trained or not, so that is not part of it.
    """
    digest = hashlib.sha256(json.dumps(draft.config.to_json(), sort_keys=True).encode())
    digest.update(draft.vocab.target_ids.numpy().tobytes())
    return digest.hexdigest()


def train_tensors(step: TrainStep) -> dict[str, Tensor]:
    """Return this rank's shards of master weights and AdamW moments by name."""
    out = {}
    for name, value in step.draft.named_tensors().items():
        out[f"draft.{name}"] = value.detach()
        for moment in _MOMENTS:
            if moment in (state := step.optimizer.state.get(value, {})):
                out[f"{moment}.{name}"] = state[moment]
    return out


def optimizer_steps(step: TrainStep) -> int:
    """Return the number of updates in AdamW's moments; 0 without moments."""
    counts = [int(s["step"]) for s in step.optimizer.state.values()]
    return counts[0] if counts else 0


def save(
    directory: str | Path, step: TrainStep, state: TrainState, *, keep: int = KEEP
) -> Path:
    """Write a checkpoint (leader); the other ranks call `write_tensors` meanwhile."""
    staged = begin(directory)
    write_tensors(staged, step)
    return commit(staged, step, state, keep=keep)


def begin(directory: str | Path) -> Path:
    """Create a folder for `write_tensors`; remove incomplete ones (leader)."""
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for incomplete in folder.glob(f"{_STAGED}*"):
        shutil.rmtree(incomplete, ignore_errors=True)
    staged = folder / f"{_STAGED}{os.getpid()}"
    staged.mkdir(mode=0o700)
    return staged


def write_tensors(staged: str | Path, step: TrainStep) -> None:
    """Write the shards of every rank; return when all ranks are done.

    Raises:
        OSError: A rank failed to write; raised on all ranks, which stay in step.
    """
    # Imported here: the import takes half a second and 46 MiB.
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    writer = HuggingFaceStorageWriter(str(staged), save_distributed=True)
    if step.device.type == "cuda":  # the writer copies on other streams
        torch.cuda.synchronize(step.device)
    with _single_process() as single:
        try:
            dcp.save(train_tensors(step), storage_writer=writer, no_dist=single)
        except CheckpointException as error:
            rank, (cause, _) = next(iter(error.failures.items()))
            raise OSError(f"{staged}: rank {rank} cannot write: {cause}") from error


def commit(
    staged: Path, step: TrainStep, state: TrainState, *, keep: int = KEEP
) -> Path:
    """Add `state.json`, flush, rename, remove old checkpoints (leader)."""
    number = max((n for n, _ in _named(staged.parent)), default=0) + 1
    document = {
        "format": FORMAT,
        "draft": draft_fingerprint(step.draft),
        "optimizer_steps": optimizer_steps(step),
        "files": {path.name: _measure(path) for path in sorted(staged.iterdir())},
        "state": asdict(state),
    }
    with open(staged / STATE_FILE, "w", encoding="utf-8") as file:
        json.dump({**document, "self_sha256": digest_of(document)}, file)
        file.flush()
        os.fsync(file.fileno())
    sync_directory(staged)
    final = staged.parent / f"checkpoint-{number:08d}"
    os.rename(staged, final)
    sync_directory(staged.parent)
    first, _ = _finished(staged.parent)[-keep:][0]
    for old_number, old in _named(staged.parent):  # also half-removed ones
        if old_number < first:
            shutil.rmtree(old, ignore_errors=True)
    return final


def latest(directory: str | Path) -> Path | None:
    complete = _finished(Path(directory))
    return complete[-1][1] if complete else None


def load(path: str | Path, step: TrainStep) -> TrainState:
    """Read a checkpoint into one rank; any number of ranks may have written it.

    Raises:
        DraftError: It is damaged or of another draft; nothing is changed.
    """
    state, count = verify(path, step.draft)
    read_tensors(path, step, count)
    return state


def verify(path: str | Path, draft: Draft) -> tuple[TrainState, int]:
    """Check all files; return the state and the AdamW update count (leader).

    Raises:
        DraftError: It is damaged or of another draft.
    """
    folder = Path(path)
    document = _read_document(folder)
    if document["draft"] != draft_fingerprint(draft):
        raise DraftError(
            f"{folder}: checkpoint of a draft with another shape or vocabulary; "
            "set tide.train.state_dir to an empty directory, or serve that draft."
        )
    return document["state"], int(document["optimizer_steps"])


def read_tensors(path: str | Path, step: TrainStep, count: int) -> None:
    """Read this rank's shards of a verified checkpoint.

    If a moment is missing (written by an earlier version), no moment is read and
    training resumes from the weights only.

    Raises:
        OSError: A rank failed to read; its weights are not usable.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    step.reset()
    if count:
        _make_moments(step, count)
    reader = HuggingFaceStorageReader(str(path))
    if (
        not train_tensors(step).keys()
        <= reader.read_metadata().state_dict_metadata.keys()
    ):
        step.reset()
    with _single_process() as single:
        try:
            dcp.load(train_tensors(step), storage_reader=reader, no_dist=single)
        except (AssertionError, CheckpointException) as error:  # torch's, with a cause
            raise OSError(f"{path}: cannot be read: {error}") from error


@contextlib.contextmanager
def _single_process() -> Iterator[bool]:
    """Yield whether there is no process group; silence torch's warning about it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield not dist.is_initialized()


def _make_moments(step: TrainStep, count: int) -> None:
    # Create the entries of AdamW's first step as destinations for the read.
    for parameter in step.parameters:
        step.optimizer.state[parameter] = {
            "step": torch.full((), float(count), device=parameter.device),
            **{moment: torch.zeros_like(parameter) for moment in _MOMENTS},
        }


def _read_document(folder: Path) -> dict[str, Any]:
    path = folder / STATE_FILE
    try:
        document = json.loads(read_small(path, _MAX_STATE_BYTES))
        if document["format"] != FORMAT:
            raise DraftError(
                f"{path}: has format {document['format']}, this version reads {FORMAT}."
            )
        if document.pop("self_sha256") != digest_of(document):
            raise DraftError(f"{path}: damaged (SHA-256).")
        files = dict(document["files"])
        present = {p.name for p in folder.iterdir()} - {STATE_FILE}
        if present != set(files):
            names = ", ".join(sorted(present ^ set(files)))
            raise DraftError(f"{folder}: missing or unexpected files ({names}).")
        for name, expected in files.items():
            if _measure(folder / name) != expected:
                raise DraftError(f"{folder / name}: damaged (size or SHA-256).")
        document["state"] = state = TrainState(**document["state"])
        counts = state.steps, state.cycles, state.published_version
        if not all(map(_is_count, (*counts, document["optimizer_steps"]))):
            raise ValueError("a count is not a non-negative integer")
        if not isinstance(state.extra, dict) or "draft" not in document:
            raise ValueError("extra or draft fingerprint is missing")
    except DraftError:
        raise
    except PARSE_ERRORS as error:
        raise DraftError(f"{path}: cannot be read ({error!r}).") from None
    return document


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def digest_of(document: Mapping[str, Any]) -> str:
    """Return the SHA-256 (hexadecimal) of a JSON document; key order is ignored."""
    text = json.dumps(document, sort_keys=True)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def _measure(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}


def _named(directory: Path) -> list[tuple[int, Path]]:
    if not directory.is_dir():
        return []
    matches = [(_NAME.fullmatch(path.name), path) for path in directory.iterdir()]
    return sorted((int(match[1]), path) for match, path in matches if match)


def _finished(directory: Path) -> list[tuple[int, Path]]:
    return [(n, path) for n, path in _named(directory) if (path / STATE_FILE).is_file()]
