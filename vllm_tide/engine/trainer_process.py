"""Starts the sidecar with the server: the trainer, or the relay to a spool.

The trainer with `tide.train.autostart`; the relay with `tide.spool.url`, because then
the trainer is elsewhere.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

from vllm_tide.config import SpoolConfig, TideConfig, TrainConfig

logger = logging.getLogger("vllm.tide")

# The engine's thread binding would put the trainer on the engine's cores.
_ENGINE_ONLY = ("OMP_", "KMP_", "GOMP_", "VLLM_CPU_")
_STOP_SECONDS = 10


class TrainerProcess:
    """Trainer or relay as a child of the worker; a dead one never affects serving.

    Args:
        engine_id: Engine to train for.
        run_dir: Where its manifest is; the child's log goes there too.
        config: `tide.train`.
        spool: `tide.spool`; the child is a relay when it has a URL.
    """

    def __init__(
        self,
        engine_id: str,
        run_dir: Path,
        config: TrainConfig,
        spool: SpoolConfig | None = None,
    ) -> None:
        self._engine_id = engine_id
        self._run_dir = run_dir
        self._config = config
        relays = spool is not None and spool.url is not None
        self._kind = "relay" if relays else "train"
        self._process: subprocess.Popen[bytes] | None = None

    @staticmethod
    def wanted(config: TideConfig) -> bool:
        """True if the server starts a child: a trainer that gets rows, or a relay."""
        trains = config.train.autostart and config.capture.enabled
        return trains or config.spool.url is not None

    def start(self) -> None:
        """Start it; a failure is logged, serving goes on."""
        # The relay reads the URL from the engine's manifest, where no `ps` shows it.
        command = [sys.executable, "-m", "vllm_tide", self._kind]
        command += ["--engine", self._engine_id, "--run-dir", str(self._run_dir)]
        env = {k: v for k, v in os.environ.items() if not k.startswith(_ENGINE_ONLY)}
        name = "relay" if self._kind == "relay" else "trainer"
        log = self._run_dir / f"{name}-{self._engine_id}.log"
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
            logger.error("vllm_tide: the %s could not be started: %s", name, error)
            return
        logger.info("vllm_tide: %s %d started, log %s", name, self._process.pid, log)

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
