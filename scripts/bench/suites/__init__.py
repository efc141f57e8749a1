"""Experiments on real servers, one module each, imported on demand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from importlib import import_module
from typing import Any

from bench.harness.common import BenchError
from bench.harness.options import CommonOptions

SUITES = {
    "long": "LongOptions",
    "multi": "MultiOptions",
    "rollback": "RollbackOptions",
}


def kind_of(suite: str) -> type[CommonOptions]:
    if suite not in SUITES:
        raise BenchError(f"--suite must be one of {', '.join(SUITES)}")
    module = import_module(f"bench.suites.{suite}")
    kind: type[CommonOptions] = getattr(module, SUITES[suite])
    return kind


def options_of(suite: str, values: Mapping[str, Any]) -> CommonOptions:
    """Return the options of a suite from command-line values by field."""
    kind = kind_of(suite)
    for name in sorted(values.keys() - {item.name for item in fields(kind)}):
        option = f"--{name.replace('_', '-')}"
        raise BenchError(f"{option} is not an option of --suite {suite}")
    return kind(suite=suite, **values)


def run(options: CommonOptions) -> int:
    status: int = import_module(f"bench.suites.{options.suite}").run(options)
    return status
