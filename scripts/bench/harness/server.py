"""Real `vllm serve` processes: start, wait, pin, sample, stop; and a pool of them.

A server starts unpinned, because loading uses every allowed core. Then every thread of
the engine is pinned to the engine's cores and every thread of the API server to the
client's. vLLM binds the worker's OpenMP threads (`VLLM_CPU_OMP_THREADS_BIND`), but
neither its other threads nor the scheduler's process, so `misplaced_threads` checks
every thread.

A pool keeps the servers of all arms resident, one of them running, so that arms which
alternate on one machine see the same drift of its speed. The other servers are stopped
with SIGSTOP: an idle vLLM polls its queues and takes some percent of a core.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

import aiohttp
import psutil

from bench.harness.arms import Arm
from bench.harness.common import BenchError, ServerError

SERVED_NAME = "demo"
SHUTDOWN_TIMEOUT_S = 15
PAUSE_S = 10.0
STANDING = (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
ENDINGS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
ENDED: list[int] = []
"""Exit status after a termination signal."""
_ENGINE_TITLES = ("VLLM::EngineCor", "VLLM::Worker")
_TRAINER_MARKS = ("vllm-tide train", "vllm_tide train", "vllm_tide.train")


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Options of one server process."""

    venv: Path
    model: Path
    log_path: Path
    speculative_config: str | None = None  # JSON, or the path of a file
    dtype: str = "float32"
    engine_cpus: tuple[int, ...] = (0,)
    other_cpus: tuple[int, ...] = (1,)  # API server; the trainer pins itself
    # Run the scheduler's process on `other_cpus` too, if vLLM has a separate one. It
    # polls, and starves a trainer that the server did not start.
    scheduler_apart: bool = False
    kv_cache_gib: int = 1
    kv_cache_bytes: int | None = None  # instead of kv_cache_gib
    max_model_len: int = 1024
    max_num_seqs: int = 8
    enforce_eager: bool = True
    extra_args: tuple[str, ...] = ()
    extra_env: Mapping[str, str] = field(default_factory=dict)


def free_port() -> int:
    """Return a free port below those that systems give to outgoing connections."""
    while True:
        port = random.SystemRandom().randrange(20_000, 29_000)
        with socket.socket() as sock:
            try:
                sock.bind(("127.0.0.1", port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                return port


def vllm_command(venv: Path) -> list[str]:
    """Return the command of `vllm`; by module if this Python has no such command."""
    command = venv / "bin" / "vllm"
    if not command.exists() and venv == Path(sys.prefix) and find_spec("vllm"):
        return [sys.executable, "-m", "vllm.entrypoints.cli.main"]
    return [str(command)]


def command_line(options: ServerOptions, port: int) -> list[str]:
    o = options
    command = [*vllm_command(o.venv), "serve", str(o.model)]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    command += ["--served-model-name", SERVED_NAME, "--dtype", o.dtype]
    command += ["--max-model-len", str(o.max_model_len)]
    command += ["--max-num-seqs", str(o.max_num_seqs)]
    command += ["--disable-uvicorn-access-log"]
    # Without a timeout vLLM kills its worker with SIGKILL at once, and the worker
    # cannot clean up.
    command += ["--shutdown-timeout", str(SHUTDOWN_TIMEOUT_S)]
    if o.enforce_eager:
        command.append("--enforce-eager")
    if o.kv_cache_bytes is not None:
        command += ["--kv-cache-memory-bytes", str(o.kv_cache_bytes)]
    if o.speculative_config is not None:
        command += ["--speculative-config", o.speculative_config]
    return [*command, *o.extra_args]


def environment(options: ServerOptions) -> dict[str, str]:
    """Return the server's environment: offline, bound, Intel OpenMP preloaded."""
    env = dict(os.environ)
    env["PATH"] = f"{options.venv / 'bin'}:{env.get('PATH', '')}"
    env["VIRTUAL_ENV"] = str(options.venv)
    env["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, options.engine_cpus))
    if options.kv_cache_bytes is None:
        env["VLLM_CPU_KVCACHE_SPACE"] = str(options.kv_cache_gib)
    else:  # the variable overrides the argument
        env.pop("VLLM_CPU_KVCACHE_SPACE", None)
    env["VLLM_NO_USAGE_STATS"] = env["DO_NOT_TRACK"] = "1"
    env["HF_HUB_OFFLINE"] = env["TRANSFORMERS_OFFLINE"] = "1"
    env["OMP_NUM_THREADS"] = str(len(options.engine_cpus))
    library = options.venv / "lib" / "libiomp5.so"
    if library.exists() and "libiomp" not in env.get("LD_PRELOAD", ""):
        env["LD_PRELOAD"] = ":".join(
            filter(None, [str(library), env.get("LD_PRELOAD")])
        )
    return env | dict(options.extra_env)


def role_of(title: str, is_root: bool) -> str:
    """Return `api`, `engine`, `trainer` or `other` from a process title."""
    if is_root:
        return "api"
    if title.startswith(_ENGINE_TITLES):
        return "engine"
    return "trainer" if any(mark in title for mark in _TRAINER_MARKS) else "other"


def _status_mib(pid: int, fields: Sequence[str]) -> dict[str, float]:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    kib = {
        k: v.split()[0]
        for k, _, v in (line.partition(":") for line in lines)
        if v.split()
    }
    return {name: int(kib[name]) / 1024 for name in fields}


class VllmServer:
    """A server process and its children.  Use as a context manager."""

    def __init__(self, options: ServerOptions) -> None:
        self.options = options
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.startup_s = self._began = 0.0
        self.peak_mib: dict[str, dict[str, float]] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._seen: dict[int, psutil.Process] = {}

    def __enter__(self) -> VllmServer:
        self.options.log_path.parent.mkdir(parents=True, exist_ok=True)
        before = os.sched_getaffinity(0)
        self._began = time.monotonic()
        # The child inherits this affinity. It must include the engine's cores, or
        # OpenMP ignores the core that it should bind to.
        os.sched_setaffinity(0, {*self.options.engine_cpus, *self.options.other_cpus})
        try:
            with self.options.log_path.open("wb") as log:
                self._process = subprocess.Popen(
                    command_line(self.options, self.port),
                    env=environment(self.options),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        finally:
            os.sched_setaffinity(0, before)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        if self._process is None:
            raise ServerError("the server is not started")
        return self._process.pid

    def log_tail(self, num_lines: int = 15) -> str:
        text = self.options.log_path.read_text(encoding="utf-8", errors="replace")
        return "\n".join(text.splitlines()[-num_lines:])

    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def wait_ready(
        self, progress: Callable[[float], None], timeout_s: float = 300.0
    ) -> None:
        while not self._healthy():
            self.startup_s = time.monotonic() - self._began
            if not self.alive() or self.startup_s > timeout_s:
                why = "is not ready in time" if self.alive() else "ended"
                raise ServerError(
                    f"the server {why} after {self.startup_s:.0f} s; "
                    f"{self.options.log_path} ends with:\n{self.log_tail()}"
                )
            progress(self.startup_s)
            time.sleep(0.5)
        self.startup_s = time.monotonic() - self._began
        self.pin()

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(self.url + "/health", timeout=2) as reply:
                return bool(reply.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def processes(self) -> dict[str, list[psutil.Process]]:
        roles: dict[str, list[psutil.Process]] = {}
        try:
            root = psutil.Process(self.pid)
            family = [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return roles
        for process in family:
            try:
                title = " ".join(process.cmdline())
            except psutil.Error:
                continue
            self._seen[process.pid] = process
            role = role_of(title, process.pid == self.pid)
            roles.setdefault(role, []).append(process)
        return roles

    def _cpus_of(self, role: str, process: psutil.Process) -> tuple[int, ...]:
        """Return the cores of a process; an engine with workers only schedules."""
        o = self.options
        children = process.children() if o.scheduler_apart else []
        titles = [" ".join(child.cmdline()) for child in children]
        schedules = any(title.startswith(_ENGINE_TITLES[1]) for title in titles)
        computes = role == "engine" and not schedules
        return o.engine_cpus if computes else o.other_cpus

    def pin(self) -> None:
        """Pin every thread of the server to its cores (the trainer pins itself).

        Skip a thread that is already on a subset: vLLM binds each OpenMP thread of
        the worker to one core.
        """
        for role, processes in self.processes().items():
            for process in processes if role != "trainer" else []:
                with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                    cpus = self._cpus_of(role, process)
                    for thread in process.threads():
                        if not os.sched_getaffinity(thread.id) <= set(cpus):
                            os.sched_setaffinity(thread.id, cpus)

    def misplaced_threads(self) -> list[str]:
        wrong = []
        for role, processes in self.processes().items():
            for process in processes:
                try:
                    allowed = set(self._cpus_of(role, process))
                    threads = process.threads()
                except psutil.NoSuchProcess:  # ended after it was listed
                    continue
                for thread in threads:
                    try:
                        cpus = os.sched_getaffinity(thread.id)
                    except ProcessLookupError:
                        continue
                    if not cpus <= allowed:
                        wrong.append(
                            f"{role} pid {process.pid} on cores {sorted(cpus)}"
                        )
        return sorted(set(wrong))

    def memory_mib(self) -> dict[str, dict[str, float]]:
        fields = ("VmRSS", "RssAnon", "RssShmem")
        now: dict[str, dict[str, float]] = {}
        for role, processes in self.processes().items():
            total = dict.fromkeys(fields, 0.0)
            for process in processes:
                try:
                    mib = _status_mib(process.pid, fields)
                except (OSError, KeyError):
                    continue
                total = {name: total[name] + mib[name] for name in fields}
            now[role] = total
            peak = self.peak_mib.setdefault(role, dict.fromkeys(fields, 0.0))
            for name in fields:
                peak[name] = max(peak[name], total[name])
        return now

    def pause(self) -> None:
        """Stop the processes with SIGSTOP, so that they use no CPU time.

        Returns when they are stopped: a process that waits for a core stops only when
        it gets the core.
        """
        stopped = list(chain.from_iterable(self.processes().values()))
        for process in stopped:
            with contextlib.suppress(psutil.Error):
                process.suspend()
        deadline = time.monotonic() + PAUSE_S
        for process in stopped:
            with contextlib.suppress(psutil.Error):
                while process.status() not in STANDING and time.monotonic() < deadline:
                    time.sleep(0.002)

    def resume(self) -> None:
        for process in chain.from_iterable(self.processes().values()):
            with contextlib.suppress(psutil.Error):
                process.resume()

    def stop(self, grace_s: float = 30.0) -> bool:
        if self._process is None:
            return True
        self.resume()  # also lists the children before they lose their parent
        if self.alive():
            self._process.send_signal(signal.SIGTERM)
        _, left = psutil.wait_procs(list(self._seen.values()), timeout=grace_s)
        for process in left:
            if process.is_running():
                process.kill()
        self._process.wait(timeout=grace_s)
        self._process = None
        return not left


def end_on_signals() -> None:
    """Raise SystemExit on signals of `ENDINGS`, so that servers are stopped.

    Servers run in separate sessions, and a stopped one cannot detect our exit.
    """
    for ending in ENDINGS:
        if signal.getsignal(ending) != signal.SIG_IGN:  # as under nohup
            signal.signal(ending, _end)


def _end(number: int, _frame: object) -> None:
    for ending in ENDINGS:  # once: cleanup is running
        signal.signal(ending, signal.SIG_IGN)
    ENDED.append(128 + number)
    sys.exit(ENDED[0])


def leave_if_ended() -> None:
    """Exit if a signal arrived but its SystemExit was caught elsewhere."""
    if ENDED:
        sys.exit(ENDED[0])


MIB = 1 << 20
START_LIMIT_S = 900.0
# Reserved for the client, the page cache and other processes.
RESERVE_MIB = 1500


def available_mib() -> float:
    """Return the memory available without swapping."""
    return float(psutil.virtual_memory().available) / MIB


@dataclass
class ServerPool:
    """Servers by arm, all resident, one running.  Use as a context manager."""

    options_of: Callable[[Arm], ServerOptions]  # how to start an arm's server
    # Called with each server when it becomes ready.
    on_ready: Callable[[VllmServer], None]
    log: Callable[[str], None]  # progress, one line
    expected_mib: float  # expected memory of a server, until one was measured
    startup_s: dict[str, float] = field(default_factory=dict)
    memory_mib: dict[str, float] = field(default_factory=dict)
    _servers: dict[str, VllmServer] = field(default_factory=dict)
    _running: str | None = None

    def __enter__(self) -> ServerPool:
        return self

    def __exit__(self, *_: object) -> None:
        while self._servers:
            _, server = self._servers.popitem()
            server.stop()

    def check_memory(self, arms: Sequence[Arm]) -> None:
        """Raise BenchError if not every arm's server fits into memory."""
        missing = len({arm.name for arm in arms} - self._servers.keys())
        # A server grows while it serves: by a quarter at batch 48.
        measured = 1.3 * max(self.memory_mib.values(), default=0.0)
        need = missing * (measured or self.expected_mib)
        have = available_mib() - RESERVE_MIB
        if need > have:
            raise BenchError(
                f"{missing} more servers need {need / 1024:.1f} GiB together and "
                f"{max(0.0, have) / 1024:.1f} GiB are free: give fewer --arms, a "
                "smaller --max-num-seqs or --max-model-len"
            )

    def get(self, arm: Arm) -> VllmServer:
        """Return the arm's running server; stop every other one."""
        key = arm.name
        if key in self._servers and not self._servers[key].alive():
            self.drop(arm)
        if self._running not in (None, key):
            self._servers[self._running].pause()
        if key not in self._servers:
            self._running = None
            self._start(arm)
        elif self._running != key:
            self._servers[key].resume()
        self._running = key
        return self._servers[key]

    def drop(self, arm: Arm) -> None:
        key = arm.name
        if key == self._running:
            self._running = None
        if key in self._servers:
            self._servers.pop(key).stop()

    def _start(self, arm: Arm) -> None:
        self.log(f"starting the server of {arm.name}")
        before = available_mib()
        server = VllmServer(self.options_of(arm))
        try:
            server.__enter__()
            server.wait_ready(lambda _: None, START_LIMIT_S)
            self.on_ready(server)
        except BaseException:
            server.stop()
            raise
        self._servers[arm.name] = server
        self.startup_s[arm.name] = round(server.startup_s, 1)
        rss = sum(part["VmRSS"] for part in server.memory_mib().values())
        # Resident sizes count shared libraries once per server; the difference in
        # available memory includes other processes. The estimate is between the two.
        taken = max(0.0, before - available_mib())
        self.memory_mib[arm.name] = round(min(rss, max(taken, 0.6 * rss)), 1)
        self.log(
            f"{arm.name}: ready after {server.startup_s:.0f} s, "
            f"{self.memory_mib[arm.name] / 1024:.1f} GiB"
        )


# Exceptions of a visit if its server fails.
BROKEN = (ServerError, RuntimeError, OSError, aiohttp.ClientError, ExceptionGroup)


def sentence(error: BaseException) -> str:
    """Return an error's text on one line; of a group, that of its first error."""
    while isinstance(error, BaseExceptionGroup) and error.exceptions:
        error = error.exceptions[0]
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
