"""Store of kept drafts on disk; a restarted server loads the newest one.

A stored draft is two files, `<name>.safetensors` and `<name>.json`. The JSON has the
SHA-256 of the tensors and of itself and is renamed into place last: without it there is
no draft. Drafts that are damaged, foreign (another target or draft shape) or writable
by other users are not loaded; the reason is logged. Names are unique, so no lock.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import secrets
import stat
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from vllm_tide.draft.config import DraftError
from vllm_tide.draft.kind import canonical
from vllm_tide.metrics import finite
from vllm_tide.train.checkpoint import PARSE_ERRORS, digest_of
from vllm_tide.transport.rendezvous import (
    ABANDONED_S,
    is_temporary,
    write_private,
)

logger = logging.getLogger("vllm_tide.train")

FORMAT = 1
Figure = float | int | str | None
_TENSORS, _MANIFEST = ".safetensors", ".json"
_MAX_MANIFEST_BYTES = 1 << 20
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
    fingerprint: str
    created_unix: float
    holdout: dict[str, Figure]
    served: dict[str, Figure]
    path: Path

    @property
    def master(self) -> dict[str, Tensor]:
        """Tensors by parameter."""
        return canonical(self.tensors)

    def has_weights(self, live: Mapping[str, Tensor]) -> bool:
        """Return whether the weights equal `live`, by parameter."""
        mine = self.master
        return mine.keys() == live.keys() and all(
            torch.equal(tensor.to(live[name].dtype), live[name])
            for name, tensor in mine.items()
        )


def store_fingerprint(target: str, draft_config: Mapping[str, Any]) -> str:
    """Return the SHA-256 of target (`rows_fingerprint`) and draft config (hex)."""
    stable = {k: v for k, v in draft_config.items() if k not in _VOLATILE}
    text = json.dumps([target, stable], sort_keys=True, default=str)
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
        plain = {n: t.detach().to("cpu").contiguous() for n, t in tensors.items()}
        data = save(plain, metadata={"format": "pt"})
        names = self._names()
        number = 1 + (max(_number(name) for name in names) if names else 0)
        name = f"{self._prefix}{number:08d}-{secrets.token_hex(4)}"
        manifest = {
            "format": FORMAT,
            "fingerprint": self.fingerprint,
            "version": version,
            "created_unix": time.time(),
            "size": len(data),
            "sha256": hashlib.sha256(data).hexdigest(),
            "held_out": finite(dict(holdout or {})),
            "served": finite(dict(served or {})),
        }
        text = json.dumps({**manifest, "self_sha256": digest_of(manifest)}, indent=1)
        path = self.directory / (name + _TENSORS)
        write_private(path, data, durable=True)
        write_private(self.directory / (name + _MANIFEST), text, durable=True)
        self._prune()
        return path

    def newest(self) -> StoredDraft | None:
        return next(self.drafts(), None)

    def drafts(self, *, strict: bool = False) -> Iterator[StoredDraft]:
        """Yield stored drafts, newest first; drafts refused for loading are skipped.

        Raises:
            DraftUnreadable: `strict`, and a draft exists that cannot be read now.
        """
        for name in reversed(self._names()):
            try:
                yield read_draft(self.directory / (name + _TENSORS), self.fingerprint)
            except DraftRefused as error:
                if strict and isinstance(error, DraftUnreadable):
                    raise
                logger.warning("%s", error)
                self.refused = [*self.refused, str(error)][-32:]

    def drop(self, draft: StoredDraft) -> None:
        self._remove(draft.path.name.removesuffix(_TENSORS))

    def drop_newer(self, draft: StoredDraft | None) -> None:
        """Remove drafts stored after `draft`, readable or not; None: all."""
        oldest = "" if draft is None else draft.path.name.removesuffix(_TENSORS)
        names = self._names()
        for name in names[names.index(oldest) + 1 :] if oldest in names else names:
            self._remove(name)

    @property
    def _prefix(self) -> str:
        return f"head-{self.fingerprint[:16]}-"

    def _names(self) -> list[str]:
        paths = self.directory.glob(f"{self._prefix}*{_MANIFEST}")
        names = [path.name.removesuffix(_MANIFEST) for path in paths]
        return sorted(names, key=lambda name: (_number(name), name))

    def _prune(self) -> None:
        for name in self._names()[: -self.keep]:
            self._remove(name)
        long_ago = time.time() - ABANDONED_S
        for path in self.directory.iterdir():
            orphaned = is_temporary(path.name) or (
                path.name.startswith(self._prefix)
                and path.name.endswith(_TENSORS)
                and not path.with_suffix(_MANIFEST).exists()
            )
            with contextlib.suppress(OSError):
                if orphaned and path.lstat().st_mtime < long_ago:
                    path.unlink()

    def _remove(self, name: str) -> None:
        # The manifest first: without it the tensors are no stored draft.
        for suffix in (_MANIFEST, _TENSORS):
            with contextlib.suppress(OSError):
                (self.directory / (name + suffix)).unlink()


def read_draft(path: Path, fingerprint: str | None = None) -> StoredDraft:
    """Read one stored draft; without a fingerprint, for any target.

    Raises:
        DraftRefused: It is damaged, foreign, absent or writable by others.
    """
    where = path.with_suffix(_TENSORS)
    raw = _read(path.with_suffix(_MANIFEST), _MAX_MANIFEST_BYTES)
    try:
        manifest = json.loads(raw)
        if manifest["format"] != FORMAT:
            raise DraftRefused(
                f"{where}: stored in format {manifest['format']!r}, not {FORMAT}."
            )
        claimed = manifest.pop("self_sha256")
        if claimed != digest_of(manifest):
            raise DraftRefused(f"{where}: the manifest is damaged.")
        if fingerprint is not None and manifest["fingerprint"] != fingerprint:
            raise DraftRefused(f"{where}: stored for another target or draft.")
        data = _read(where, int(manifest["size"]))
        if hashlib.sha256(data).hexdigest() != manifest["sha256"]:
            raise DraftRefused(f"{where}: the tensors are damaged.")
        return StoredDraft(
            tensors=load(data),
            version=int(manifest["version"]),
            fingerprint=str(manifest["fingerprint"]),
            created_unix=float(manifest["created_unix"]),
            holdout=dict(manifest["held_out"]),
            served=dict(manifest["served"]),
            path=where,
        )
    except DraftRefused:
        raise
    except (*PARSE_ERRORS, SafetensorError) as error:
        raise DraftRefused(
            f"{where}: cannot be parsed ({type(error).__name__})."
        ) from None


def _read(path: Path, max_bytes: int) -> bytes:
    """Read a file once that only this user (or root) can write.

    Raises:
        DraftRefused: It is absent, not a regular file, unsafe, or over `max_bytes`.
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
            if status.st_size > max_bytes:
                raise DraftRefused(f"{path}: damaged (larger than expected).")
            return file.read(status.st_size)
    except OSError as error:
        kind = DraftRefused if error.errno == errno.ENOENT else DraftUnreadable
        raise kind(f"{path}: cannot be read ({error.strerror}).") from None


def _number(name: str) -> int:
    try:
        return int(name.split("-")[2])
    except (IndexError, ValueError):
        return 0
