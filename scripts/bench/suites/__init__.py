"""Experiments on real servers, one module each, imported when asked for."""

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
        raise BenchError(f"--suite is one of {', '.join(SUITES)}")
    module = import_module(f"bench.suites.{suite}")
    kind: type[CommonOptions] = getattr(module, SUITES[suite])
    return kind


def options_of(suite: str, given: Mapping[str, Any]) -> CommonOptions:
    """Options of a suite from what the command line gave, by field."""
    kind = kind_of(suite)
    for name in sorted(given.keys() - {item.name for item in fields(kind)}):
        raise BenchError(f"--{name.replace('_', '-')} is no option of --suite {suite}")
    return kind(suite=suite, **given)


def run(options: CommonOptions) -> int:
    status: int = import_module(f"bench.suites.{options.suite}").run(options)
    return status
