"""How the arms' servers of one target are started."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path

import aiohttp

from .control_arms import Arm, Schedule, speculative_config
from .run_options import ELEMENT_BYTES, RunOptions
from .server import ServerError, ServerOptions, VllmServer
from .server_pool import MIB, ServerPool
from .sizes import Target, kv_cache_bytes, read_config

# What a server takes beside weights and KV cache, before one was seen.
SERVER_MIB = 1600.0
# What a visit may raise when its server is at fault.
BROKEN = (ServerError, RuntimeError, OSError, aiohttp.ClientError, ExceptionGroup)


def sentence(error: BaseException) -> str:
    """Return an error's text on one line, of a group its first error's."""
    while isinstance(error, BaseExceptionGroup) and error.exceptions:
        error = error.exceptions[0]
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def make_servers(
    options: RunOptions,
    target: Target,
    run_dir: Path,
    schedule: Callable[[], Schedule | None],
    on_ready: Callable[[VllmServer], None],
    say: Callable[[str], None],
) -> ServerPool:
    """Return the pool of a target's servers; none is started yet.

    Args:
        options: Of the run.
        target: What is served.
        run_dir: Private folder for tide engines.
        schedule: The tuned schedule of ``vllm_dynamic``, once there is one.
        on_ready: Warms a new server up.
        say: Progress.
    """
    kv_bytes = kv_cache_bytes(
        read_config(target.path),
        options.num_seqs,
        options.max_model_len,
        ELEMENT_BYTES[options.dtype],
    )

    def options_of(arm: Arm) -> ServerOptions:
        # Arms that share a server share its folder.
        own = run_dir / f"{zlib.crc32(arm.server_key.encode()):08x}"
        own.mkdir(mode=0o700, exist_ok=True)
        return ServerOptions(
            venv=options.venv,
            model=target.path,
            log_path=options.work / "logs" / f"{target.name}-{arm.name}.log",
            speculative_config=speculative_config(arm, options.draft, own, schedule()),
            dtype=options.dtype,
            engine_cpus=options.engine_cpus,
            other_cpus=options.other_cpus,
            kv_cache_bytes=kv_bytes,
            max_model_len=options.max_model_len,
            max_num_seqs=options.num_seqs,
            enforce_eager=not options.compile,
            # Prompts come again in later visits: a cached prefix would favour those.
            extra_args=("--no-enable-prefix-caching", *options.serve_args),
        )

    weights = sum(f.stat().st_size for f in target.path.glob("*.safetensors"))
    # Checkpoints are 16 bit.
    weights_mib = weights / MIB * ELEMENT_BYTES[options.dtype] / 2
    expected_mib = SERVER_MIB + 1.2 * weights_mib + kv_bytes / MIB
    return ServerPool(options_of, on_ready, say, expected_mib, options.resident)
