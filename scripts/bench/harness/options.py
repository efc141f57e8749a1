"""Options of a suite: dataclass fields, which also define its command line."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from bench.harness.common import BenchError
from bench.harness.models import DEMO, read_config
from bench.harness.server import vllm_command
from bench.harness.stream import CONCURRENCY_CYCLE
from vllm_tide.config import ConfigError, parse_tide

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}


def option(default: Any, text: str = "", **more: Any) -> Any:
    """Declare a field with its help; `more` goes to argparse (`flags` are aliases)."""
    metadata = {"help": text, **more}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def all_cpus() -> tuple[int, ...]:
    """Return the cores that this process may use."""
    return tuple(sorted(os.sched_getaffinity(0)))


def engine_half() -> tuple[int, ...]:
    cpus = all_cpus()
    return cpus[: max(1, len(cpus) // 2)]


def other_half() -> tuple[int, ...]:
    """Return the second half of the cores; all if there is only one."""
    cpus = all_cpus()
    return cpus[max(1, len(cpus) // 2) :] or cpus


def list_of(kind: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    def parse(text: str) -> tuple[Any, ...]:
        try:
            return tuple(kind(part.strip()) for part in text.split(",") if part.strip())
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not a list such as 1,2,4"
            ) from None

    return parse


def json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value


def _folder(text: str) -> Path:
    return Path(text).resolve()


# Parsers by the annotation of a field.
_PARSERS: Mapping[str, Callable[[str], Any]] = {
    "str": str,
    "int": int,
    "float": float,
    "Path": _folder,
    "tuple[str, ...]": list_of(str),
    "tuple[int, ...]": list_of(int),
    "Mapping[str, Any]": json_object,
}


def add_options(parser: argparse.ArgumentParser, kind: type[CommonOptions]) -> None:
    """Add every field of an options class; an omitted option stays unset."""
    inherited = {
        item.name: item.metadata
        for base in reversed(kind.__mro__)
        for item in getattr(base, "__dataclass_fields__", {}).values()
        if item.metadata
    }
    for item in fields(kind):
        more = dict(inherited.get(item.name, {}))
        flags = [f"--{item.name.replace('_', '-')}", *more.pop("flags", ())]
        if item.name in (
            "suite",
            "json",
            "work",
        ):  # defined by `run.py` for every suite
            continue
        if item.type == "bool":
            more["action"] = "store_true"
        else:
            more.setdefault("type", _PARSERS[str(item.type).removesuffix(" | None")])
        parser.add_argument(*flags, dest=item.name, default=argparse.SUPPRESS, **more)


@dataclass(frozen=True, kw_only=True)
class CommonOptions:
    """Options of every suite."""

    suite: str
    json: Path
    work: Path
    target: Path = option(DEMO / "target", "served model folder")
    draft: Path = option(DEMO / "draft", "EAGLE-3 draft folder")
    prompts: Path = option(DEMO / "prompts", "folder of <domain>.jsonl.gz")
    venv: Path = option(
        Path(sys.prefix),
        "environment with patched vLLM (default: the current one)",
        type=Path,
    )
    model_sizes: tuple[str, ...] = option(
        (), "inflate the target to these sizes: 6m,90m"
    )
    domains: tuple[str, ...] = ("python",)
    output_tokens: int = option(96, "output tokens per request")
    dtype: str = option("float32", choices=tuple(ELEMENT_BYTES))
    max_model_len: int = 1024
    compile: bool = option(False, "serve without --enforce-eager")
    engine_cpus: tuple[int, ...] = option(
        engine_half, "default: the first half of all cores"
    )
    other_cpus: tuple[int, ...] = option(
        other_half, "cores of API server, client and trainer"
    )
    serve_args: tuple[str, ...] = option(
        (), "further `vllm serve` options", type=lambda text: tuple(text.split())
    )
    seed: int = 0
    max_minutes: float | None = None

    def check(self) -> None:
        """Raise BenchError for invalid options."""
        for name, folder in (("--target", self.target), ("--draft", self.draft)):
            if not folder.is_dir():
                raise BenchError(f"{name}: folder {folder} does not exist")
            read_config(folder)
        if not Path(vllm_command(self.venv)[0]).exists():
            raise BenchError(f"--venv: {self.venv} has no bin/vllm")

    @property
    def arm_names(self) -> tuple[str, ...]:
        names: tuple[str, ...] = getattr(self, "arms", ())
        return names

    @property
    def size(self) -> str:
        raise NotImplementedError

    def to_json(self) -> dict[str, Any]:
        return {
            key: value.name if isinstance(value, Path) else value
            for key, value in asdict(self).items()
        }


@dataclass(frozen=True, kw_only=True)
class SuiteOptions(CommonOptions):
    """Options of the suites that train while serving."""

    requests: tuple[int, ...] = option((64,), "one number, or one per domain")
    concurrency: tuple[int, ...] = option(
        CONCURRENCY_CYCLE, "requests in flight, per block of four requests: 1,2,4,3"
    )
    num_speculative_tokens: int = 3
    tide: Mapping[str, Any] = option(
        dict, "JSON merged into the tide section of every trained arm"
    )

    def check(self) -> None:
        super().check()
        if len(self.model_sizes) > 1:
            raise BenchError("--model-sizes: this suite serves one size at a time")
        if not self.domains or len(set(self.domains)) < len(self.domains):
            raise BenchError("--domains: give each domain once, such as python,c")
        self.counts()
        for name, values in (
            ("--requests", self.requests),
            ("--concurrency", self.concurrency),
            ("--output-tokens", (self.output_tokens - 1,)),
            ("--num-speculative-tokens", (self.num_speculative_tokens,)),
        ):
            if not values or min(values) < 1:
                raise BenchError(f"{name} is too small")
        if self.max_minutes is not None and self.max_minutes <= 0:
            raise BenchError("--max-minutes is too small")
        try:
            parse_tide(dict(self.tide))
        except ConfigError as error:
            raise BenchError(f"--tide: {error}") from None

    def at_least(self, least: Mapping[str, int]) -> None:
        """Raise BenchError if a field is below its least value."""
        for name, number in least.items():
            value = getattr(self, name)
            if value is not None and value < number:
                raise BenchError(
                    f"--{name.replace('_', '-')} must be at least {number}"
                )

    def counts(self) -> list[int]:
        if len(self.requests) == 1:
            return [self.requests[0]] * len(self.domains)
        if len(self.requests) != len(self.domains):
            raise BenchError(
                f"--requests: give one number, or one for each of the "
                f"{len(self.domains)} domains"
            )
        return list(self.requests)

    @property
    def size(self) -> str:
        return f"{sum(self.counts())} requests of {self.output_tokens} tokens"
