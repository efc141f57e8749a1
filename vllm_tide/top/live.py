"""The loop: a thread looks, the main thread draws and listens to keys."""

from __future__ import annotations

import re
import threading

from vllm_tide.top.layout import body, screen, title
from vllm_tide.top.picture import Picture, make_picture
from vllm_tide.top.samples import Sampler
from vllm_tide.top.terminal import Terminal
from vllm_tide.top.text import clipped, rendered

_PAGE = 10
_PRESS = re.compile(rb"\033[\[O][0-9;]*[A-Za-z~]|.", re.DOTALL)
_MOVES = {
    b"\033[A": -1,
    b"\033OA": -1,
    b"k": -1,
    b"\033[B": 1,
    b"\033OB": 1,
    b"j": 1,
    b"\033[5~": -_PAGE,
    b"\033[6~": _PAGE,
    b" ": _PAGE,
    b"g": -1_000_000,
    b"G": 1_000_000,
}


class Watcher(threading.Thread):
    """Takes a picture every interval. A server that hangs holds up nobody else.

    Args:
        sampler: Looks.
        interval: Seconds between two looks.
        terminal: Woken when there is a new picture.
    """

    def __init__(self, sampler: Sampler, interval: float, terminal: Terminal) -> None:
        super().__init__(name="vllm-tide-top", daemon=True)
        self.picture: Picture | None = None
        self.error: Exception | None = None
        self._sampler, self._interval, self._terminal = sampler, interval, terminal
        self._ended = threading.Event()

    def run(self) -> None:
        """See `threading.Thread`."""
        try:
            self._look()
        except Exception as error:  # noqa: BLE001 - raised again in the main thread
            self.error = error
            self._terminal.wake()

    def stop(self) -> None:
        """Look no more."""
        self._ended.set()

    def _look(self) -> None:
        while not self._ended.is_set():
            self._sampler.take()
            self.picture = make_picture(
                self._sampler.history, str(self._sampler.run_dir)
            )
            self._terminal.wake()
            # The second sample at once: it is the first with rates.
            first = len(self._sampler.history) < 2
            self._ended.wait(min(self._interval, 1.0) if first else self._interval)


def watch(sampler: Sampler, interval: float, *, colour: bool) -> None:
    """Show until `q`, Ctrl-C or the end of the terminal.

    Args:
        sampler: Looks.
        interval: Seconds between two looks.
        colour: Whether to use it.
    """
    with Terminal() as terminal:
        watcher = Watcher(sampler, interval, terminal)
        watcher.start()
        offset = 0
        try:
            while True:
                columns, rows = terminal.size()
                picture = watcher.picture
                if watcher.error is not None:
                    raise watcher.error
                if picture is None:
                    terminal.draw(["vllm-tide top  looking ..."[:columns]])
                else:
                    offset = _bounded(offset, picture, columns, rows)
                    lines = screen(picture, columns, rows, offset)
                    terminal.draw([rendered(line, colour=colour) for line in lines])
                keys = presses(terminal.wait(interval))
                if b"q" in keys or b"Q" in keys:
                    return
                offset += sum(_MOVES.get(key, 0) for key in keys)
        except (EOFError, KeyboardInterrupt):
            return
        finally:
            watcher.stop()


def presses(data: bytes) -> list[bytes]:
    """What was typed, key by key: an arrow is several bytes."""
    return _PRESS.findall(data)


def plain(picture: Picture, columns: int, *, colour: bool = False) -> str:
    """The whole picture as text, however long.

    Args:
        picture: Figures.
        columns: Width to keep to.
        colour: Whether to use it.
    """
    lines = [clipped(title(picture), columns), *body(picture, columns)]
    return "\n".join(rendered(line, colour=colour).rstrip() for line in lines)


def _bounded(offset: int, picture: Picture, columns: int, rows: int) -> int:
    most = max(len(body(picture, columns)) - max(rows - 2, 0), 0)
    return min(max(offset, 0), most)
