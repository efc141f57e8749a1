"""Starts the sidecar trainer with the server (`tide.train.autostart`)."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

from vllm_tide.config import TrainConfig

logger = logging.getLogger("vllm_tide")

# The engine's thread binding would put the trainer on the engine's cores.
_ENGINE_ONLY = ("OMP_", "KMP_", "GOMP_", "VLLM_CPU_")
_STOP_SECONDS = 10


class TrainerProcess:
    """The trainer as a child of the worker; a dead trainer never affects serving.

    Args:
        engine_id: Engine to train for.
        run_dir: Where its manifest is; the trainer's log goes there too.
        config: `tide.train`.
    """

    def __init__(self, engine_id: str, run_dir: Path, config: TrainConfig) -> None:
        self._engine_id = engine_id
        self._run_dir = run_dir
        self._config = config
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it; a failure is logged, serving goes on."""
        command = [sys.executable, "-m", "vllm_tide", "train"]
        command += ["--engine", self._engine_id, "--run-dir", str(self._run_dir)]
        env = {k: v for k, v in os.environ.items() if not k.startswith(_ENGINE_ONLY)}
        log = self._run_dir / f"trainer-{self._engine_id}.log"
        try:
            fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            with os.fdopen(fd, "ab") as out:
                self._process = subprocess.Popen(  # noqa: S603 - our own command
                    command,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    start_new_session=True,
                )
        except OSError as error:
            logger.error("vllm_tide: the trainer could not be started: %s", error)
            return
        logger.info("vllm_tide: trainer %d started, log %s", self._process.pid, log)

    def close(self) -> None:
        """Ask it to stop, then insist. Idempotent."""
        process, self._process = self._process, None
        if process is None or process.poll() is not None:
            return
        process.terminate()
        try:
            process.wait(timeout=_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
