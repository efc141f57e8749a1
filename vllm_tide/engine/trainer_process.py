"""Keeps a server's sidecar running: the trainer, or the relay to a spool.

The trainer with `tide.train.autostart`, one for all engines of a run directory that
serve the same; the relay with `tide.spool.url`: then the trainer is elsewhere.

The CPU backend binds the model's threads; a thread or child of ours would inherit that
and compete with the model. Other threads still carry what the operator gave.
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

# The engine's thread binding would put the trainer on the engine's cores.
_ENGINE_ONLY = ("OMP_", "KMP_", "GOMP_", "VLLM_CPU_")
_STOP_SECONDS = 10
POLL_S = 1.0
LOG_BYTES = 4 << 20
HUNG_S = 600.0
"""A trainer that has read the ring and shows no life for so long (s) is killed."""
GOOD_LIFE_S = 1800.0
"""The death of one that lived so long (s) is the first of a row."""


def pause_after(deaths: int) -> float:
    """Seconds until it is started again: 1, 2, 4 ... 60; an hour from 8 in a row on."""
    return min(2.0 ** (deaths - 1), 60.0) if deaths < 8 else 3600.0


class TrainerProcess:
    """Trainer or relay as a child of the worker; a dead one never affects serving.

    Args:
        run_dir: Where its manifest is; the child's log goes there too.
        group: Engines with the same one have one trainer (`group_of`).
        spool: `tide.spool`; the child, `process`, is a relay when it has a URL.
        reads: Whether a trainer shows life.
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
        self._stop, self._asked = Event(), False
        self._thread = Thread(target=self._watch, name="vllm-tide-watch", daemon=True)
        self._cores = os.sched_getaffinity(0)
        self._deaths = self._silent = 0
        self._has_read = False  # the ring, since it was launched
        self._reads = reads
        self._began = self._next = 0.0

    def start(self) -> None:
        """Start it, and again when it ends; failures are logged, serving goes on."""
        self._cores = os.sched_getaffinity(0)
        self._look()
        self._thread.start()

    def _watch(self) -> None:
        while not self._stop.wait(POLL_S):
            self._look()

    def _look(self) -> None:
        """See whether it lives; start it when that is due."""
        self._decisions.look(time.monotonic())
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
        """Kill a trainer that shows no life, once its log says where it is.

        Looks are counted, not seconds: where this process is frozen, so is the trainer.
        A relay may take as long as its storage does. So may a trainer that has not read
        yet: it loads models, or serves other engines and cannot take this one.
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
        said = "vllm_tide: the trainer has shown no life for %d s; it is killed."
        logger.error(said, HUNG_S)
        process.kill()

    def _launch(self, now: float) -> None:
        command = [sys.executable, "-m", "vllm_tide", self._kind]
        command += ["--engine", self._whom, "--run-dir", str(self._run_dir)]
        env = {k: v for k, v in os.environ.items() if not k.startswith(_ENGINE_ONLY)}
        if self._url is not None:  # with its credentials, which no `ps` shows there
            env[SPOOL_VARIABLE] = self._url
        self._silent, self._has_read = 0, False
        # A child inherits this thread's cores, and all threads of a worker may have
        # been bound to its own core since the start.
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
                # While it lives no other engine starts one, should this one die.
                pass_fds=() if self._lock is None else (self._lock,),
            )
        said = "vllm_tide: %s %d started, log %s"
        logger.info(said, self._name, self.process.pid, self._log)

    def _failed(self, now: float, how: str) -> None:
        self._deaths = 1 if now - self._began >= GOOD_LIFE_S else self._deaths + 1
        pause = pause_after(self._deaths)
        self._next = now + pause
        said = "vllm_tide: the %s %s; it is started again in %d s, see %s."
        logger.warning(said, self._name, how, pause, self._log)

    def ask(self) -> None:
        """Ask it to stop, without waiting; no other is started. Idempotent."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        process = self.process
        if not self._asked and process is not None and process.poll() is None:
            self._asked = True
            process.terminate()

    def close(self) -> None:
        """Ask it to stop, then insist. Idempotent."""
        self.ask()
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
    """Cores that each thread of a process may run on."""
    found = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{process}/task"):
            with contextlib.suppress(OSError):
                found.append(os.sched_getaffinity(int(task)))
    return found


def given_cores() -> set[int]:
    """Union of what the threads of this process, and its parent, may run on."""
    cores = set(os.sched_getaffinity(0))
    # A worker process may be bound as a whole; the process that started it is not.
    with contextlib.suppress(OSError):
        cores |= os.sched_getaffinity(os.getppid())
    return cores.union(*_bound("self"))


def free_cores(given: set[int]) -> set[int]:
    """Those of `given` that no rank of the engine is bound to; all if none is left.

    A rank's thread is bound if it may run on less than `given` and on other cores than
    the process that started the ranks.
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
    """Run `call` in a thread on `cores`; processes it starts inherit them."""
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
    """Limits NumPy's BLAS in this process; Torch's own threads are not touched.

    Some of the policy's products are just large enough for OpenBLAS to share them out
    over threads, which take cores from the model and gain nothing at this size.
    """
    threadpool_limits(limits=1, user_api="blas")
