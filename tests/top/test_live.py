"""On a real terminal (a pty): what is drawn, what keys do, and the way out."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.top.page_server import serve_page
from tests.top.samples import page_text, write_status

ROOT = Path(__file__).parents[2]
ENTER, LEAVE = b"\033[?1049h", b"\033[?1049l"
DRAWN = b"TRAINER"
CTRL_C = b"\x03"
SECONDS = 30


def own_terminal():
    """In the child: stdin is its terminal, and Ctrl-C is heard."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    # Ignored where the tests themselves run in a shell's background.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup


class Screen:
    """`vllm-tide top` on a pty of its own."""

    def __init__(self, args, columns=80, rows=24, code=None, **env):
        self.master, self.slave = pty.openpty()
        self.resize(columns, rows)
        self.before = termios.tcgetattr(self.slave)
        self.output = b""
        environ = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR",)}
        for name in ("COLUMNS", "LINES"):
            environ.pop(name, None)
        what = ["-c", code] if code else ["-m", "vllm_tide", "top"]
        self.process = subprocess.Popen(
            [sys.executable, *what, *map(str, args)],
            stdin=self.slave,
            stdout=self.slave,
            stderr=self.slave,
            cwd=ROOT,
            env=environ | {"TERM": "xterm"} | env,
            start_new_session=True,
            preexec_fn=own_terminal,
        )

    def resize(self, columns, rows):
        size = struct.pack("HHHH", rows, columns, 0, 0)
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, size)

    def read_until(self, wanted, start=0):
        """Reads until `wanted` comes after `start`; where it ends."""
        deadline = time.monotonic() + SECONDS
        while wanted not in self.output[start:]:
            left = deadline - time.monotonic()
            assert left > 0, (wanted, self.output[-3000:])
            if select.select([self.master], [], [], min(left, 0.2))[0]:
                self.output += os.read(self.master, 65536)
        return self.output.index(wanted, start) + len(wanted)

    def press(self, keys):
        os.write(self.master, keys)

    def wait(self):
        """Exit status, and everything that was written until then."""
        deadline = time.monotonic() + SECONDS
        while self.process.poll() is None:
            assert time.monotonic() < deadline, self.output[-3000:]
            if select.select([self.master], [], [], 0.05)[0]:
                self.output += os.read(self.master, 65536)
        while select.select([self.master], [], [], 0)[0]:
            self.output += os.read(self.master, 65536)
        return self.process.returncode

    def is_restored(self):
        """Whether the terminal is as it was, by its modes and by what was written."""
        same = termios.tcgetattr(self.slave) == self.before
        cursor = self.output.rindex(b"\033[?25h") > self.output.rindex(b"\033[?25l")
        return same and cursor and self.output.rindex(LEAVE) > self.output.rindex(ENTER)

    def frames(self):
        """Every screen drawn but the first, which says to wait, as plain lines."""
        text = self.output.split(LEAVE)[0].decode()
        found = []
        # The last may not be read to its end yet.
        for frame in text.split("\033[H")[1:-1]:
            plain = re.sub(r"\033\[[0-9;?]*[a-zA-Z]", "", frame)
            lines = [line.strip("\r") for line in plain.split("\n")]
            if "looking" not in lines[0] and lines != [""]:
                found.append(lines)
        return found

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.master)
        os.close(self.slave)


@contextmanager
def showing(*args, **options):
    screen = Screen(args, **options)
    try:
        yield screen
    finally:
        screen.close()


@pytest.fixture
def run_dir(tmp_path):
    write_status(tmp_path / "run")
    return tmp_path / "run"


def options(run_dir):
    return "--run-dir", run_dir, "--interval", "0.2"


def test_it_draws_within_80_by_24_and_ctrl_c_quits(run_dir):
    with (
        serve_page(page_text()) as server,
        showing(*options(run_dir), "--url", server.url) as screen,
    ):
        screen.read_until(b"TRAINER")
        screen.read_until(DRAWN)
        screen.read_until(b"\033[H", len(screen.output))
        frames = screen.frames()  # before the key, at which a terminal drops output
        screen.press(CTRL_C)
        assert screen.wait() == 0
        assert screen.is_restored()
        assert screen.output.count(ENTER) == 1
    assert frames
    for frame in frames:
        assert len(frame) == 24
        assert max(map(len, frame)) <= 80
    text = "\n".join(frames[-1])
    assert "SERVER" in text
    assert "version 5 served, 5 swaps" in text


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGINT, 0), (signal.SIGTERM, 143)],
)
def test_every_signal_restores_the_terminal(run_dir, number, status):
    with showing(*options(run_dir)) as screen:
        screen.read_until(DRAWN)
        screen.process.send_signal(number)
        assert screen.wait() == status
        assert screen.is_restored()


def test_ctrl_c_is_a_way_out(run_dir):
    with showing(*options(run_dir)) as screen:
        screen.read_until(DRAWN)
        screen.press(CTRL_C)
        assert screen.wait() == 0
        assert screen.is_restored()
        assert b"Traceback" not in screen.output


def test_an_exception_restores_the_terminal(run_dir):
    code = (
        "from vllm_tide.top import view;"
        "view.body = lambda *a: 1 / 0;"
        "from vllm_tide.cli.main import main;"
        f"main(['top', '--run-dir', {str(run_dir)!r}, '--interval', '0.1'])"
    )
    with showing(code=code) as screen:
        assert screen.wait() == 1
        assert screen.is_restored()
        assert screen.output.rindex(b"ZeroDivisionError") > screen.output.rindex(LEAVE)


def test_servers_come_and_go(run_dir):
    with serve_page(page_text()) as server:
        port, url = server.port, server.url
    with showing(*options(run_dir), "--url", url) as screen:
        screen.read_until(b"does not answer")
        with serve_page(page_text(), port):
            end = screen.read_until(b"version 5 served, 5 swaps")
        end = screen.read_until(b"does not answer", end)
        with serve_page(page_text(version=6), port):
            screen.read_until(b"version 6", end)
        (run_dir / "trainer-e1.json").unlink()
        run_dir.rmdir()
        screen.read_until(b"none seen", end)
        screen.press(CTRL_C)
        assert screen.wait() == 0


def test_a_new_size_is_drawn_at_once(run_dir):
    with showing("--run-dir", run_dir, "--interval", "30") as screen:
        end = screen.read_until(DRAWN)
        screen.resize(50, 12)
        # The figures come every 30 s: only the size asks for other screens.
        while not (frames := screen.frames()) or len(frames[-1]) != 12:
            end = screen.read_until(b"\033[H", end)
        screen.press(CTRL_C)
        assert screen.wait() == 0
        last = screen.frames()[-1]
    assert len(last) == 12
    assert max(map(len, last)) <= 50


def test_no_colour_when_it_is_not_wanted(run_dir):
    with showing(*options(run_dir)) as screen:
        screen.read_until(DRAWN)
        screen.press(CTRL_C)
        screen.wait()
        assert b"\033[32m" in screen.output
    with showing(*options(run_dir), NO_COLOR="1") as screen:
        screen.read_until(DRAWN)
        screen.press(CTRL_C)
        screen.wait()
        assert not re.search(rb"\033\[[\d;]*[349]\d[\d;]*m", screen.output)


def test_a_dumb_terminal_gets_plain_screens(run_dir):
    with showing(*options(run_dir), TERM="dumb") as screen:
        end = screen.read_until(b"vllm-tide top")
        screen.read_until(b"vllm-tide top", end)
        screen.press(CTRL_C)
        assert screen.wait() == 0
        assert b"\033" not in screen.output


def test_a_terminal_that_goes_away_ends_it(run_dir):
    with showing(*options(run_dir)) as screen:
        screen.read_until(DRAWN)
        os.close(screen.slave)
        os.close(screen.master)
        try:
            assert screen.process.wait(timeout=SECONDS) in (0, 129, -signal.SIGHUP)
        finally:
            screen.master, screen.slave = pty.openpty()
