"""The suites that learn while serving, by name; imported when asked for."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from .control_arms import BenchError
from .learning_options import SuiteOptions, option_names

_SUITES = {
    "learning": ("learning_run", "LearningOptions"),
    "day0": ("day0_suite", "Day0Options"),
    "loss": ("loss_suite", "LossOptions"),
    "rollback": ("rollback_suite", "RollbackOptions"),
    "multi": ("multi_suite", "MultiOptions"),
}
LEARNING_SUITES = tuple(_SUITES)


def options_of(suite: str, given: Mapping[str, Any]) -> SuiteOptions:
    """Return the options of a suite.

    Args:
        suite: One of `LEARNING_SUITES`.
        given: What the command line gave, by field; `json` and `work` at least.

    Raises:
        BenchError: An option is not the suite's.
    """
    module, name = _SUITES[suite]
    kind = getattr(import_module(f"vllm_tide.bench.{module}"), name)
    foreign = sorted(given.keys() - option_names(kind))
    if foreign:
        flag = foreign[0].replace("_", "-")
        raise BenchError(f"--{flag} is no option of --suite {suite}")
    options: SuiteOptions = kind(suite=suite, **given)
    return options


def run(options: SuiteOptions) -> int:
    """Run a suite; return the exit status.

    Raises:
        BenchError: The options are no good.
    """
    module, _ = _SUITES[options.suite]
    status: int = import_module(f"vllm_tide.bench.{module}").run(options)
    return status
