"""Experiments on real servers, one module each, imported when asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from importlib import import_module
from typing import Any

from bench.harness.common import BenchError
from bench.harness.options import CommonOptions

_SUITES = {
    "control": ("control", "ControlOptions"),
    "traces": ("replay", "RunOptions"),
    "ablation": ("replay", "RunOptions"),
    "learning": ("learning", "LearningOptions"),
    "day0": ("day0", "Day0Options"),
    "loss": ("loss", "LossOptions"),
    "rollback": ("rollback", "RollbackOptions"),
    "multi": ("multi", "MultiOptions"),
    "long": ("long", "LongOptions"),
}
SUITES = tuple(_SUITES)


def kind_of(suite: str) -> type[CommonOptions]:
    if suite not in _SUITES:
        raise BenchError(f"--suite is one of {', '.join(SUITES)}")
    module, name = _SUITES[suite]
    kind: type[CommonOptions] = getattr(import_module(f"bench.suites.{module}"), name)
    return kind


def options_of(suite: str, given: Mapping[str, Any]) -> CommonOptions:
    """Options of a suite from what the command line gave, by field."""
    kind = kind_of(suite)
    for name in sorted(given.keys() - {item.name for item in fields(kind)}):
        raise BenchError(f"--{name.replace('_', '-')} is no option of --suite {suite}")
    late = {item.name: item.metadata.get("late") for item in fields(kind)}
    parsed = {k: late[k](v) if late[k] else v for k, v in given.items()}
    return kind(suite=suite, **parsed)


def run(options: CommonOptions) -> int:
    module, _ = _SUITES[options.suite]
    status: int = import_module(f"bench.suites.{module}").run(options)
    return status
