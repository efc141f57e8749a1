"""A real terminal (a pty): screen, keys, exit."""

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

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
ENTER, LEAVE = b"\033[?1049h", b"\033[?1049l"
DRAWN = b"TRAINER"
SECONDS = 30


def own_terminal():
    """Make stdin the child's terminal, with its signals."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    # Ignored where the tests themselves run in a shell's background.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup


class Screen:
    """`vllm-tide top` on its own pty of 80 by 24."""

    def __init__(self, run_dir, *args, code=None, **env):
        self.master, self.slave = pty.openpty()
        size = struct.pack("HHHH", 24, 80, 0, 0)
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, size)
        self.before = termios.tcgetattr(self.slave)
        self.output = b""
        environ = {k: v for k, v in os.environ.items() if k != "NO_COLOR"}
        environ = {k: v for k, v in environ.items() if k not in ("COLUMNS", "LINES")}
        code = code or "import sys; from vllm_tide.cli.main import main; main()"
        argv = ["top", "--run-dir", run_dir, "--interval", "0.2", *args]
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *map(str, argv)],
            stdin=self.slave,
            stdout=self.slave,
            stderr=self.slave,
            cwd=ROOT,
            env=environ | {"TERM": "xterm"} | env,
            start_new_session=True,
            preexec_fn=own_terminal,
        )

    def read_until(self, part, start=0):
        """Read until `part` comes after `start`; return its end."""
        deadline = time.monotonic() + SECONDS
        while part not in self.output[start:]:
            left = deadline - time.monotonic()
            assert left > 0, (part, self.output[-3000:])
            if select.select([self.master], [], [], min(left, 0.2))[0]:
                self.output += os.read(self.master, 65536)
        return self.output.index(part, start) + len(part)

    def wait(self):
        """Return the exit status, once all output is read."""
        deadline = time.monotonic() + SECONDS
        while self.process.poll() is None:
            assert time.monotonic() < deadline, self.output[-3000:]
            if select.select([self.master], [], [], 0.05)[0]:
                self.output += os.read(self.master, 65536)
        while select.select([self.master], [], [], 0)[0]:
            self.output += os.read(self.master, 65536)
        return self.process.returncode

    def is_restored(self):
        """Return whether the terminal's modes, cursor and screen are restored."""
        same = termios.tcgetattr(self.slave) == self.before
        cursor = self.output.rindex(b"\033[?25h") > self.output.rindex(b"\033[?25l")
        return same and cursor and self.output.rindex(LEAVE) > self.output.rindex(ENTER)


@contextmanager
def showing(*args, **options):
    screen = Screen(*args, **options)
    try:
        yield screen
    finally:
        screen.process.kill()
        screen.process.wait()
        os.close(screen.master)
        os.close(screen.slave)


@pytest.fixture
def run_dir(tmp_path):
    write_status(tmp_path / "run")
    return tmp_path / "run"


def test_servers_come_and_go_until_ctrl_c(run_dir):
    with serve_page(page_text()) as server:
        port, url = server.port, server.url
    with showing(run_dir, "--url", url) as screen:
        screen.read_until(b"does not answer")
        with serve_page(page_text(), port):
            end = screen.read_until(b"version 5 served, 5 swaps")
        end = screen.read_until(b"does not answer", end)
        (run_dir / "trainer-e1.json").unlink()
        run_dir.rmdir()
        screen.read_until(b"none seen", end)
        os.write(screen.master, b"\x03")
        assert screen.wait() == 0
        assert screen.is_restored()
        assert screen.output.count(ENTER) == 1
        assert b"Traceback" not in screen.output
        assert b"\033[3" in screen.output  # colours


def test_sigterm_restores_the_terminal(run_dir):
    with showing(run_dir, NO_COLOR="1") as screen:
        screen.read_until(DRAWN)
        screen.process.send_signal(signal.SIGTERM)
        assert screen.wait() == 143
        assert screen.is_restored()
        assert not re.search(rb"\033\[[\d;]*[349]\d[\d;]*m", screen.output)


def test_an_exception_restores_the_terminal(run_dir):
    code = (
        "from vllm_tide.top import view;"
        "view.body = lambda *a: 1 / 0;"
        "from vllm_tide.cli.main import main; main()"
    )
    with showing(run_dir, code=code) as screen:
        assert screen.wait() == 1
        assert screen.is_restored()
        assert screen.output.rindex(b"ZeroDivisionError") > screen.output.rindex(LEAVE)
