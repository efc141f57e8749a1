"""Reads what `--speculative-config` is given, and judges it as a whole.

vLLM's own keys are judged by what its source declares, without importing it.
"""

from __future__ import annotations

import ast
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from vllm_tide.config import ConfigError, explained, parse_tide
from vllm_tide.patching import PatchError, find_target, read_file

logger = logging.getLogger("vllm.tide")

FRESH = "fresh"
MODEL_MISSING = (
    f"missing; give the directory or hub name of the EAGLE-3 draft, or {FRESH!r} to "
    "begin with a new one."
)
_LEAVE_OUT = "leave it out or remove the tide section."
_NOT_REJECTION = {
    "synthetic": "'synthetic' makes up acceptance, so there is nothing to learn from",
    # From vLLM 0.33.0 on, like the next.
    "fly": "'fly' accepts what the target rejects, so answers depend on the draft",
}
_HEAD = "tide cannot swap a draft whose head is a quantized copy of the target's"
# Comments, and a comma behind the last entry; strings too, so that none is in one.
_COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/', re.DOTALL)
_LAST_COMMA = re.compile(r'"(?:\\.|[^"\\\n])*"|,(?=\s*[}\]])')


def read_json_object(text_or_path: str) -> dict[str, Any]:
    """Read inline JSON, a JSON file, or a YAML file (vLLM's `--config` too).

    Raises:
        ConfigError: It cannot be read, is no object, or has a key twice.
    """
    text, where = text_or_path, "the inline JSON"
    inline, is_yaml = text.lstrip().startswith("{"), False
    if not inline:
        path = Path(os.path.expanduser(text.removeprefix("@")))
        where, is_yaml = repr(str(path)), path.suffix in (".yaml", ".yml")
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or "is not UTF-8 text"
            raise ConfigError(
                f"{where} cannot be read ({why}); give the path of a readable JSON or "
                "YAML file, or inline JSON starting with '{'."
            ) from None
    try:
        pairs, value = _yaml(text) if is_yaml else _json(text)
    except (ValueError, RecursionError) as error:
        kind, said = "YAML" if is_yaml else "JSON", " ".join(str(error).split())
        raise ConfigError(f"{where} is not valid {kind}: {said}.") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{where} must hold a JSON object, not {value!r}.")
    # Inline text without us is vLLM's own: it takes the last one.
    if (not inline or "tide" in value) and (twice := list(_twice(pairs))):
        raise ConfigError("\n".join(f"{key}: given twice; leave one." for key in twice))
    # In a file of vLLM's `--config` it is one option of many.
    nested = value.get("speculative-config", value.get("speculative_config", value))
    return nested if isinstance(nested, dict) else read_json_object(str(nested))


class _Pairs(list[tuple[Any, Any]]):
    """An object as it is written."""


def _json(text: str) -> tuple[Any, Any]:
    for pattern in (_COMMENT, _LAST_COMMA):  # blanks keep lines and columns
        text = pattern.sub(
            lambda m: m[0] if m[0][0] == '"' else re.sub(r"[^\n]", " ", m[0]), text
        )
    return json.loads(text, object_pairs_hook=_Pairs), json.loads(text)


def _yaml(text: str) -> tuple[Any, Any]:
    import yaml

    def pairs(made: Any, node: Any) -> _Pairs:
        found = _Pairs(made.construct_pairs(node, deep=True))
        for (key, _), (written, _) in zip(found, node.value, strict=True):
            if not isinstance(key, str):
                raise ValueError(
                    f"the key {key!r} in line {written.start_mark.line + 1} is no text;"
                    " put it in quotes"
                )
        return found

    loader: Any = type("Loader", (yaml.SafeLoader,), {})
    loader.add_constructor("tag:yaml.org,2002:map", pairs)
    try:
        return loader(text).get_single_data(), yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


def _twice(value: Any, path: str = "") -> Iterator[str]:
    known = set()
    for name, entry in value if isinstance(value, _Pairs) else ():
        if name in known:
            yield f"{path}{name}"
        known.add(name)
        yield from _twice(entry, f"{path}{name}.")


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with the values of `changes` put in, section by section."""
    out = dict(base)
    for key, value in changes.items():
        both = isinstance(value, Mapping) and isinstance(out.get(key), Mapping)
        out[key] = merged(out[key], value) if both else value
    return out


def mistakes(config: Mapping[str, Any], *, whole: bool = False) -> list[str]:
    """All that is wrong with a configuration with a `tide` section, a sentence each.

    Args:
        config: As it was read.
        whole: Nothing is added to it, so what is missing is wrong.
    """
    config = {key.replace("-", "_"): value for key, value in config.items()}
    found = {k: f"{k}: {said}" for k, said in _ours(config, whole=whole)}
    if options := vllm_options():
        try:
            rest = config.keys() - {*found, "tide"}
            options.model_validate({key: config[key] for key in rest})
        except ValidationError as error:
            found |= dict(explained(error, options))
    try:
        parse_tide(config.get("tide"))
        if whole:
            settle(config)
    except ConfigError as error:
        found["tide"] = str(error)
    return "\n".join(found.values()).splitlines()


def _ours(config: Mapping[str, Any], *, whole: bool) -> Iterator[tuple[str, str]]:
    method, model = config.get("method", "eagle3"), config.get("model")
    if method != "eagle3":
        why = f"tide trains EAGLE-3 drafts; set it to 'eagle3', not {method!r}."
        yield ("method", why)
    if why := _NOT_REJECTION.get(str(config.get("rejection_sample_method")), ""):
        yield "rejection_sample_method", f"{why}; {_LEAVE_OUT}"
    if config.get("draft_lm_head_quantization"):
        yield "draft_lm_head_quantization", f"{_HEAD}; {_LEAVE_OUT}"
    if whole and config.get("num_speculative_tokens") is None:
        yield "num_speculative_tokens", "missing; give the most tokens drafted, like 3."
    if whole and not (isinstance(model, str) and model):
        yield "model", MODEL_MISSING
    elif whole and not may_be_model(str(model)):
        yield "model", f"no draft at {model!r}: {NO_MODEL}"


def settle(config: Mapping[str, Any]) -> dict[str, Any]:
    """The section, without control where vLLM's keys leave none and none was asked.

    Raises:
        ConfigError: Keys of vLLM's, or a missing file, are against control or memory: a
            line for each.
    """
    section: dict[str, Any] = config["tide"]
    tide = parse_tide(section)
    found = [] if tide.test_time.memory == "off" else list(_against_memory(config))
    barred: list[str] = []
    if tide.control.policy != "static":
        barred = list(_against_control(config))
        asked = "policy" in section.get("control", {})
        found += barred if asked else ()
        if (asked or not barred) and (path := tide.control.profile) is not None:
            found += _no_profile(path)
    if found:
        raise ConfigError("\n".join(found))
    return without_control(section, ConfigError(barred[0])) if barred else section


def _against_control(config: Mapping[str, Any]) -> Iterator[str]:
    if config.get("num_speculative_tokens_per_batch_size"):
        yield (
            "num_speculative_tokens_per_batch_size: tide.control chooses the length "
            "itself; remove it, or set tide.control.policy to 'static'."
        )
    for knob in ("disable_padded_drafter_batch", "parallel_drafting"):
        if config.get(knob):
            yield (
                f"{knob}: tide.control stops the draft between two of its steps and "
                "needs it false; or set tide.control.policy to 'static'."
            )


def _against_memory(config: Mapping[str, Any]) -> Iterator[str]:
    method = config.get("draft_sample_method") or "greedy"
    if method != "greedy":
        yield (
            "tide.test_time.memory: a token of the memory's has no draft probability, "
            f"which draft_sample_method {method!r} needs; set that to 'greedy', or the "
            "memory to 'off'."
        )
    for knob in (
        "num_speculative_tokens_per_batch_size",
        "disable_padded_drafter_batch",
        "parallel_drafting",
    ):
        if config.get(knob):
            yield (
                f"{knob}: tide.test_time.memory changes what is drafted request by "
                "request and needs it false or absent; remove it, or set "
                "tide.test_time.memory to 'off'."
            )


def _no_profile(path: str) -> Iterator[str]:
    if not os.path.isfile(os.path.expanduser(path)):
        yield (
            f"tide.control.profile: no file {path!r}; make one with "
            "`vllm-tide profile`, or leave the knob out to measure at start-up."
        )


def without_control(section: dict[str, Any], error: ConfigError) -> dict[str, Any]:
    """Leave control out where nobody asked for it.

    Raises:
        ConfigError: `tide.control.policy` is given: `error`.
    """
    control = section.get("control", {})
    if "policy" in control:
        raise error
    logger.warning("tide: the speculative length is static: %s", error)
    return {**section, "control": {**control, "policy": "static"}}


NO_MODEL = "neither a directory with config.json nor the name of a model on the hub."


def may_be_model(name: str) -> bool:
    """True if there is such a local model, or such a hub name (`fresh` looks so)."""
    path = Path(os.path.expanduser(name))
    if path.is_dir():
        return (path / "config.json").is_file()
    return re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) is not None


@cache
def vllm_options() -> type[BaseModel] | None:
    """Options of speculation as vLLM's source declares them; None without vLLM."""
    try:
        tree = ast.parse(read_file(find_target(), "vllm/config/speculative.py"))
    except (PatchError, OSError, ValueError, SyntaxError):
        return None
    names: dict[str, Any] = {"Literal": Literal}
    fields: dict[str, Any] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign):
            names[ast.unparse(node.targets[0])] = _kind(node.value, names)
        if not isinstance(node, ast.ClassDef) or node.name != "SpeculativeConfig":
            continue
        for line in node.body:
            if isinstance(line, ast.AnnAssign):
                limits: dict[str, Any] = {  # Field(default=None, gt=0)
                    str(item.arg): ast.literal_eval(item.value)
                    for item in getattr(line.value, "keywords", ())
                    if item.arg in ("gt", "ge", "lt", "le")
                }
                kind: Any = _kind(line.annotation, names)
                fields[ast.unparse(line.target)] = (kind, Field(None, **limits))
    config = ConfigDict(extra="forbid")
    return create_model("SpeculativeConfig", __config__=config, **fields)


def _kind(node: ast.expr, names: dict[str, Any]) -> Any:
    """The type that an annotation names; Any where it is another module's."""
    holder = type("Holder", (), {"__annotations__": {"x": ast.unparse(node)}})
    try:
        return get_type_hints(holder, names)["x"]
    except (NameError, SyntaxError, TypeError, AttributeError):
        return Any
