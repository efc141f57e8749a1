"""Reads `--speculative-config` and refuses what cannot work, before a model loads."""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from vllm_tide.config import (
    ConfigError,
    TideConfig,
    parse_tide,
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
    MODEL_MISSING,
    merged,
    mistakes,
    read_json_object,
    settle,
    without_control,
)

logger = logging.getLogger("vllm.tide")

# What of vLLM's whole configuration is refused where it is on, or more than 1.
_UNUSABLE = {
    "lora_config": "--enable-lora: tide cannot tell adapters' hidden states apart; "
    "switch LoRA off or remove the tide section.",
    "kv_transfer_config": "--kv-transfer-config: tide captures nothing of a prompt "
    "whose KV comes from elsewhere, and has not been tried beside a KV connector; "
    "leave one of them out.",
    "weight_transfer_config": "--weight-transfer-config: what tide has learnt is of "
    "the target's old weights, and only tide may swap the draft; leave it out or "
    "remove the tide section.",
    "model_config.enable_sleep_mode": "--enable-sleep-mode: level 2 loses the draft's "
    "weights, which tide would go on to count as served; leave it out or remove the "
    "tide section.",
}
_NEEDS_ONE = {
    "pipeline_parallel_size": "--pipeline-parallel-size: tide needs 1 (the draft lives "
    "on the last stage only); use tensor parallelism instead.",
    "nnodes_within_dp": "--nnodes: tide's segments are shared memory of one host; give "
    "each host its own server, or remove the tide section.",
}


def use_fresh_head(config: dict[str, Any], tide: TideConfig, target: Any) -> None:
    """Build a draft for the target (or take it from the cache) and configure it.

    An untrained draft drafts badly: under the policy `adaspec`, which is the default,
    nothing is drafted until it pays.

    Args:
        config: The dictionary that `SpeculativeConfig` will be made from; gets `model`
            and `method`.

    Raises:
        ConfigError: No draft can be built for this target.
    """
    from vllm_tide.draft.config import DraftError
    from vllm_tide.draft.fresh import fresh_directory, sized
    from vllm_tide.engine.facts import weights_dir

    try:
        where = weights_dir(target.model, target.revision)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model: a fresh draft needs the target's weights and {target.model!r} is "
            f"not to be had ({type(error).__name__}); fetch it first."
        ) from None
    try:
        settings = sized(tide.fresh, target.get_vocab_size(), tide.train.device)
        folder = fresh_directory(where, settings, target.dtype)
    except DraftError as error:
        raise ConfigError(
            f"model: no fresh draft can be built for {target.model!r}: {error}"
        ) from None
    config["model"] = str(folder)
    config["method"] = "eagle3"
    logger.info(
        "tide: serving a fresh draft from %s under policy %r",
        folder,
        tide.control.policy,
    )


def speculative_config_argument(value: str) -> dict[str, Any]:
    """Type of the command line's `--speculative-config`: inline JSON or a file.

    Raises:
        argparse.ArgumentTypeError: One sentence; argparse prints it and exits 2.
    """
    inline, line = value.lstrip().startswith("{"), tuple(sys.argv)
    try:
        config = read_json_object(value)
        if inline and any(map(_DOTTED, line)):
            config = merged(_earlier.get(line, {}), config)
        if config.get("tide") is not None:
            _refuse(mistakes(config))
            if url := config["tide"].get("spool", {}).get("url"):
                config["tide"]["spool"]["url"] = _PrivateUrl(url)
            _print_one_line_for_config_errors()
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if not inline or "tide" in config:
        _earlier[line] = config
    return config


class _PrivateUrl(str):
    """A URL of which only the public part is printed: vLLM logs its arguments."""

    __slots__ = ()

    def __repr__(self) -> str:
        return repr(without_credentials(self))


# vLLM hands dotted keys over as inline JSON, behind the file that they change.
_DOTTED = re.compile(r"--?s(c|peculative[-_]config)\.").match
_earlier: dict[tuple[str, ...], dict[str, Any]] = {}  # by command line


def _refuse(said: list[str]) -> None:
    if said:
        raise ConfigError("\n".join(said))


def check_speculative_config(config: dict[str, Any], target: Any) -> None:
    """Check a speculative configuration with a `tide` section against the target.

    With `"model": "fresh"` a draft is built first and written into `config`; so is what
    was settled in the `tide` section, for every process that reads it later.

    Args:
        config: The dictionary that `SpeculativeConfig` will be made from; changed.

    Raises:
        ConfigError: A line for each mistake, a sentence naming the knob.
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
        use_fresh_head(config, tide, target)
        model = config["model"]
    folder = _draft_folder(model, config.get("revision"))
    draft = _draft_config(folder)
    _check_fit(model, draft, target)
    _check_sizes(model, folder, draft, target)
    config["tide"] = settle(config)
    tide = parse_tide(config["tide"])
    control = tide.control
    if config.get(KNOB):
        if control.slo_tpot_ms and control.policy in ("static", "threshold"):
            raise ConfigError(
                f"tide.control.slo_tpot_ms: {control.policy!r} predicts no times, so "
                f"{KNOB} cannot keep a limit; set tide.control.policy to 'adaspec', or "
                "leave the limit out."
            )
    elif control.policy != "static":
        config["tide"] = settle_adaptive(config["tide"], config.get(KNOB))
    # vLLM leaves the last cached block of a prompt out, lest one entry of the draft's
    # KV be of another next token. That costs a block of prefill for every cached
    # prompt, also while nothing is drafted. `observe` changes nothing that is served.
    if tide.preset != "observe":
        config.setdefault("disable_eagle_block_drop", True)


def _check_run_dir(tide: TideConfig) -> None:
    """See that the server can write its run directory; a full one ends no start."""
    from vllm_tide.transport.rendezvous import default_run_dir, is_full, require_room
    from vllm_tide.transport.shm import TransportError

    try:
        require_room(Path(tide.run_dir or default_run_dir()))
    except TransportError as error:
        if not is_full(error):
            raise ConfigError(f"tide.run_dir: {error}.") from None


def check_device(device: str, *, v2: bool) -> None:
    """Check that tide runs on a device.

    Args:
        device: As vLLM's `DeviceConfig` names it: ROCm is "cuda" there.
        v2: True on Model Runner V2.

    Raises:
        ConfigError: One sentence naming the device.
    """
    if device not in ("cpu", "cuda"):
        raise ConfigError(
            f"tide: device {device!r} is not supported in this version, only 'cpu' and "
            "'cuda' (ROCm too); remove the tide section to serve without it."
        )
    if device != "cpu" and not v2:
        raise ConfigError(
            f"tide: on {device!r} it needs Model Runner V2; set "
            "VLLM_USE_V2_MODEL_RUNNER to 1, or remove the tide section."
        )


def check_engine_config(vllm_config: Any) -> None:
    """Check what only the whole configuration shows, and settle what follows from it.

    Raises:
        ConfigError: One sentence naming the option.
    """
    device = vllm_config.device_config.device_type
    check_device(device, v2=vllm_config.use_v2_model_runner)
    parallel = vllm_config.parallel_config
    for path, sentence in _UNUSABLE.items():
        if attrgetter(path)(vllm_config):
            raise ConfigError(sentence)
    for name, sentence in _NEEDS_ONE.items():
        if getattr(parallel, name) > 1:
            raise ConfigError(sentence)
    if parallel.data_parallel_size > 1 and vllm_config.model_config.is_moe:
        _check_moe_ranks(vllm_config.speculative_config)
    if vllm_config.use_v2_model_runner:
        _check_v2(vllm_config)
        if device != "cpu":
            switch_adaptive_on(vllm_config, logger)
            _capture_every_length(vllm_config)
    elif vllm_config.scheduler_config.async_scheduling:
        raise ConfigError(
            "--async-scheduling: tide needs synchronous scheduling with Model Runner "
            "V1; add --no-async-scheduling, or set VLLM_USE_V2_MODEL_RUNNER to 1."
        )


def _check_moe_ranks(speculative: Any) -> None:
    tide = parse_tide(speculative.tide)
    if tide.test_time.memory != "off":
        raise ConfigError(
            "tide.test_time.memory: it may leave the draft out on one rank, which a "
            "mixture of experts with --data-parallel-size above 1 cannot follow; set "
            "it to 'off'."
        )
    if speculative.enable_adaptive_verification:
        raise ConfigError(
            f"{KNOB}: a rank without drafts follows the others into graphs that it "
            "cannot replay; set it to false with a mixture of experts and "
            "--data-parallel-size."
        )
    if tide.control.policy != "static":
        error = ConfigError(
            "--data-parallel-size: tide.control may choose another length on each "
            "rank, which a mixture of experts cannot follow; set tide.control.policy "
            "to 'static'."
        )
        speculative.tide = without_control(speculative.tide, error)


def _check_v2(vllm_config: Any) -> None:
    """What Model Runner V2 can do that tide cannot do with it yet."""
    speculative = vllm_config.speculative_config
    if speculative.use_local_argmax_reduction:
        raise ConfigError(
            "use_local_argmax_reduction: tide reads the draft's logits, which it "
            "leaves out; set it to false."
        )
    if speculative.draft_sample_method != "greedy":
        raise ConfigError(
            f"draft_sample_method: with {speculative.draft_sample_method!r} tide does "
            "not see the probability of the drafted token on Model Runner V2; set it "
            "to 'greedy', or VLLM_USE_V2_MODEL_RUNNER to 0."
        )
    if vllm_config.parallel_config.enable_batch_sharded_sampling:
        raise ConfigError(
            "--enable-batch-sharded-sampling: tide needs the logits of all requests on "
            "one rank; leave it out."
        )
    control = parse_tide(speculative.tide).control
    if speculative.enable_adaptive_verification and not control.verify:
        raise ConfigError(
            "tide.control.verify: false keeps every drafted token, which "
            "enable_adaptive_verification cuts; set both to the same."
        )


def _capture_every_length(vllm_config: Any) -> None:
    speculative = vllm_config.speculative_config
    if parse_tide(speculative.tide).control.policy == "static":
        return
    if vllm_config.parallel_config.data_parallel_size > 1:
        return  # vLLM has no such table there; other lengths than K run without graphs
    speculative.num_speculative_tokens_per_batch_size = table_of(
        speculative.num_speculative_tokens, vllm_config.scheduler_config.max_num_seqs
    )


def _draft_folder(model: str, revision: str | None) -> Path:
    folder = Path(os.path.expanduser(model))
    if not (folder / "config.json").is_file():
        folder = _hub_file(model, revision).parent
    return folder


def _draft_config(folder: Path) -> dict[str, Any]:
    from vllm_tide.draft.config import DraftError, read_config

    try:
        return read_config(folder)
    except DraftError as error:
        raise ConfigError(f"model: {error}") from None


def _hub_file(model: str, revision: str | None) -> Path:
    from transformers.utils.hub import cached_file

    try:
        return Path(cached_file(model, "config.json", revision=revision))
    except (OSError, ValueError):
        raise ConfigError(
            f"model: no draft at {model!r}: neither a directory with config.json nor "
            "a model that the hub or its local cache has."
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
            f"the target has {layers} layers; the ids must lie in 0..{layers} and "
            "differ from each other."
        )


def _check_sizes(model: str, folder: Path, draft: dict[str, Any], target: Any) -> None:
    """Compare sizes with the tensors' headers, where they are on this machine."""
    from vllm_tide.draft.checkpoint import canonical_name, check_shapes, stored_shapes
    from vllm_tide.draft.config import DraftError, Eagle3Config, UnsupportedDraft

    layers = {"num_hidden_layers": target.get_total_num_hidden_layers()}
    try:
        config = Eagle3Config.from_json(draft, layers)
        stored = stored_shapes(folder)
        check_shapes(config, {canonical_name(n): stored[n] for n in stored})
    except UnsupportedDraft:
        return  # vLLM may know it; a trainer says why it does not
    except DraftError as error:
        raise ConfigError(
            f"model: draft {model!r} cannot be used: {error} Use another, or mend its "
            "files."
        ) from None


def _sentences(error: BaseException) -> Iterator[str]:
    """Yield what is wrong with the speculative configuration, by us or by vLLM."""
    if isinstance(error, ConfigError):
        yield from str(error).splitlines()
    elif isinstance(error, ValidationError):
        for one in error.errors(include_url=False, include_input=False):
            said = str(one["msg"]).removeprefix("Value error, ")
            if error.title == "SpeculativeConfig":
                yield ": ".join([*map(str, one["loc"]), said])
            elif "adaptive verification" in said.lower():
                yield f"{KNOB}: {said}"


def _print_one_line_for_config_errors() -> None:
    """A wrong knob ends `vllm serve` with a sentence, not with a traceback."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        lines = list(_sentences(error))
        if not lines:
            before(kind, error, trace)
            return
        for line in lines:
            print(f"error: --speculative-config: {line}", file=sys.stderr)

    sys.excepthook = hook
