"""Reading and checking of a whole `--speculative-config`.

vLLM checks its keys when it creates its configuration. This module checks only keys
that concern the `tide` section.
"""

from __future__ import annotations

import difflib
import json
import logging
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vllm_tide.config import (
    ConfigError,
    TideConfig,
    parse_tide,
    shown,
    without_credentials,
)

logger = logging.getLogger("vllm.tide")

FRESH = "fresh"
METHODS = ("eagle3", "dflash")
"""Kinds of drafts, by vLLM's `method` (`vllm_tide.draft.kind`)."""
_MODEL = (
    f"give the directory or hub name of the draft, or {FRESH!r} to start with a new "
    "one."
)
MODEL_MISSING = f"missing; {_MODEL}"
_LENGTH = "set the largest draft length, like 3."
_LEAVE_OUT = "leave it out or remove the tide section."
_NOT_REJECTION = {
    "synthetic": "'synthetic' does not compare drafts with the target",
    # Since vLLM 0.33.0.
    "fly": "'fly' accepts tokens that the target rejects, so drafts change the output",
}
_NO_STOP = (
    "tide.control may stop the draft between two passes and needs it false; or set "
    "tide.control.policy to 'static'."
)
# Options of vLLM that fix the drafted tokens, and why control excludes them.
_FIXED_DRAFTING = {
    "num_speculative_tokens_per_batch_size": "tide.control chooses the length itself; "
    "remove it, or set tide.control.policy to 'static'.",
    "disable_padded_drafter_batch": _NO_STOP,
    "parallel_drafting": _NO_STOP,
}
_NO_MEMORY = (
    "tide.test_time.memory changes the drafts of single requests and needs it false "
    "or absent; remove it, or set tide.test_time.memory to 'off'."
)
_NO_PROBABILITY = (
    "tide.test_time.memory: its tokens have no draft probability, which "
    "draft_sample_method {!r} needs; set that to 'greedy', or the memory to 'off'."
)
# Comments, and trailing commas; strings match too, so their contents are skipped.
_COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/', re.DOTALL)
_LAST_COMMA = re.compile(r'"(?:\\.|[^"\\\n])*"|,(?=\s*[}\]])')


def is_inline(text_or_path: str) -> bool:
    """Return whether `--speculative-config` is JSON, not a path."""
    return text_or_path.lstrip().startswith("{")


def read_json_object(text_or_path: str) -> dict[str, Any]:
    """Read inline JSON, a JSON file, or a YAML file (vLLM's `--config` too).

    Raises:
        ConfigError: It cannot be read, is not an object, or has a duplicate key.
    """
    text, where = text_or_path, "the inline JSON"
    inline, is_yaml = is_inline(text), False
    if not inline:
        path = Path(os.path.expanduser(text.removeprefix("@")))
        where, is_yaml = repr(str(path)), path.suffix in (".yaml", ".yml")
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or "is not UTF-8 text"
            raise ConfigError(
                f"{where} cannot be read ({reason}); give the path of a readable JSON "
                "or YAML file, or inline JSON starting with '{'."
            ) from None
    if not text.strip():
        raise ConfigError(f"{where} is empty; give a JSON object.")
    try:
        if is_yaml:
            value = _yaml(text)
        else:
            text = _without_comments(text)
            value = json.loads(text)
            # vLLM uses the last of duplicate keys; that is an error only with `tide`.
            if not inline or "tide" in value:
                json.loads(text, object_pairs_hook=_each_once)
    except ConfigError:
        raise
    except (ValueError, RecursionError) as error:
        kind, message = "YAML" if is_yaml else "JSON", " ".join(str(error).split())
        raise ConfigError(f"{where} is not valid {kind}: {message}.") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{where} must contain a JSON object, not {shown(value)}.")
    # In a file for vLLM's `--config` it is one of many options.
    nested = value.get("speculative-config", value.get("speculative_config", value))
    return nested if isinstance(nested, dict) else read_json_object(str(nested))


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    counts = Counter(key for key, _ in pairs)
    if twice := [key for key, count in counts.items() if count > 1]:
        raise ConfigError("\n".join(f"{key}: given twice; leave one." for key in twice))
    return dict(pairs)


def _without_comments(text: str) -> str:
    for pattern in (_COMMENT, _LAST_COMMA):  # blanks preserve lines and columns
        text = pattern.sub(
            lambda m: m[0] if m[0][0] == '"' else re.sub(r"[^\n]", " ", m[0]), text
        )
    return text


def _yaml(text: str) -> Any:
    import yaml

    def construct(loader: Any, node: Any) -> dict[str, Any]:
        pairs = loader.construct_pairs(node, deep=True)
        for (key, _), (written, _) in zip(pairs, node.value, strict=True):
            if not isinstance(key, str):
                raise ValueError(
                    f"the key {key!r} in line {written.start_mark.line + 1} is not a "
                    "string; put it in quotes"
                )
        return _each_once(pairs)

    checking: Any = type("Loader", (yaml.SafeLoader,), {})
    checking.add_constructor("tag:yaml.org,2002:map", construct)
    try:
        checking(text).get_single_data()
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` updated with `changes`, recursively by section."""
    out = dict(base)
    for key, value in changes.items():
        both = isinstance(value, Mapping) and isinstance(out.get(key), Mapping)
        out[key] = merged(out[key], value) if both else value
    return out


def mistakes(config: Mapping[str, Any], *, whole: bool = False) -> list[str]:
    """Return the errors in a configuration with a `tide` section, a sentence each.

    Args:
        whole: Whether it is complete, so missing keys are errors.
    """
    config = {key.replace("-", "_"): value for key, value in config.items()}
    errors = list(_ours(config, whole=whole))
    try:
        parse_tide(config.get("tide"))
        if whole:
            settle(config)
    except ConfigError as error:
        errors += str(error).splitlines()
    return errors


def _ours(config: Mapping[str, Any], *, whole: bool) -> Iterator[str]:
    method, model = config.get("method", METHODS[0]), config.get("model")
    for name in sorted(config.keys() & TideConfig.model_fields.keys()):
        yield f"{name}: is a knob of the tide section; move it into it."
    if method not in METHODS:
        yield (
            "method: tide trains EAGLE-3 and DFlash drafts; set it to "
            f"{' or '.join(map(repr, METHODS))}, not {method!r}."
        )
    if reason := _NOT_REJECTION.get(str(config.get("rejection_sample_method")), ""):
        yield f"rejection_sample_method: {reason}; {_LEAVE_OUT}"
    if config.get("draft_lm_head_quantization"):
        yield (
            "draft_lm_head_quantization: tide cannot swap a draft with a quantized "
            f"copy of the target's lm_head; {_LEAVE_OUT}"
        )
    tokens = config.get("num_speculative_tokens")
    if tokens is None:
        if whole:
            name = "num_speculative_tokens"
            near = difflib.get_close_matches(name, config.keys() - {name}, 1, 0.8)
            typo = f" (or misspelt: {near[0]!r})" if near else ""
            yield f"{name}: missing{typo}; {_LENGTH}"
    elif isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
        yield (
            "num_speculative_tokens: must be an integer of at least 1, got "
            f"{shown(tokens)}; {_LENGTH}"
        )
    if model not in (None, "") and not isinstance(model, str):
        yield f"model: must be a string, got {shown(model)}; {_MODEL}"
    elif whole and not model:
        yield f"model: {MODEL_MISSING}"
    elif (whole or str(model).lower() == FRESH) and (
        problem := model_problem(str(model))
    ):
        yield f"model: {problem}"


def settle(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `tide` section; without control if vLLM's keys exclude it by default.

    Raises:
        ConfigError: vLLM's keys exclude the memory, or a requested policy: one line per
            key.
    """
    section: dict[str, Any] = config["tide"]
    tide = parse_tide(section)
    errors, excluded = [], []
    if tide.test_time.memory == "ngram":
        method = config.get("draft_sample_method") or "greedy"
        if method != "greedy":
            errors.append(_NO_PROBABILITY.format(method))
        errors += [f"{k}: {_NO_MEMORY}" for k in _FIXED_DRAFTING if config.get(k)]
    control = tide.control
    if (
        config.get("enable_adaptive_verification")
        and control.slo_tpot_ms
        and control.policy in ("static", "threshold")
    ):
        errors.append(
            f"tide.control.slo_tpot_ms: {control.policy!r} predicts no step times, so "
            "enable_adaptive_verification cannot enforce a limit; set "
            "tide.control.policy to 'adaspec', or remove the limit."
        )
    if control.policy != "static":
        excluded = [f"{k}: {t}" for k, t in _FIXED_DRAFTING.items() if config.get(k)]
        requested = "policy" in section.get("control", {})
        errors += excluded if requested else ()
    if errors:
        raise ConfigError("\n".join(errors))
    return without_control(section, ConfigError(excluded[0])) if excluded else section


def without_control(section: dict[str, Any], error: ConfigError) -> dict[str, Any]:
    """Return the section with a static length.

    Raises:
        ConfigError: The section requests a policy; raises `error`.
    """
    control = section.get("control", {})
    if "policy" in control:
        raise error
    logger.warning("vllm_tide: the speculative length is static: %s", error)
    return {**section, "control": {**control, "policy": "static"}}


def model_problem(name: str) -> str:
    """Return the error in a draft's name; empty for a local model or hub name."""
    path = Path(os.path.expanduser(name))
    try:
        if path.is_dir():
            (path / "config.json").read_bytes()
            return ""
    except PermissionError as error:
        return f"{name!r} cannot be read ({error.strerror})."
    except OSError:
        pass
    else:
        if name.lower() == FRESH:
            return "" if name == FRESH else f"{name!r}; did you mean {FRESH!r}?"
        if re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
            return ""
    return (
        f"no draft at {name!r}: neither a directory with config.json nor the name of a "
        "model on the hub."
    )


_MOST_TOKENS = 32
_ELSEWHERE = {"autostart", "state_dir"}  # of tide.train; a server uses them too


def notes(
    tide: TideConfig, tokens: int | None = None, model: object = None
) -> Iterator[str]:
    """Yield a sentence for each knob without effect, and for each unusual value.

    Args:
        tokens: num_speculative_tokens.
        model: The draft, if known.
    """
    for section, knobs, why in _without_effect(tide, model):
        values = getattr(tide, section)
        for knob in knobs or set(type(values).model_fields) - _ELSEWHERE:
            if getattr(values, knob) != type(values).model_fields[knob].default:
                yield f"tide.{section}.{knob}: has no effect: {why}."
    if tide.capture.enabled and not tide.capture.sample_rate:
        yield "tide.capture.sample_rate: 0 captures no request, so nothing is trained."
    if tide.preset == "observe" and tide.test_time.memory == "ngram":
        yield (
            "tide.test_time.memory: drafts from the requests' own text although "
            "tide.preset is 'observe'."
        )
    if tide.train.metrics_port == 8000:
        yield (
            "tide.train.metrics_port: 8000 is also the port of vllm serve, unless "
            "--port is given; choose another."
        )
    if (url := tide.spool.url) and url != without_credentials(url):
        yield (
            "tide.spool.url: contains credentials or a query in plain text; put them "
            "in fsspec's configuration."
        )
    if isinstance(tokens, int) and tokens > _MOST_TOKENS:
        yield (
            f"num_speculative_tokens: {tokens} is more than a draft can use; each "
            "token costs a draft pass and a row of the KV cache. 3 to 8 are usual."
        )


def why_no_capture(tide: TideConfig) -> str:
    """Return the knob that excludes all requests and its value, or ""."""
    capture = tide.capture
    if not capture.enabled:
        by_preset = tide.preset == "control"
        return "tide." + (
            "preset is 'control'" if by_preset else "capture.enabled is false"
        )
    if capture.consent == "off":
        return "tide.capture.consent is 'off'"
    return "" if capture.sample_rate else "tide.capture.sample_rate is 0"


def _without_effect(
    tide: TideConfig, model: object
) -> Iterator[tuple[str, tuple[str, ...], str]]:
    """Yield sections, knobs (none: all of them), and why they have no effect."""
    capture, policy = tide.capture, tide.control.policy
    off = why_no_capture(tide)
    if not capture.enabled:
        names = sorted(set(type(capture).model_fields) - {"enabled"})
        yield "capture", tuple(names), off
    if off:
        why = f"no request is captured, as {off}"
    else:
        why = "" if tide.swap.enabled else "tide.swap.enabled is false"
    if why:
        for section in ("train", "schedule", "deploy"):
            yield section, (), why
    if policy in ("static", "threshold"):
        knobs = ("slo_tpot_ms", "client_slo_tpot_ms", "min_gain", "probe_share")
        yield "control", knobs, f"tide.control.policy is {policy!r}"
    if tide.test_time.adapt == "off":
        yield "test_time", ("stride", "min_tokens"), "tide.test_time.adapt is 'off'"
    if capture.teacher == "hidden":
        yield "capture", ("teacher_topk",), "tide.capture.teacher is 'hidden'"
    if not tide.deploy.canary:
        yield "deploy", ("canary_requests",), "tide.deploy.canary is false"
    if not tide.train.metrics_port:
        yield "train", ("metrics_host",), "tide.train.metrics_port is 0"
    if tide.spool.url is None:
        yield "spool", ("max_gib", "max_age_s"), "tide.spool.url is null"
    if model not in (None, FRESH):
        yield "fresh", ("draft_vocab_size",), f"model is not {FRESH!r}"
