"""Persistent switches that pause capture and training.

A switch has a file in the run directory and one in the state directory, and is on if
either exists: the run directory is often a tmpfs, which a reboot or a moved pod clears.
A directory that is unreadable or was removed counts as on too.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_tide.transport.rendezvous import (
    durable_folder,
    make_private,
    read_small,
    write_private,
)
from vllm_tide.transport.ring import Collect

if TYPE_CHECKING:
    from vllm_tide.capture.recorder import Recorder

logger = logging.getLogger("vllm.tide")

PAUSED, OFF = "paused.json", "capture_off.json"
_COMMANDS = {PAUSED: "vllm-tide pause", OFF: "vllm-tide capture off"}
POLL_S = 0.5


def switch_folders(run_dir: Path, *state_dirs: str | None) -> list[Path]:
    """Return the folders of a run directory's switch files, the run directory first.

    Args:
        state_dirs: `tide.train.state_dir` of its engines; None: the user's directory.
    """
    lasting = (durable_folder(run_dir, each) for each in state_dirs or (None,))
    return list(dict.fromkeys((run_dir, *lasting)))


def switches_on(folders: Sequence[Path]) -> list[str]:
    """Return the names of the switches that are on.

    Raises:
        OSError: A folder cannot be read. Missing folders, and state directories without
            permission, contain no switch.
    """
    names: set[str] = set()
    for folder in folders:
        with suppress(FileNotFoundError, NotADirectoryError):
            try:
                names.update(os.listdir(folder))
            except PermissionError:
                if folder == folders[0]:
                    raise
    return [name for name in (OFF, PAUSED) if name in names]


def _set_with(path: Path) -> list[Path]:
    """Return the folders in which a switch was set together with its file `path`.

    Without its engine a command does not know `tide.train.state_dir`.
    """
    try:
        folders = json.loads(read_small(path))["folders"]
        absolute = [path for path in folders if os.path.isabs(path)]
        return [Path(path) for path in absolute if "\0" not in path]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []  # no file, damaged, or of another version


def _contents(folders: Sequence[Path]) -> str:
    absolute = list(map(os.path.abspath, folders))  # read in other directories
    return json.dumps({"since_unix_s": time.time(), "folders": absolute})


class Switch:
    """Pause of training, or of capture only: on while one of its files exists.

    Args:
        run_dir: Run directory; the switch applies to all processes that use it.
        state_dirs: As for :func:`switch_folders`.
    """

    def __init__(self, run_dir: Path, name: str, *state_dirs: str | None) -> None:
        folders = (*switch_folders(run_dir, *state_dirs), *_set_with(run_dir / name))
        self._name, self._folders = name, list(dict.fromkeys(folders))
        self._failed = False
        try:
            self.on = name in switches_on(self._folders)
        except OSError:
            self.on = True

    def follow(self, switches: Switches) -> bool:
        """Read the files again; return whether the switch was changed.

        After a failed `set` the files are wrong, so they are not followed.
        """
        was = self.on
        if not self._failed:
            self.on = self._name in switches.read()
        return self.on != was

    def set(self, on: bool) -> str:
        """Create or remove the files; return the errors, empty if there are none."""
        self.on = on
        failed = []
        for folder in reversed(self._folders):
            path = folder / self._name
            try:
                if on:
                    make_private(folder)
                    write_private(path, _contents(self._folders), durable=True)
                else:
                    with suppress(FileNotFoundError, NotADirectoryError):
                        path.unlink()
            except OSError as error:
                failed.append(f"{path} cannot be changed: {error.strerror}")
        self._failed = bool(failed)
        return "; ".join(failed)


class Switches:
    """The switches of a run directory, as read by its engine and its trainer.

    Attributes:
        on: Names of the switches that are on, as of the last :meth:`read`.
    """

    def __init__(self, run_dir: Path, state_dir: str | None = None) -> None:
        self._run_dir, self._folders = run_dir, switch_folders(run_dir, state_dir)
        # While it is open its inode number is not reused.
        self._directory = -1
        self.on = [OFF]
        with suppress(OSError):
            self.on = switches_on(self._folders)
        self._open()

    def read(self) -> list[str]:
        """Read the files; restore those of a run directory that was removed."""
        with suppress(OSError):
            on = switches_on(self._folders)
            if not self._same():
                on = [name for name in (OFF, PAUSED) if name in (*on, *self.on)]
                self.on = on
                for name in on:
                    write_private(self._run_dir / name, _contents(self._folders))
                self._open()
            self.on = on
        for name in self.on:  # else systemd-tmpfiles removes them as old files
            with suppress(OSError):
                os.utime(self._run_dir / name)
        return self.on

    def close(self) -> None:
        """Close the directory. Idempotent."""
        if self._directory >= 0:
            os.close(self._directory)
        self._directory = -1

    def _same(self) -> bool:
        """Return whether the run directory is the one of the last :meth:`read`."""
        try:
            stat = os.stat(self._run_dir)
        except FileNotFoundError:
            return False
        return self._directory >= 0 and os.path.samestat(
            os.fstat(self._directory), stat
        )

    def _open(self) -> None:
        self.close()
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        with suppress(OSError):
            self._directory = os.open(self._run_dir, flags)


def watch_capture_switch(
    recorder: Recorder, run_dir: Path, state_dir: str | None = None
) -> threading.Event:
    """Start a thread that sets `Recorder.off` from the files; return its stop event."""
    closing, logged, switches = threading.Event(), True, Switches(run_dir, state_dir)

    def update() -> None:
        nonlocal logged
        recorder.off = bool(switches.read())
        if (on := recorder.collect_mode is not Collect.NOTHING) != logged:
            logged = on
            names = [_COMMANDS[name] for name in switches.on]
            reason = ", ".join(names) or "a trainer is paused"
            logger.info(
                "vllm_tide: capture is %s, run directory %s",
                "on" if on else f"off ({reason})",
                run_dir,
            )

    def watch() -> None:
        while not closing.wait(POLL_S):
            update()
        switches.close()

    update()  # before the server accepts requests
    threading.Thread(target=watch, name="tide-switch", daemon=True).start()
    return closing
