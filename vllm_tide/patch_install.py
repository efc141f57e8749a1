"""Changes the files of an installed vLLM as one step that a crash cannot split.

The order is: originals saved, new files written beside the old ones, a journal, one
rename per file, the state file, the journal removed. Whatever moment a crash picks, the
next call rolls back to the saved originals. A rename never writes through a hard link,
so a package cache that shares inodes with site-packages (uv) stays pristine.

Layout beside the package, in ``.vllm_tide_patches/``: ``state.json`` (present when a
series is installed), ``journal.json`` (present in a change), ``originals/<sha256>``.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from vllm_tide.patch_series import PatchError, sha256

STATE_DIR = ".vllm_tide_patches"
_TMP_SUFFIX = ".vllm_tide_tmp"


@dataclass(frozen=True, slots=True)
class Target:
    """An installed vLLM: the folder that holds ``vllm/``."""

    root: Path

    @property
    def state_dir(self) -> Path:
        """Folder of saved originals, state and journal."""
        return self.root / STATE_DIR

    def read(self, path: str) -> bytes:
        """Reads a file of the package; ``path`` starts with ``vllm/``."""
        try:
            return (self.root / path).read_bytes()
        except OSError as error:
            raise PatchError(f"Cannot read {self.root / path}: {error}.") from error


@contextmanager
def locked(target: Target) -> Iterator[None]:
    """Holds the one lock of a target; other processes wait."""
    try:
        fd = os.open(target.root, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise PatchError(f"Cannot open {target.root}: {error}.") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def recorded_files(target: Target) -> dict[str, dict[str, str]]:
    """Returns {path: {"before": SHA-256, "after": SHA-256}} of the installed series."""
    path = target.state_dir / "state.json"
    try:
        files: dict[str, dict[str, str]] = json.loads(path.read_text())["files"]
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PatchError(f"{path} is damaged ({error}): reinstall vLLM.") from error
    return files


def change(
    target: Target,
    *,
    pristine: Mapping[str, bytes],
    wanted: Mapping[str, bytes],
    state: Mapping[str, object] | None,
) -> None:
    """Moves files to ``wanted`` and records ``state`` (None: nothing installed)."""
    changed = {
        path: content
        for path, content in wanted.items()
        if target.read(path) != content
    }
    originals = target.state_dir / "originals"
    journal = target.state_dir / "journal.json"
    try:
        originals.mkdir(parents=True, exist_ok=True)
        for content in pristine.values():
            _write(originals / sha256(content), content)
        for path, content in changed.items():
            file = target.root / path
            _write(_temporary(file), content)
            shutil.copymode(file, _temporary(file))
        # A crash before the journal may have left some behind.
        for path in wanted.keys() - changed.keys():
            _temporary(target.root / path).unlink(missing_ok=True)
    except OSError as error:
        for path in changed:
            with suppress(OSError):
                _temporary(target.root / path).unlink(missing_ok=True)
        raise PatchError(
            f"Cannot write in {target.root} ({error}): run this as the user who "
            "installed vLLM."
        ) from error
    known = {
        path: [sha256(target.read(path)), sha256(pristine[path]), sha256(wanted[path])]
        for path in wanted
    }
    _write_json(journal, {"files": known})
    try:
        for path in changed:
            file = target.root / path
            os.replace(_temporary(file), file)
            _drop_bytecode(file)
        if state is None:
            (target.state_dir / "state.json").unlink(missing_ok=True)
        else:
            _write_json(target.state_dir / "state.json", state)
        journal.unlink()
    except OSError as error:
        recover(target)
        raise PatchError(
            f"Changing {target.root} failed ({error}); it was restored to pristine."
        ) from error
    if state is None:
        shutil.rmtree(target.state_dir)
    else:
        keep = {sha256(content) for content in pristine.values()}
        for saved in originals.iterdir():
            if saved.name not in keep:
                saved.unlink()


def recover(target: Target) -> None:
    """Rolls an interrupted change back to pristine; a no-op without a journal."""
    journal = target.state_dir / "journal.json"
    if not journal.exists():
        return
    try:
        files: dict[str, list[str]] = json.loads(journal.read_text())["files"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PatchError(f"{journal} is damaged ({error}): reinstall vLLM.") from error
    for path, known in files.items():
        file = target.root / path
        original = (target.state_dir / "originals" / known[1]).read_bytes()
        digest = sha256(target.read(path))
        if digest not in known:
            raise PatchError(
                f"{path} was edited during an interrupted change: reinstall vLLM."
            )
        temporary = _temporary(file)
        if digest != known[1]:
            _write(temporary, original)
            shutil.copymode(file, temporary)
            os.replace(temporary, file)
        temporary.unlink(missing_ok=True)
        _drop_bytecode(file)
    (target.state_dir / "state.json").unlink(missing_ok=True)
    journal.unlink()


def _drop_bytecode(file: Path) -> None:
    # A cache entry is trusted by second-resolution time and size (or, in some images,
    # unconditionally), so an old one could outlive the file it was made from.
    for cached in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
        with suppress(OSError):
            cached.unlink()


def _temporary(file: Path) -> Path:
    return file.with_name(f".{file.name}{_TMP_SUFFIX}")


def _write(path: Path, content: bytes) -> None:
    with open(path, "wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def _write_json(path: Path, value: object) -> None:
    temporary = path.with_suffix(".tmp")
    _write(temporary, (json.dumps(value, indent=2) + "\n").encode())
    os.replace(temporary, path)
