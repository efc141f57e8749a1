"""Store of kept drafts on disk; a restarted server loads the newest one.

A stored draft is one file, serialised as for an engine (`DraftWeights`), with its
SHA-256 in the name. Drafts that are damaged, foreign (another target or draft shape) or
writable by other users are not loaded; the reason is logged. Names are unique, so no
lock.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import re
import stat
import time
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm_tide.draft.config import DraftError, read_config
from vllm_tide.draft.fresh import MARK
from vllm_tide.draft.kind import canonical
from vllm_tide.draft.target import rows_fingerprint, weights_fingerprint
from vllm_tide.draft.tensor_bytes import from_bytes, to_bytes
from vllm_tide.metrics import finite
from vllm_tide.transport.draft_weights import DraftWeights, WeightsRefused
from vllm_tide.transport.rendezvous import (
    ABANDONED_S,
    is_temporary,
    take_lock,
    write_private,
)
from vllm_tide.transport.shm import MALFORMED

logger = logging.getLogger("vllm_tide.train")

Figure = float | int | str | None
# Fingerprint (first digits), number in the store, SHA-256.
_NAME = re.compile(r"head-([0-9a-f]{16})-([0-9]+)-([0-9a-f]{64})\.safetensors")
# Keys that may differ between two copies of one config without changing the draft.
_VOLATILE = frozenset(
    {"_name_or_path", "transformers_version", "torch_dtype", "dtype", "architectures"}
)


class DraftRefused(DraftError):
    """A stored draft is damaged, foreign or unsafe to load."""


class DraftUnreadable(DraftRefused):
    """A stored draft exists, but reading it fails now."""


@dataclass(frozen=True)
class StoredDraft:
    """A stored draft.

    Attributes:
        tensors: By checkpoint name.
        version: Version when it was served; numbers restart with every server.
    """

    tensors: dict[str, Tensor]
    version: int
    holdout: dict[str, Figure]
    served: dict[str, Figure]
    path: Path

    @property
    def master(self) -> dict[str, Tensor]:
        """Tensors by parameter."""
        return canonical(self.tensors)


def has_weights(master: Mapping[str, Tensor], live: Mapping[str, Tensor]) -> bool:
    """Return whether `master` has all tensors of `live`, by parameter."""
    return bool(live) and all(
        name in master and torch.equal(master[name].to(tensor.dtype), tensor)
        for name, tensor in live.items()
    )


def fingerprint_of(target_dir: str | Path, draft_dir: str | Path) -> str:
    """Return the fingerprint of drafts that are trained from the draft of a directory.

    Another initial draft has other stored drafts, also with the same configuration. The
    weights of a fresh draft do not count: they are random, and machines may differ.

    Raises:
        DraftError: A directory cannot be read.
    """
    config = read_config(draft_dir)
    weights = "" if MARK in config else weights_fingerprint(draft_dir)
    return store_fingerprint(rows_fingerprint(target_dir), config, weights)


def store_fingerprint(
    target: str, draft_config: Mapping[str, Any], weights: str = ""
) -> str:
    """Return the SHA-256 (hex) of target, draft config and initial weights."""
    stable = {k: v for k, v in draft_config.items() if k not in _VOLATILE}
    text = json.dumps([target, stable, weights], sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


class DraftStore:
    """Drafts with one fingerprint in a directory that may have other files too.

    Attributes:
        refused: Reasons why stored drafts were skipped, newest last; at most 32.

    Raises:
        DraftError: The directory cannot be used.
    """

    def __init__(self, directory: Path, fingerprint: str, keep: int = 3) -> None:
        self.directory, self.fingerprint = directory, fingerprint
        self.keep = max(1, keep)
        self.refused: list[str] = []
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
                raise PermissionError(13, "Permission denied")
        except OSError as error:
            raise DraftError(
                f"tide.train.state_dir: {directory} cannot be used "
                f"({error.strerror}); set it to a writable directory."
            ) from None

    def claim(self) -> bool:
        """Lock the drafts of this fingerprint; return False if another process has.

        Without locks in the file system, it returns True: only a warning is missed.
        """
        try:
            fd = take_lock(self.directory, self.fingerprint[:16])
        except OSError:
            return True
        if fd is not None:
            weakref.finalize(self, os.close, fd)
        return fd is not None

    def put(
        self,
        tensors: Mapping[str, Tensor],
        version: int,
        *,
        holdout: Mapping[str, Figure] | None = None,
        served: Mapping[str, Figure] | None = None,
    ) -> Path:
        """Store a draft; it is complete on disk when this returns.

        Raises:
            DraftRefused: A tensor is not finite.
            OSError: It cannot be written; earlier drafts are unchanged.
        """
        for name, tensor in tensors.items():
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                raise DraftRefused(f"draft store: {name} is not finite.")
        weights = DraftWeights.encode(
            to_bytes({name: t.detach().cpu() for name, t in tensors.items()}),
            0,
            {
                "fingerprint": self.fingerprint,
                "version": version,
                "created_unix": time.time(),
                "held_out": finite(dict(holdout or {})),
                "served": finite(dict(served or {})),
            },
        )
        number = 1 + max(map(_number, self._paths()), default=0)
        name = f"head-{self.fingerprint[:16]}-{number:08d}-{weights.sha256.hex()}"
        path = self.directory / f"{name}.safetensors"
        write_private(path, weights.data, durable=True)
        self._prune()
        return path

    def newest(self) -> StoredDraft | None:
        return next(self.drafts(), None)

    def drafts(self, *, strict: bool = False) -> Iterator[StoredDraft]:
        """Yield stored drafts, newest first; drafts refused for loading are skipped.

        Raises:
            DraftUnreadable: `strict`, and a draft exists that cannot be read now.
        """
        for path in reversed(self._paths()):
            try:
                yield self._read(path)
            except DraftRefused as error:
                if strict and isinstance(error, DraftUnreadable):
                    raise
                logger.warning("%s", error)
                self.refused = [*self.refused, str(error)][-32:]

    def drop(self, draft: StoredDraft) -> None:
        _remove(draft.path)

    def drop_newer(self, draft: StoredDraft | None) -> None:
        """Remove drafts stored after `draft`, readable or not; None: all."""
        oldest = 0 if draft is None else _number(draft.path)
        for path in self._paths():
            if _number(path) > oldest:
                _remove(path)

    def _paths(self) -> list[Path]:
        """Return the files of stored drafts, oldest first."""
        matches = ((p, _NAME.fullmatch(p.name)) for p in self.directory.iterdir())
        ours = (p for p, m in matches if m and m[1] == self.fingerprint[:16])
        return sorted(ours, key=lambda path: (_number(path), path.name))

    def _prune(self) -> None:
        for path in self._paths()[: -self.keep]:
            _remove(path)
        long_ago = time.time() - ABANDONED_S
        for path in self.directory.iterdir():
            with contextlib.suppress(OSError):
                if is_temporary(path.name) and path.lstat().st_mtime < long_ago:
                    path.unlink()

    def _read(self, path: Path) -> StoredDraft:
        """Read a stored draft.

        Raises:
            DraftRefused: It is damaged, foreign, absent or writable by others.
        """
        name = _NAME.fullmatch(path.name)
        assert name is not None  # noqa: S101 - listed by `_paths`
        weights = DraftWeights(0, bytes.fromhex(name[3]), _read(path))
        try:
            meta = weights.verify().meta
            if meta["fingerprint"] != self.fingerprint:
                raise DraftRefused(f"{path}: stored for another target or draft.")
            return StoredDraft(
                tensors=from_bytes(weights.tensors),
                version=int(meta["version"]),
                holdout=dict(meta["held_out"]),
                served=dict(meta["served"]),
                path=path,
            )
        except DraftRefused:
            raise
        except WeightsRefused as refusal:
            raise DraftRefused(
                f"{path}: damaged, or of another vllm_tide ({refusal.reason})."
            ) from None
        except MALFORMED as error:
            raise DraftRefused(
                f"{path}: cannot be parsed ({type(error).__name__})."
            ) from None


def _read(path: Path) -> bytearray:
    """Read a file once that only this user (or root) can write.

    Raises:
        DraftRefused: It is absent, not a regular file, or unsafe.
    """
    try:
        # O_NONBLOCK: opening a pipe would block.
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as file:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise DraftRefused(f"{path}: not a regular file.")
            others = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
            if others or status.st_uid not in (0, os.geteuid()):
                raise DraftRefused(
                    f"{path}: writable by another user; change its owner to yourself "
                    "(chown) and its mode to 600 (chmod)."
                )
            data = bytearray(status.st_size)
            del data[file.readinto(data) :]
            return data
    except OSError as error:
        kind = DraftRefused if error.errno == errno.ENOENT else DraftUnreadable
        raise kind(f"{path}: cannot be read ({error.strerror}).") from None


def _number(path: Path) -> int:
    """Return the number of a stored draft; greater ones were stored later."""
    return int(path.name.split("-")[2])


def _remove(path: Path) -> None:
    try:
        path.unlink()
    except OSError:
        with contextlib.suppress(OSError):
            os.truncate(path, 0)  # it is not loaded again
