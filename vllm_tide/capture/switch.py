"""Switches of capture and training: files that outlive every process.

A switch has a file in the run directory and one in the state directory, and either
forbids: the run directory is often a tmpfs, which a reboot or a moved pod empties. What
is not certain (a directory that cannot be read, or that vanished) forbids as well.
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

from vllm_tide.transport.rendezvous import lasting_folder, make_private, write_private
from vllm_tide.transport.ring import Collect

if TYPE_CHECKING:
    from vllm_tide.capture.recorder import Recorder

logger = logging.getLogger("vllm.tide")  # vLLM's own shows it

PAUSED, OFF = "paused.json", "capture_off.json"
LOOK_S = 0.5


def switch_folders(run_dir: Path, *state_dirs: str | None) -> list[Path]:
    """Return the folders of a run directory's switch files, the run directory first.

    Args:
        state_dirs: `tide.train.state_dir` of its engines; None: the user's.
    """
    lasting = (lasting_folder(run_dir, each) for each in state_dirs or (None,))
    return list(dict.fromkeys((run_dir, *lasting)))


def switches_on(folders: Sequence[Path]) -> list[str]:
    """Return the names of the switches that are on.

    Raises:
        OSError: A folder cannot be read. One that is not there holds no switch, and
            neither does a state directory that is not the user's to enter.
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


class Switch:
    """A pause of training, or of capture alone: on while one of its files is there.

    Args:
        run_dir: Run directory; it holds for every process started there.
        state_dirs: As for :func:`switch_folders`.
    """

    def __init__(self, run_dir: Path, name: str, *state_dirs: str | None) -> None:
        self._name, self._folders = name, switch_folders(run_dir, *state_dirs)
        try:
            self.on = name in switches_on(self._folders)
        except OSError:
            self.on = True

    def set(self, on: bool) -> str:
        """Make or remove the files; why that failed somewhere, empty if nowhere."""
        self.on = on
        failed = []
        for folder in reversed(self._folders):
            path = folder / self._name
            try:
                if on:
                    make_private(folder)
                    since = json.dumps({"since_unix_s": time.time()})
                    write_private(path, since, durable=True)
                else:
                    with suppress(FileNotFoundError, NotADirectoryError):
                        path.unlink()
            except OSError as error:
                failed.append(f"{path} cannot be changed: {error.strerror}")
        return "; ".join(failed)


class Switches:
    """The switches of a run directory as its engine obeys them.

    Attributes:
        on: Names of those that are on, as of the last :meth:`read`.
    """

    def __init__(self, run_dir: Path, state_dir: str | None = None) -> None:
        self._run_dir, self._folders = run_dir, switch_folders(run_dir, state_dir)
        # While it is open no other directory gets its number.
        self._directory = -1
        self.on = [OFF]
        with suppress(OSError):
            self.on = switches_on(self._folders)
        self._open()

    def read(self) -> list[str]:
        """Read the files; those of a directory that vanished are written again."""
        with suppress(OSError):
            on = switches_on(self._folders)
            if not self._same():
                on = [name for name in (OFF, PAUSED) if name in (*on, *self.on)]
                self.on = on
                for name in on:
                    write_private(self._run_dir / name, "{}")
                self._open()
            self.on = on
        for name in self.on:  # or a cleaner of old files (systemd-tmpfiles) takes them
            with suppress(OSError):
                os.utime(self._run_dir / name)
        return self.on

    def close(self) -> None:
        """Let the directory go. Idempotent."""
        if self._directory >= 0:
            os.close(self._directory)
        self._directory = -1

    def _same(self) -> bool:
        """True if the run directory is the one that was there at the last look."""
        try:
            there = os.stat(self._run_dir)
        except FileNotFoundError:
            return False
        return self._directory >= 0 and os.path.samestat(
            os.fstat(self._directory), there
        )

    def _open(self) -> None:
        self.close()
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        with suppress(OSError):
            self._directory = os.open(self._run_dir, flags)


def heed_switches(
    recorder: Recorder, run_dir: Path, state_dir: str | None = None
) -> threading.Event:
    """Keep `Recorder.off` as the files say, from a thread of its own; set to end it."""
    closing, said, switches = threading.Event(), True, Switches(run_dir, state_dir)

    def look() -> None:
        nonlocal said
        recorder.off = bool(switches.read())
        if (on := recorder.wish is not Collect.NOTHING) != said:
            said = on
            why = ", ".join(switches.on) or "a trainer is paused"
            logger.info(
                "vllm_tide: capture is %s, run directory %s",
                "on" if on else f"off ({why})",
                run_dir,
            )

    def watch() -> None:
        while not closing.wait(LOOK_S):
            look()
        switches.close()

    look()  # before anything is served
    threading.Thread(target=watch, name="tide-switch", daemon=True).start()
    return closing
