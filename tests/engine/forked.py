"""Fork a process for each engine script from a parent that has imported vLLM.

An import takes longer than the rest of a small engine's start. The parent has one
thread, has not imported `vllm_tide` and has not made an engine.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from pathlib import Path
from typing import Any, BinaryIO

SCRIPTS = Path(__file__).parent
# Modules that an engine imports after its start in any case.
IMPORTED = (
    "vllm.v1.engine.llm_engine",
    "vllm.v1.engine.core",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.spec_decode.eagle",
    "vllm.compilation.backends",
    "vllm.compilation.passes.pass_manager",
    "vllm.model_executor.models.llama_eagle3",
    "compressed_tensors",
)
_OUR_END: dict[bool, socket.socket] = {}


class Forked:
    """A started script with the interface of a `subprocess.Popen` with text pipes.

    Args:
        argv: Path of the script, which is run as `__main__`, and its arguments.
        interpreted: True if Triton is to interpret its kernels (Model Runner V2).
        errors: Its standard error goes there; by default to a temporary file.
    """

    def __init__(
        self,
        argv: list[str],
        interpreted: bool = False,
        errors: BinaryIO | None = None,
    ) -> None:
        self.errors = errors or tempfile.TemporaryFile()  # noqa: SIM115 - closed with us
        order = {
            "argv": argv,
            "env": dict(os.environ),
            "cwd": os.getcwd(),
            "mask": os.umask(os.umask(0o22)),
        }
        orders, self.stdin = _pipe("w")
        output, self.stdout = _pipe("r")
        state, self._state = _pipe("r")
        link = _link(interpreted)
        with tempfile.TemporaryFile() as file:  # longer than a datagram may be
            file.write(json.dumps(order).encode())
            file.flush()
            given = [file.fileno(), orders, output, self.errors.fileno(), state]
            socket.send_fds(link, [b"."], given)
            self._pid = int(self._state.readline())
        for fd in (orders, output, state):
            os.close(fd)
        self._pidfd = os.pidfd_open(self._pid)
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit status, negative if a signal ended it."""
        import select

        if self.returncode is None:
            if not select.select([self._pidfd], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(["forked"], timeout or 0.0)
            self.returncode = int(self._state.readline())
            os.close(self._pidfd)
        return self.returncode

    def poll(self) -> int | None:
        """Return the exit status, or None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def kill(self) -> None:
        """Send SIGKILL."""
        if self.poll() is None:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)


def run_forked(
    argv: list[str], interpreted: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run a script to its end, like `subprocess.run` with captured text."""
    process = Forked(argv, interpreted)
    process.stdin.close()
    output = process.stdout.read()
    code = process.wait()
    process.errors.seek(0)
    errors = process.errors.read().decode(errors="replace")
    return subprocess.CompletedProcess(argv, code, output, errors)


def _pipe(mode: str) -> tuple[int, Any]:
    """Return the other process's end of a pipe, and ours as a text file."""
    read, write = os.pipe()
    theirs, ours = (read, write) if mode == "w" else (write, read)
    return theirs, os.fdopen(ours, mode, encoding="utf-8", errors="replace")


def _link(interpreted: bool) -> socket.socket:
    if interpreted not in _OUR_END:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        argv = [sys.executable, __file__, str(theirs.fileno()), str(int(interpreted))]
        process = subprocess.Popen(argv, pass_fds=[theirs.fileno()])
        theirs.close()
        _OUR_END[interpreted] = ours
        atexit.register(process.wait)
        atexit.register(ours.close)  # called first: EOF ends the parent
    return _OUR_END[interpreted]


def serve(link: socket.socket) -> None:
    """Fork for each order; return in the fork, ready to run, and when all is over."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        message, given, _, _ = socket.recv_fds(link, 16, 5)
        if not message:
            sys.exit()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            link.close()
            if (pid := os.fork()) == 0:
                _become(given)
                return
            # The parent of the script's process, so that its status is read.
            state = os.fdopen(given[-1], "w")
            for fd in given[:-1]:
                os.close(fd)
            print(pid, file=state, flush=True)
            _, status = os.waitpid(pid, 0)
            with contextlib.suppress(BrokenPipeError):
                print(os.waitstatus_to_exitcode(status), file=state, flush=True)
            os._exit(0)
        for fd in given:
            os.close(fd)


def _become(given: list[int]) -> None:
    """Take over the environment of the requested script."""
    with os.fdopen(given[0], "rb") as file:
        file.seek(0)
        order = json.load(file)
    for fd, place in zip(given[1:4], (0, 1, 2), strict=True):
        os.dup2(fd, place)
        os.close(fd)
    os.close(given[4])
    os.environ.clear()
    os.environ.update(order["env"])
    os.chdir(order["cwd"])
    os.umask(order["mask"])
    sys.argv = order["argv"]
    sys.path[0] = str(Path(sys.argv[0]).parent)


def main() -> None:
    """Import vLLM; then run one script in each fork."""
    link = socket.socket(fileno=int(sys.argv[1]))
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR"}
    if sys.argv[2] == "1":
        from v2_on_cpu import interpret

        interpret()
    gc.disable()
    for name in ("vllm", *IMPORTED):
        __import__(name)
    gc.collect()
    gc.freeze()  # else an engine's start scans all imported modules seven times
    gc.enable()
    serve(link)
    code: Any = 0
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as error:
        code = error.code
    except BaseException:  # noqa: BLE001 - as an interpreter does
        traceback.print_exc()
        code = 1
    # As at an interpreter's exit, without the seconds that freeing imports takes.
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else code is not None)


if __name__ == "__main__":
    main()
