"""Checks of the configuration and of its models.

Reads only the headers of checkpoints, no weights, and downloads nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from vllm_tide.config import ConfigError, starts_trainer
from vllm_tide.doctor.run import Finding, Subject, check, failed, ok, skipped, warning
from vllm_tide.speculative import METHODS, model_problem

if TYPE_CHECKING:
    from vllm_tide.draft.config import DraftConfig

_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_DTYPES |= {"I64": "int64", "I32": "int32", "BOOL": "bool"}
_ITEM_BYTES = {"float32": 4, "float64": 8}

_KNOBS = "'vllm-tide config reference' lists all knobs, 'config example' prints files."
_OTHER_DRAFT = (
    'Use a draft trained for this target, or \'"model": "fresh"\' for a new one.'
)


def local_checkpoint(name: str, revision: str | None = None) -> Path | None:
    """Return a model's local directory; None if it needs a download."""
    from vllm_tide.engine.facts import local_dir

    try:
        return local_dir(str(Path(name).expanduser()), revision)
    except (ImportError, OSError, ValueError):
        return None


def model_config(directory: Path) -> dict[str, Any]:
    from vllm_tide.draft.config import DraftError, read_config

    try:
        return read_config(directory)
    except DraftError as error:
        raise ConfigError(str(error)) from None


def stored_tensors(directory: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Read dtype ("BF16") and shape of each tensor of a directory."""
    from safetensors import SafetensorError, safe_open

    from vllm_tide.draft.config import DraftError, bin_files, regular_file

    if bins := bin_files(directory):
        return _tensors_of_bin(bins)
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"model: {directory} has no .safetensors file.")
    tensors = {}
    for path in files:
        try:
            with safe_open(regular_file(path), framework="numpy") as archive:
                for name in archive.keys():  # noqa: SIM118 - not a mapping
                    part = archive.get_slice(name)
                    tensors[name] = part.get_dtype(), tuple(part.get_shape())
        except (DraftError, OSError, SafetensorError) as error:
            text = f"{path} is not a complete safetensors file ({error})."
            raise ConfigError(text) from None
    return tensors


def _tensors_of_bin(files: list[Path]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Read what `stored_tensors` returns of a draft that vllm serve will convert."""
    from vllm_tide.draft.checkpoint import read_bin
    from vllm_tide.draft.config import DraftError

    names = {torch_name: name for name, torch_name in _DTYPES.items()}
    tensors = {}
    for path in files:
        try:
            for name, tensor in read_bin(path).items():
                dtype = str(tensor.dtype).removeprefix("torch.")
                tensors[name] = names.get(dtype, "F64"), tuple(tensor.shape)
        except DraftError as error:
            raise ConfigError(f"model: {error}") from None
    return tensors


def hidden_size(subject: Subject) -> int:
    """Return the target's hidden size; 0 if it is unknown."""
    target = subject.model and local_checkpoint(subject.model)
    if not target:
        return 0
    try:
        raw = model_config(target)
    except ConfigError:  # reported by `fit`
        return 0
    size = (raw.get("text_config") or raw).get("hidden_size")
    return size if isinstance(size, int) else 0


def draft_bytes(subject: Subject) -> int | None:
    """Return the bytes of the draft's tensors; None if it is unknown or not local."""
    fresh = subject.draft == "fresh"
    source = subject.model if fresh else subject.draft
    revision = None if fresh else subject.revision
    folder = source and local_checkpoint(source, revision)
    if not folder or (fresh and not subject.usable):
        return None
    try:
        if fresh:
            return _fresh_bytes(subject, model_config(folder))
        tensors = stored_tensors(folder)
    except ConfigError:  # reported by `fit`
        return None
    return sum(
        # "BF16" is two bytes, "F8_E4M3" and "BOOL" are one.
        math.prod(shape) * int((re.findall(r"\d+", dtype) or [8])[0]) // 8
        for name, (dtype, shape) in tensors.items()
        if name != "t2d"  # as in the server: vLLM ignores it
    )


def training_need(subject: Subject) -> int | None:
    """Return the trainer's memory on its device (bytes); None if it is unknown."""
    from vllm_tide.draft.config import DraftError
    from vllm_tide.draft.kind import draft_config
    from vllm_tide.train.gpu import memory_need

    target = subject.model and local_checkpoint(subject.model)
    if not (target and subject.draft and subject.usable):
        return None
    try:
        raw = model_config(target)
        if subject.draft == "fresh":
            config = _fresh_config(subject, raw)
        else:
            draft = local_checkpoint(subject.draft, subject.revision)
            if draft is None:
                return None
            config = draft_config(model_config(draft), raw)
    except (ConfigError, DraftError):  # reported by `fit`
        return None
    return memory_need(config, subject.tide.train, _depth(subject))


def _fresh_bytes(subject: Subject, target: dict[str, Any]) -> int:
    config = _fresh_config(subject, target)
    text = target.get("text_config") or target
    dtype = text.get("dtype") or text.get("torch_dtype") or ""
    parameters = sum(map(math.prod, config.parameter_shapes().values()))
    parameters += config.draft_vocab_size * config.hidden_size
    return parameters * _ITEM_BYTES.get(dtype, 2) + 8 * config.draft_vocab_size


@check("configuration")
def configuration(subject: Subject) -> Iterator[Finding]:
    """Report each mistake in the words of the server."""
    tide = subject.tide
    if subject.error:
        for sentence in subject.error.splitlines():
            about_draft = sentence.startswith("model:")
            yield failed(sentence, _OTHER_DRAFT if about_draft else _KNOBS)
    elif subject.source is None:
        yield skipped("No --config given: checking the defaults.")
    else:
        trainer = "started by the server" if starts_trainer(tide) else "not started"
        trainer = "behind a spool" if tide.spool.url else trainer
        capture = tide.capture
        ring = f"ring {capture.ring_mib} MiB" if capture.enabled else "no capture"
        swaps = "" if tide.swap.enabled else ", no swaps"
        for note in subject.notes:
            yield warning(note, "Remove it, or change the setting that it depends on.")
        yield ok(
            f"Valid: control {tide.control.policy}, {ring}, trainer {trainer}{swaps}."
        )


@check("draft fit", configured=True)
def fit(subject: Subject) -> Finding:
    """Check the configured draft against the target, as server and trainer do."""
    if subject.source is None:
        return skipped("No --config given, so the draft is unknown.")
    if subject.draft is None:
        return skipped("The configuration has no draft.")
    if subject.model is None:
        return skipped("No --model given, so the target is unknown.")
    elsewhere = "is not on this machine; vllm serve downloads and checks it."
    target = local_checkpoint(subject.model)
    if target is None and subject.model[0] in "./~":
        text = f"There is no model at {subject.model!r}."
        return failed(text, "Correct --model: a directory with config.json.")
    if target is None:
        return skipped(f"The target {subject.model!r} {elsewhere}")
    try:
        raw = model_config(target)
        shape = _target_shape(raw)
    except ConfigError as error:
        return skipped(f"{error} vllm serve compares them.")
    if subject.draft == "fresh":
        try:
            _fresh_config(subject, raw)
        except ConfigError as error:
            text = f"No fresh draft can be built: {error}"
            return failed(text, "Set 'model' to a draft.")
        return ok("The server builds a fresh draft for this target.")
    draft = local_checkpoint(subject.draft, subject.revision)
    if draft is None and model_problem(subject.draft):
        return skipped(f"There is no draft at {subject.draft!r}.")
    if draft is None:
        return skipped(f"The draft {subject.draft!r} {elsewhere}")
    return _fit_of_checkpoint(subject, draft, shape, target)


def _depth(subject: Subject) -> int:
    depth = subject.speculative.get("num_speculative_tokens")
    return depth if type(depth) is int and depth > 0 else 1


def _fresh_config(subject: Subject, target: dict[str, Any]) -> DraftConfig:
    from vllm_tide.draft.config import DraftError
    from vllm_tide.draft.fresh import fresh_config, with_vocab_size

    tide, text = subject.tide, target.get("text_config") or target
    try:
        size, device = text.get("vocab_size", 0), tide.train.device
        settings = with_vocab_size(tide.fresh, size, device)
        method = str(subject.speculative.get("method") or METHODS[0])
        return fresh_config(target, settings, method, _depth(subject))
    except DraftError as error:
        raise ConfigError(str(error)) from None


def _target_shape(raw: dict[str, Any]) -> SimpleNamespace:
    """Return the part of vLLM's `ModelConfig` that the server's check reads."""
    text = raw.get("text_config")
    text = text if isinstance(text, dict) else raw
    names = ("hidden_size", "vocab_size", "num_hidden_layers")
    for name in names:
        if not isinstance(text.get(name), int) or text[name] <= 0:
            raise ConfigError(f"The target's config.json has no {name}.")
    hidden, vocab, layers = (text[name] for name in names)
    return SimpleNamespace(
        get_hidden_size=lambda: hidden,
        get_vocab_size=lambda: vocab,
        get_total_num_hidden_layers=lambda: layers,
        enforce_eager=False,
    )


def _fit_of_checkpoint(
    subject: Subject, draft: Path, shape: SimpleNamespace, target: Path
) -> Finding:
    import torch

    from vllm_tide.draft.checkpoint import check_tensors
    from vllm_tide.draft.config import DraftError
    from vllm_tide.draft.kind import canonical, draft_config
    from vllm_tide.engine.draft_arguments import check_draft

    try:
        stored = stored_tensors(draft)
        method = subject.speculative.get("method")
        known = method if method in METHODS else None
        check_draft(str(draft), None, shape, known, _depth(subject))
    except ConfigError as error:
        about_draft = str(error).startswith("model:")
        return failed(str(error), _OTHER_DRAFT if about_draft else _KNOBS)
    try:
        config = draft_config(model_config(draft), model_config(target))
        # Meta tensors: only dtypes and shapes are checked.
        tensors = {
            name: torch.empty(
                shape, dtype=getattr(torch, _DTYPES.get(dtype, "uint8")), device="meta"
            )
            for name, (dtype, shape) in stored.items()
        }
        check_tensors(config, canonical(tensors))
    except (ConfigError, DraftError) as error:
        return failed(f"The trainer cannot load the draft: {error}", _OTHER_DRAFT)
    return ok(
        f"{draft.name} fits {target.name}: hidden {config.target_hidden_size}, layers "
        f"{list(config.aux_layer_ids)}, {config.draft_vocab_size} of "
        f"{config.vocab_size} tokens."
    )
