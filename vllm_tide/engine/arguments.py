"""Read and check `--speculative-config` before a model is loaded."""

from __future__ import annotations

import argparse
import logging
import os
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
        model = config["model"]
    method, depth = config.get("method"), config.get("num_speculative_tokens")
    config["method"] = check_draft(model, config.get("revision"), target, method, depth)
    config["tide"] = settle(config)
    tide = parse_tide(config["tide"])
    if tide.control.policy != "static" and not config.get(KNOB):
        config["tide"] = settle_adaptive(config["tide"], config.get(KNOB))
    # vLLM does not reuse the last cached block of a prompt, because one entry of the
    # draft's KV there may stem from another next token. That costs a block of prefill
    # for every cached prompt, even without drafts. `observe` leaves serving unchanged.
    if tide.preset != "observe":
        config.setdefault("disable_eagle_block_drop", True)


def check_draft(
    model: str,
    revision: str | None,
    target: Any,
    method: str | None = None,
    depth: int | None = None,
) -> str:
    """Check the configuration and the tensor shapes of a draft against the target.

    Args:
        model: Directory or hub name of the draft.
        method: vLLM's name of the kind; None: the draft's.
        depth: num_speculative_tokens, if known.

    Returns:
        The draft's `method`.

    Raises:
        ConfigError: It does not fit the target, or its files cannot be used.
    """
    folder, draft = _read_draft(model, revision)
    _check_fit(model, draft, target)
    kind = _check_kind(model, draft, method, depth)
    _check_sizes(model, folder, draft, target)
    return kind


def _check_run_dir(tide: TideConfig) -> None:
    """Check that the server can write its run directory; a full one is no error."""
    from vllm_tide.transport.rendezvous import default_run_dir, is_full, require_space
    from vllm_tide.transport.shm import TransportError

    try:
        require_space(Path(tide.run_dir or default_run_dir()))
    except TransportError as error:
        if not is_full(error):
            raise ConfigError(f"tide.run_dir: {error}.") from None


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


def _read_draft(model: str, revision: str | None) -> tuple[Path, dict[str, Any]]:
    """Return a draft's directory and its config.json."""
    from transformers.utils.hub import cached_file

    from vllm_tide.draft.config import DraftError, read_config

    folder = Path(os.path.expanduser(model))
    try:
        if not (folder / "config.json").is_file():
            folder = Path(cached_file(model, "config.json", revision=revision)).parent
        return folder, read_config(folder)
    except DraftError as error:
        raise ConfigError(f"model: {error}") from None
    except (OSError, ValueError):
        raise ConfigError(
            f"model: no draft at {model!r}: neither a directory with config.json nor "
            "a model on the hub or in its local cache."
        ) from None


def _check_fit(model: str, draft: dict[str, Any], target: Any) -> None:
    layer = draft.get("transformer_layer_config")
    text = layer if isinstance(layer, dict) else draft
    hidden, vocab = target.get_hidden_size(), target.get_vocab_size()
    layers = target.get_total_num_hidden_layers()
    width = "target_hidden_size" if "target_hidden_size" in draft else "hidden_size"
    tokens = f"the target's vocabulary has {vocab} tokens"
    pruned = draft.get("draft_vocab_size") or vocab
    for key, value, good, fact in (
        (
            width,
            draft.get("target_hidden_size", text.get("hidden_size")),
            [hidden],
            f"the target's hidden size is {hidden}",
        ),
        ("vocab_size", text.get("vocab_size"), [vocab], tokens),
        ("draft_vocab_size", pruned, range(1, vocab + 1), tokens),
    ):
        if not isinstance(value, int) or value not in good:
            raise ConfigError(
                f"model: draft {model!r} does not fit the target: its {key} is "
                f"{value!r:.40}, but {fact}; use a draft trained for this target."
            )
    ids = draft.get("eagle_aux_hidden_state_layer_ids")
    if ids is None:
        return
    if not (
        isinstance(ids, list)
        and ids
        and all(isinstance(i, int) and 0 <= i <= layers for i in ids)
        and len(set(ids)) == len(ids)
    ):
        raise ConfigError(
            f"model: eagle_aux_hidden_state_layer_ids of {model!r} is {ids!r:.80}, but "
            f"the target has {layers} layers; the ids must be distinct and in "
            f"0..{layers}."
        )


def _check_kind(
    model: str, draft: dict[str, Any], method: str | None, depth: int | None
) -> str:
    """Return vLLM's `method` for a draft; compare it with the configured one."""
    from vllm_tide.draft.kind import method_of

    kind = method_of(draft)
    if method is not None and method != kind:
        raise ConfigError(
            f"method: {method!r}, but the draft {model!r} is of the kind {kind!r}; set "
            f"it to {kind!r}, or leave it out."
        )
    block = draft.get("block_size")
    if type(block) is int and type(depth) is int and 2 <= block <= depth:
        raise ConfigError(
            f"num_speculative_tokens: {depth}, but the draft {model!r} was trained for "
            f"blocks of {block} tokens, of which one is known; set at most {block - 1}."
        )
    return kind


def _check_sizes(model: str, folder: Path, draft: dict[str, Any], target: Any) -> None:
    """Compare the configured sizes with the headers of the tensors on this machine."""
    from vllm_tide.draft.checkpoint import check_shapes, stored_shapes
    from vllm_tide.draft.config import DraftError, UnsupportedDraft
    from vllm_tide.draft.kind import canonical, draft_config, method_of

    layers = {"num_hidden_layers": target.get_total_num_hidden_layers()}
    try:
        config = draft_config(draft, layers)
        check_shapes(config, stored := canonical(stored_shapes(folder)))
        missing = sorted(config.parameter_shapes().keys() - stored)
        if stored and missing:  # without tensors they are in another format
            raise DraftError(f"missing {missing[0]}.")
    except UnsupportedDraft as error:
        if method_of(draft) == METHODS[0]:
            return  # vLLM may support it; the trainer reports why it does not
        raise ConfigError(f"model: draft {model!r} cannot be used: {error}") from None
    except DraftError as error:
        raise ConfigError(
            f"model: draft {model!r} cannot be used: {error} Use another draft, or "
            "repair its files."
        ) from None
    if config.method != METHODS[0]:
        _check_block_draft(model, folder, config, target)
    if max(config.aux_layer_ids) > layers["num_hidden_layers"]:
        raise ConfigError(
            f"model: draft {model!r} reads layer {max(config.aux_layer_ids)}, but the "
            f"target has {layers['num_hidden_layers']}; use a draft trained for it."
        )


def _check_block_draft(model: str, folder: Path, config: Any, target: Any) -> None:
    """Check what vLLM does not check of a draft that drafts blocks."""
    longest = getattr(target, "max_model_len", None)
    if longest is not None and config.max_position_embeddings < longest:
        raise ConfigError(
            f"model: draft {model!r} has {config.max_position_embeddings} positions, "
            f"and --max-model-len is {longest}; lower it, or use another draft."
        )
    if (folder / "mask_embedding.pt").exists():
        raise ConfigError(
            f"model: draft {model!r} has a mask_embedding.pt, which tide cannot train; "
            "use another draft, or remove the tide section."
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
