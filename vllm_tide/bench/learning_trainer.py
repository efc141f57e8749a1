"""A trainer process that a suite starts itself, beside its servers."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess  # noqa: S404 - starts the trainer under test
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .learning_options import SuiteOptions

STOP_S = 20.0
# What binds the engine's threads would bind the trainer's too.
_ENGINE_ONLY = ("OMP_", "KMP_", "GOMP_", "VLLM_CPU_")


@contextlib.contextmanager
def trainer_process(
    options: SuiteOptions,
    name: str,
    section: Mapping[str, Any],
    run_dir: Path,
    module: Sequence[str] = ("vllm_tide", "train"),
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a trainer for every engine of a run directory; stop it at the end.

    Args:
        options: Of the suite.
        name: Names its log and its configuration.
        section: Its `tide` section.
        run_dir: Where the engines are.
        module: Module and arguments; it understands `--run-dir` and `--config`.
    """
    config = options.work / "configs" / f"{name}-trainer.json"
    log = options.work / "logs" / f"{name}-trainer.log"
    for path in (config, log):
        path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"tide": dict(section)}, indent=2)
    config.write_text(text + "\n", encoding="utf-8")
    command = [str(options.venv / "bin" / "python"), "-m", *module]
    command += ["--run-dir", str(run_dir), "--config", str(config)]
    env = {k: v for k, v in os.environ.items() if not k.startswith(_ENGINE_ONLY)}
    with log.open("wb") as out:
        process = subprocess.Popen(  # noqa: S603 - our own command
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env
        )
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
