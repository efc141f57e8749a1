"""The terminal in full-screen mode, and back as it was on every way out.

Plain ANSI and termios rather than curses: what is drawn is lines of text, and a screen
is one write. Ways out: the end of the block, an exception, SIGINT, SIGTERM, SIGHUP and
SIGTSTP (which comes back). Nothing helps against SIGKILL; `reset` does then.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import tty
from types import FrameType
from typing import Any

_ENTER = b"\033[?1049h\033[?25l\033[?7l"  # other screen, no cursor, no wrapping
_LEAVE = b"\033[?7h\033[?25h\033[?1049l"
_COLUMNS, _ROWS = 80, 24  # of a terminal that does not know its size
_ENDING = (signal.SIGTERM, signal.SIGHUP)


class Terminal:
    """Use as a context manager, in the main thread."""

    def __init__(self) -> None:
        self._in, self._out = sys.stdin.fileno(), sys.stdout.fileno()
        self._before: list[Any] | None = None
        self._handlers: dict[signal.Signals, Any] = {}
        # Never closed: a thread may still write to it, and the number be reused.
        self._wake_read, self._wake_write = os.pipe()

    def __enter__(self) -> Terminal:
        for number in _ENDING:
            self._handlers[number] = signal.signal(number, _end)
        self._handlers[signal.SIGWINCH] = signal.signal(signal.SIGWINCH, self._woken)
        self._handlers[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, self._suspend)
        os.set_blocking(self._wake_write, False)
        try:
            self._begin()
        except BaseException:  # a signal may come as early as this
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._finish()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def size(self) -> tuple[int, int]:
        """Columns and rows now.

        Raises:
            EOFError: The terminal is gone.
        """
        # Not shutil's: it believes COLUMNS, which does not follow a new size.
        try:
            found = os.get_terminal_size(self._out)
        except OSError as error:
            raise EOFError from error
        return found.columns or _COLUMNS, found.lines or _ROWS

    def draw(self, lines: list[str]) -> None:
        """Replace the screen.

        Args:
            lines: At most as many as there are rows.

        Raises:
            EOFError: The terminal is gone.
        """
        text = "\033[H" + "\r\n".join(f"{found}\033[K" for found in lines) + "\033[J"
        try:
            self._write(text.encode("ascii", "replace"))
        except OSError as error:
            raise EOFError from error

    def wake(self) -> None:
        """Make `wait` return; from any thread or signal handler."""
        with contextlib.suppress(OSError):
            os.write(self._wake_write, b"w")

    def wait(self, seconds: float) -> bytes:
        """Keys pressed, or nothing after `wake`, a new size or the time.

        Args:
            seconds: Longest wait.

        Raises:
            EOFError: The terminal is gone.
        """
        ready, _, _ = select.select([self._in, self._wake_read], [], [], seconds)
        if self._wake_read in ready:
            os.read(self._wake_read, 4096)
        if self._in not in ready:
            return b""
        try:
            keys = os.read(self._in, 256)
        except OSError as error:
            raise EOFError from error
        if not keys:
            raise EOFError
        return keys

    def _begin(self) -> None:
        self._before = termios.tcgetattr(self._in)
        tty.setcbreak(self._in)
        self._write(_ENTER)

    def _finish(self) -> None:
        before, self._before = self._before, None
        if before is None:
            return
        with contextlib.suppress(OSError):
            self._write(_LEAVE)
        with contextlib.suppress(OSError, termios.error):
            # Keys that were typed at us are not for the shell.
            termios.tcsetattr(self._in, termios.TCSAFLUSH, before)

    def _suspend(self, number: int, frame: FrameType | None) -> None:
        self._finish()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        # Here again after SIGCONT.
        signal.signal(signal.SIGTSTP, self._suspend)
        self._begin()
        self.wake()

    def _woken(self, number: int, frame: FrameType | None) -> None:
        self.wake()

    def _write(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._out, data) :]


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
