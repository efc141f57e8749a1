"""How the servers of a learning suite are started, and where their trainers report."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vllm_tide.speculative import merged

from .learning_options import SuiteOptions
from .server import ServerOptions

MAX_SEQS = 8


def draft_config(
    options: SuiteOptions,
    model: str,
    tide: Mapping[str, Any] | None = None,
    num_tokens: int | None = None,
) -> dict[str, Any]:
    """Return the object for `--speculative-config`.

    Args:
        options: Of the suite.
        model: Draft folder, or `fresh`.
        tide: Its `tide` section; None is vLLM without one.
        num_tokens: K; the suite's when None.
    """
    config: dict[str, Any] = {
        "method": "eagle3",
        "model": model,
        "num_speculative_tokens": num_tokens or options.num_speculative_tokens,
    }
    return config if tide is None else {**config, "tide": dict(tide)}


def trained_section(
    options: SuiteOptions, run_dir: Path, changes: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the `tide` section of an arm that trains: small cycles, short stream.

    Args:
        options: Of the suite; its `tide` has the last word.
        run_dir: Private folder.
        changes: Of the arm.
    """
    section: dict[str, Any] = {
        "run_dir": str(run_dir),
        "train": {
            "cpus": list(options.other_cpus),
            "batch_tokens": 1024,
            "max_sample_tokens": 512,
            "min_new_tokens": 512,
            "steps_per_cycle": 12,
            "holdout_share": 0.15,
            "seed": options.seed,
        },
    }
    return merged(merged(section, changes or {}), options.tide)


def server_options(
    options: SuiteOptions,
    target: Path,
    name: str,
    config: Mapping[str, Any] | None,
    engine_cpus: tuple[int, ...] | None = None,
    other_cpus: tuple[int, ...] | None = None,
) -> ServerOptions:
    """Return how to start a server; its configuration is written to the work folder.

    Args:
        options: Of the suite.
        target: What is served.
        name: Of the arm: names the log and the configuration.
        config: For `--speculative-config`; None without speculation.
        engine_cpus: Instead of the suite's.
        other_cpus: Instead of the suite's.
    """
    path: Path | None = None
    if config is not None:
        path = options.work / "configs" / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return ServerOptions(
        venv=options.venv,
        model=target,
        log_path=options.work / "logs" / f"server-{name}.log",
        speculative_config=None if path is None else str(path),
        dtype=options.dtype,
        engine_cpus=engine_cpus or options.engine_cpus,
        other_cpus=other_cpus or options.other_cpus,
        max_model_len=options.max_model_len,
        max_num_seqs=max(MAX_SEQS, *options.concurrency),
        enforce_eager=not options.compile,
        extra_args=options.serve_args,
    )


@contextlib.contextmanager
def private_run_dir(kept: Path) -> Iterator[Path]:
    """Yield a run directory; what is in it at the end is copied to `kept`.

    Its path is short, since sockets may be put there, and its mode 0700.
    """
    run_dir = Path(tempfile.mkdtemp(prefix="vllm_tide_bench_"))
    try:
        yield run_dir
    finally:
        shutil.rmtree(kept, ignore_errors=True)
        with contextlib.suppress(OSError, shutil.Error):
            shutil.copytree(run_dir, kept)
        shutil.rmtree(run_dir, ignore_errors=True)
