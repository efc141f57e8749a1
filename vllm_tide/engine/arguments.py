"""Read and check `--speculative-config` before a model is loaded."""

from __future__ import annotations

import argparse
import contextlib
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from vllm_tide.config import (
    ConfigError,
    TideConfig,
    parse_tide,
    trains_here,
    without_credentials,
)
from vllm_tide.engine.adaptive_arguments import (
    KNOB,
    settle_adaptive,
    switch_adaptive_on,
    table_of,
)
from vllm_tide.engine.draft_arguments import use_draft
from vllm_tide.speculative import (
    FRESH,
    METHODS,
    MODEL_MISSING,
    is_inline,
    merged,
    mistakes,
    read_json_object,
    settle,
    without_control,
)

logger = logging.getLogger("vllm.tide")


def use_fresh_draft(config: dict[str, Any], tide: TideConfig, target: Any) -> None:
    """Build a draft for the target, or take it from the cache, and configure it.

    Acceptance of an untrained draft is low. The default policy `adaspec` drafts nothing
    until drafting is predicted to be faster.

    Args:
        config: Arguments of `SpeculativeConfig`; sets `model` and `method`.

    Raises:
        ConfigError: No draft can be built for this target.
    """
    from vllm_tide.draft.config import DraftError
    from vllm_tide.draft.fresh import fresh_directory, with_vocab_size
    from vllm_tide.engine.facts import weights_dir

    try:
        where = weights_dir(target.model, target.revision)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model: a fresh draft needs the target's weights, but {target.model!r} "
            f"cannot be loaded ({type(error).__name__}); download it first."
        ) from None
    try:
        size, device = target.get_vocab_size(), tide.train.device
        settings = with_vocab_size(tide.fresh, size, device)
        method = config.get("method") or METHODS[0]
        depth = config.get("num_speculative_tokens") or 1
        folder = fresh_directory(
            where, settings, target.dtype, method=method, depth=depth
        )
    except DraftError as error:
        raise ConfigError(
            f"model: no fresh draft can be built for {target.model!r}: {error}"
        ) from None
    config["model"] = str(folder)
    config["method"] = method
    logger.info(
        "vllm_tide: serving a fresh draft from %s under policy %r",
        folder,
        tide.control.policy,
    )


def speculative_config_argument(value: str) -> dict[str, Any]:
    """Parse the value of `--speculative-config`: inline JSON or a file.

    Raises:
        argparse.ArgumentTypeError: One sentence; argparse prints it and exits with 2.
    """
    inline, line = is_inline(value), tuple(sys.argv)
    try:
        config = read_json_object(value)
        if inline and any(map(_DOTTED, line)):
            config = merged(_earlier.get(line, {}), config)
        if config.get("tide") is not None:
            _refuse(mistakes(config))
            if url := config["tide"].get("spool", {}).get("url"):
                config["tide"]["spool"]["url"] = _PrivateUrl(url)
            _print_one_line_for_config_errors()
        elif config.get("model") == FRESH and not (
            Path(FRESH).exists() or any(map(_DOTTED, line))
        ):
            raise ConfigError(_NO_SECTION)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if not inline or "tide" in config:
        _earlier[line] = config
    return config


class _PrivateUrl(str):
    """URL with a `repr` without credentials, because vLLM logs its arguments."""

    __slots__ = ()

    def __repr__(self) -> str:
        return repr(without_credentials(self))


# vLLM passes dotted keys as inline JSON, after the file that they override.
_DOTTED = re.compile(r"--?s(c|peculative[-_]config)\.").match
_NO_SECTION = (
    f'model: {FRESH!r} needs a tide section: add "tide": {{}}, give a draft, or drop '
    "--speculative-config"
)
_earlier: dict[tuple[str, ...], dict[str, Any]] = {}  # by command line


def _refuse(errors: list[str]) -> None:
    if errors:
        raise ConfigError("\n".join(errors))


def check_speculative_config(config: dict[str, Any], target: Any) -> None:
    """Check a speculative configuration with a `tide` section against the target.

    With `"model": "fresh"` a draft is built first, and its path is stored in `config`.
    The resolved `tide` section is stored there too, for all processes of the server.

    Args:
        config: Arguments of `SpeculativeConfig`; modified in place.

    Raises:
        ConfigError: One line per error, each with the name of the knob.
    """
    section = config.get("tide")
    if section is None:
        return
    _refuse(mistakes(config))
    tide = parse_tide(section)
    _check_run_dir(tide)
    model = config.get("model")
    if not isinstance(model, str) or not model:
        raise ConfigError(f"model: {MODEL_MISSING}")
    if model == FRESH:
        use_fresh_draft(config, tide, target)
    use_draft(config, target)
    config["tide"] = settle(config)
    tide = parse_tide(config["tide"])
    if tide.control.policy != "static" and not config.get(KNOB):
        config["tide"] = settle_adaptive(config["tide"], config.get(KNOB))
    # vLLM does not reuse the last cached block of a prompt, because one entry of the
    # draft's KV there may stem from another next token. That costs a block of prefill
    # for every cached prompt, even without drafts. `observe` leaves serving unchanged.
    if tide.preset != "observe":
        config.setdefault("disable_eagle_block_drop", True)


def _check_run_dir(tide: TideConfig) -> None:
    """Check that the server can write its run directory; a full one is no error."""
    from vllm_tide.transport.rendezvous import default_run_dir, is_full, require_space
    from vllm_tide.transport.shm import TransportError

    path = Path(tide.run_dir or default_run_dir())
    existed = path.exists()
    try:
        require_space(path)
    except TransportError as error:
        if not is_full(error):
            raise ConfigError(f"tide.run_dir: {error}.") from None
    if not existed:  # a later mistake must leave nothing behind
        with contextlib.suppress(OSError):
            path.rmdir()


def check_engine_config(vllm_config: Any) -> None:
    """Check the tide section against the whole configuration and adapt vLLM's options.

    Raises:
        ConfigError: One line per error, each with the name of the option.
    """
    speculative = vllm_config.speculative_config
    tide = parse_tide(speculative.tide)
    _refuse(list(_of_engine(vllm_config, tide)))
    if _moe_ranks(vllm_config) and tide.control.policy != "static":
        error = ConfigError(
            "--data-parallel-size: tide.control may choose a different length on each "
            "rank, but a mixture of experts needs equal ones; set tide.control.policy "
            "to 'static'."
        )
        speculative.tide = without_control(speculative.tide, error)
    speculative.tide = _settle_memory(speculative.tide, vllm_config)
    if vllm_config.device_config.device_type != "cpu":
        switch_adaptive_on(vllm_config, logger)
        _capture_every_length(vllm_config)


def _settle_memory(section: dict[str, Any], vllm_config: Any) -> dict[str, Any]:
    """Return the section with `test_time.memory` on or off.

    By default it is off on Model Runner V2, where its cost on a GPU has not been
    measured, and with `test_time.adapt`, which gains less with it.
    """
    tide = parse_tide(section)
    if tide.test_time.memory != "auto":
        return section
    useful = (
        tide.control.policy != "static"
        and tide.test_time.adapt == "off"
        and not vllm_config.use_v2_model_runner
        and vllm_config.speculative_config.draft_sample_method == "greedy"
    )
    memory = "ngram" if useful else "off"
    return {**section, "test_time": {**section.get("test_time", {}), "memory": memory}}


def _moe_ranks(vllm_config: Any) -> bool:
    ranks = vllm_config.parallel_config.data_parallel_size
    return ranks > 1 and bool(vllm_config.model_config.is_moe)


def _of_engine(config: Any, tide: TideConfig) -> Iterator[str]:
    """Yield an error for each option that excludes tide."""
    # vLLM's name of ROCm is "cuda".
    device, v2 = config.device_config.device_type, config.use_v2_model_runner
    speculative, parallel = config.speculative_config, config.parallel_config
    adaptive = speculative.enable_adaptive_verification
    sampling, moe_ranks = speculative.draft_sample_method, _moe_ranks(config)
    if device not in ("cpu", "cuda"):
        yield (
            f"tide: device {device!r} is not supported, only 'cpu' and 'cuda' (ROCm "
            "too); remove the tide section to serve without it."
        )
    if device != "cpu" and not v2:
        yield (
            f"tide: device {device!r} needs Model Runner V2; set "
            "VLLM_USE_V2_MODEL_RUNNER to 1, or remove the tide section."
        )
    name, build = tide.train.device, torch.version
    if trains_here(tide) and name != "cpu" and not (build.cuda or build.hip):
        yield (
            f"tide.train.device: {name!r}, but torch is a CPU build; set it to 'cpu', "
            "or install the GPU builds of torch and vLLM."
        )
    if config.lora_config:
        yield (
            "--enable-lora: tide does not separate the hidden states of adapters; "
            "switch LoRA off or remove the tide section."
        )
    if config.kv_transfer_config:
        yield (
            "--kv-transfer-config: tide cannot capture a prompt with transferred KV, "
            "and has not been tested with a KV connector; leave it out or remove the "
            "tide section."
        )
    if config.weight_transfer_config:
        yield (
            "--weight-transfer-config: the draft is trained for the target's current "
            "weights, and only tide may swap the draft; leave it out or remove the "
            "tide section."
        )
    if config.model_config.enable_sleep_mode:
        yield (
            "--enable-sleep-mode: level 2 discards the draft's weights without "
            "notifying tide; leave it out or remove the tide section."
        )
    if parallel.pipeline_parallel_size > 1:
        yield (
            "--pipeline-parallel-size: tide needs 1 (the draft is on the last stage "
            "only); use tensor parallelism instead."
        )
    if parallel.nnodes_within_dp > 1:
        yield (
            "--nnodes: tide's segments are shared memory of one host; run one server "
            "per host, or remove the tide section."
        )
    if moe_ranks and tide.test_time.memory == "ngram":
        yield (
            "tide.test_time.memory: one rank may skip the draft, but a mixture of "
            "experts with --data-parallel-size above 1 needs equal passes on all "
            "ranks; set it to 'off'."
        )
    if moe_ranks and adaptive:
        yield (
            f"{KNOB}: with a mixture of experts and --data-parallel-size, a rank "
            "without drafts would have to replay graphs that it does not have; set it "
            "to false."
        )
    if v2 and speculative.use_local_argmax_reduction:
        yield (
            "use_local_argmax_reduction: tide needs the draft's logits, which this "
            "option does not gather; set it to false."
        )
    if v2 and sampling != "greedy":
        yield (
            f"draft_sample_method: with {sampling!r} the probability of the drafted "
            "token is not available to tide on Model Runner V2; set it to 'greedy', "
            "or VLLM_USE_V2_MODEL_RUNNER to 0."
        )
    if v2 and parallel.enable_batch_sharded_sampling:
        yield (
            "--enable-batch-sharded-sampling: tide needs the logits of all requests "
            "on one rank; leave it out."
        )
    if v2 and adaptive and not tide.control.verify:
        yield (
            "tide.control.verify: false verifies every drafted token, but "
            "enable_adaptive_verification is on; set both to the same value."
        )
    if not v2 and config.scheduler_config.async_scheduling:
        yield (
            "--async-scheduling: tide needs synchronous scheduling with Model Runner "
            "V1; add --no-async-scheduling, or set VLLM_USE_V2_MODEL_RUNNER to 1."
        )


def _capture_every_length(vllm_config: Any) -> None:
    """Give the offered lengths CUDA graphs.

    vLLM drops such a table before this with data parallelism. But each rank of a dense
    model is a separate engine (`reconfigure_for_independent_dp_rank`), and a mixture
    of experts has a static length here.
    """
    speculative = vllm_config.speculative_config
    if parse_tide(speculative.tide).control.policy == "static":
        return
    speculative.num_speculative_tokens_per_batch_size = table_of(
        speculative.num_speculative_tokens, vllm_config.scheduler_config.max_num_seqs
    )


def _sentences(error: BaseException) -> Iterator[str]:
    """Yield the errors in the speculative configuration, raised by us or by vLLM."""
    if isinstance(error, ConfigError):
        yield from str(error).splitlines()
    elif isinstance(error, ValidationError):
        for one in error.errors(include_url=False, include_input=False):
            message = str(one["msg"]).removeprefix("Value error, ")
            if error.title == "SpeculativeConfig":
                yield ": ".join([*map(str, one["loc"]), message])
            elif "adaptive verification" in message.lower():
                yield f"{KNOB}: {message}"


def _print_one_line_for_config_errors() -> None:
    """Make `vllm serve` exit with one line per wrong knob instead of a traceback."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        lines = list(_sentences(error))
        if not lines:
            before(kind, error, trace)
            return
        for line in lines:
            print(f"error: --speculative-config: {line}", file=sys.stderr)

    sys.excepthook = hook
