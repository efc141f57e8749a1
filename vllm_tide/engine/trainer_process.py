"""Supervision of a server's sidecar process: the trainer, or the relay to a spool.

`tide.train.autostart` starts one trainer for all engines of a run directory that serve
the same models. `tide.spool.url` starts a relay; the trainer then runs elsewhere.

The CPU backend binds the model's threads to cores. Threads and child processes inherit
that binding and would compete with the model, so they get the cores of unbound threads.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread
from typing import TypeVar

from threadpoolctl import threadpool_limits

from vllm_tide.config import SpoolConfig
from vllm_tide.engine.server_log import TrainerLog
from vllm_tide.transport.rendezvous import SPOOL_VARIABLE, take_lock

logger = logging.getLogger("vllm.tide")

# Variables of thread binding, which would put the trainer on the engine's cores.
_ENGINE_ONLY = ("OMP_", "KMP_", "GOMP_", "VLLM_CPU_")
_STOP_SECONDS = 5  # then killed: vLLM kills a worker that takes long to stop
POLL_S = 1.0
LOG_BYTES = 4 << 20
HUNG_S = 600.0
"""A trainer that stops reading the ring is killed after this time (s)."""
GOOD_LIFE_S = 1800.0
"""Uptime after which an exit does not count as one of a series (s)."""


def pause_after(deaths: int) -> float:
    """Return seconds until the restart: 1, 2, 4 ... 60; from 8 exits on an hour."""
    return min(2.0 ** (deaths - 1), 60.0) if deaths < 8 else 3600.0


class TrainerProcess:
    """Trainer or relay as a child process of the worker.

    Args:
        run_dir: Directory of the manifest and of the child's log.
        group: Group of engines that share a trainer (`group_of`).
        spool: `tide.spool`; with a URL the child is a relay.
        reads: Returns whether a trainer reads the ring.
    """

    def __init__(
        self,
        engine_id: str,
        run_dir: Path,
        group: str,
        spool: SpoolConfig,
        reads: Callable[[], bool] = lambda: True,
    ) -> None:
        self._kind = "train" if spool.url is None else "relay"
        self._name = "trainer" if spool.url is None else "relay"
        self._whom = group if spool.url is None else engine_id
        self._run_dir, self._url = run_dir, spool.url
        self._log = run_dir / f"{self._name}-{engine_id}.log"
        self._decisions = TrainerLog(self._log)
        self._lock: int | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self._stop, self._terminated = Event(), False
        self._thread = Thread(target=self._watch, name="vllm-tide-watch", daemon=True)
        self._cores = os.sched_getaffinity(0)
        self._deaths = self._silent = 0
        self._has_read = False  # the ring, since it was launched
        self._reads = reads
        self._began = self._next = 0.0

    def start(self) -> None:
        """Start the process, and restart it after an exit; failures are logged."""
        if self._stop.is_set():  # the server ended with its first request
            return
        self._cores = os.sched_getaffinity(0)
        self._check()
        self._thread.start()

    def _watch(self) -> None:
        while not self._stop.wait(POLL_S):
            self._check()

    def _check(self) -> None:
        """Check the process; start it when a start is due."""
        self._decisions.repeat_new(time.monotonic())
        with contextlib.suppress(OSError):
            if self._log.stat().st_size > LOG_BYTES:
                with contextlib.suppress(OSError):
                    shutil.copy(self._log, f"{self._log}.1")
                os.truncate(self._log, 0)  # the child appends
        now, process = time.monotonic(), self.process
        if process is not None:
            if process.poll() is None:
                self._end_if_hung(process)
                return
            self.process = None
            self._failed(now, f"ended with status {process.returncode}")
        if now < self._next:
            return
        self._began = now
        try:
            if self._kind == "train" and self._lock is None:
                self._lock = take_lock(self._run_dir, self._whom)
            if self._kind == "relay" or self._lock is not None:
                self._launch(now)
        except OSError as error:
            self._failed(now, f"could not be started: {error}")

    def _end_if_hung(self, process: subprocess.Popen[bytes]) -> None:
        """Kill a trainer without heartbeats, after it has logged its stack traces.

        Polls are counted, not seconds, because a frozen machine stops the trainer too.
        A relay is exempt, as its storage may be slow. So is a trainer that has not read
        the ring yet: it loads models, or serves other engines and rejects this one.
        """
        reads = self._kind == "relay" or self._reads()
        self._has_read = self._has_read or reads
        self._silent = 0 if reads or not self._has_read else self._silent + 1
        if self._silent * POLL_S < HUNG_S:
            return
        if self._silent * POLL_S < HUNG_S + POLL_S:
            process.send_signal(signal.SIGUSR1)
            return
        self._silent = 0
        message = "vllm_tide: the trainer has sent no heartbeat for %d s; killing it."
        logger.error(message, HUNG_S)
        process.kill()

    def _launch(self, now: float) -> None:
        command = [sys.executable, "-m", "vllm_tide", self._kind]
        command += ["--engine", self._whom, "--run-dir", str(self._run_dir)]
        env = {k: v for k, v in os.environ.items() if not k.startswith(_ENGINE_ONLY)}
        if self._url is not None:  # `ps` does not show credentials in a variable
            env[SPOOL_VARIABLE] = self._url
        self._silent, self._has_read = 0, False
        # A child inherits this thread's cores. All threads of a worker may have been
        # bound to the worker's core since the start.
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, self._cores)
        fd = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with os.fdopen(fd, "ab") as out:
            self.process = subprocess.Popen(  # noqa: S603 - our own command
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                # The child holds the lock too: no other engine starts a second trainer.
                pass_fds=() if self._lock is None else (self._lock,),
            )
        message = "vllm_tide: %s %d started, log %s"
        logger.info(message, self._name, self.process.pid, self._log)

    def _failed(self, now: float, how: str) -> None:
        self._deaths = 1 if now - self._began >= GOOD_LIFE_S else self._deaths + 1
        pause = pause_after(self._deaths)
        self._next = now + pause
        message = "vllm_tide: the %s %s; restart in %d s, see %s."
        logger.warning(message, self._name, how, pause, self._log)

    def terminate(self) -> None:
        """Stop supervision and send SIGTERM, without waiting. Idempotent."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        process = self.process
        if not self._terminated and process is not None and process.poll() is None:
            self._terminated = True
            process.terminate()

    def close(self) -> None:
        """Terminate the process, and kill it after a timeout. Idempotent."""
        self.terminate()
        process, self.process = self.process, None
        if process is not None and process.poll() is None:
            try:
                process.wait(timeout=_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)


T = TypeVar("T")


def _bound(process: int | str) -> list[set[int]]:
    """Return the cores that each thread of a process may run on."""
    cores = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{process}/task"):
            with contextlib.suppress(OSError):
                cores.append(os.sched_getaffinity(int(task)))
    return cores


def given_cores() -> set[int]:
    """Return the cores that any thread of this process, or its parent, may run on."""
    cores = set(os.sched_getaffinity(0))
    # All threads of a worker process may be bound; its parent is not.
    with contextlib.suppress(OSError):
        cores |= os.sched_getaffinity(os.getppid())
    return cores.union(*_bound("self"))


def free_cores(given: set[int]) -> set[int]:
    """Return the cores of `given` that no rank is bound to; all if none is free.

    A rank's thread is bound if its cores are a proper subset of `given` and differ from
    those of the process that started the ranks.
    """
    parent = os.getppid()
    ranks = {str(os.getpid())}
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{parent}/task").iterdir():
            with contextlib.suppress(OSError):
                ranks |= set((task / "children").read_text().split())
    started = set().union(*_bound(parent))
    bound = {
        core
        for rank in ranks
        for cores in _bound(rank)
        if cores < given and cores != started
        for core in cores
    }
    return given - bound or given


def call_on(cores: set[int], call: Callable[[], T]) -> T:
    """Run `call` in a thread on `cores`; its child processes inherit them."""
    results: list[T] = []

    def run() -> None:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, cores)
        results.append(call())

    thread = Thread(target=run, name="vllm-tide-start")
    thread.start()
    thread.join()
    return results[0]


def use_one_blas_thread() -> None:
    """Limit NumPy's BLAS to one thread in this process; Torch is not affected.

    OpenBLAS would use several threads for some products of the policy. They gain
    nothing at this size and take cores from the model.
    """
    threadpool_limits(limits=1, user_api="blas")
