"""What a run of the control benchmark is asked to do."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .adaptive import why_not
from .attainment import SCALES
from .control_arms import (
    ABLATION_SUITE,
    CONTROL_ARMS,
    TIDE_MAX_TOKENS,
    BenchError,
    make_arms,
)
from .server import vllm_command
from .sizes import DEMO, read_config
from .traces import Limits, TraceChoice

SUITES = ("control", "traces", "ablation")
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}


def _cpus() -> tuple[int, ...]:
    return tuple(sorted(os.sched_getaffinity(0)))


@dataclass(frozen=True)
class RunOptions:
    """All knobs of a run; ``seconds`` and lengths are per visit."""

    suite: str
    json: Path
    work: Path
    target: Path = DEMO / "target"
    draft: Path = DEMO / "draft"
    prompts: Path = DEMO / "prompts"
    venv: Path = Path(sys.prefix)
    arms: tuple[str, ...] = ()
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 48)
    domains: tuple[str, ...] = ("matched", "unmatched")
    model_sizes: tuple[str, ...] = ()
    seconds: float = 8.0
    repeats: int = 3
    output_tokens: int = 96
    trace_dir: Path | None = None
    traces: tuple[TraceChoice, ...] = ()
    trace_seconds: float = 240.0
    keep: float | None = None  # None: so many that `load` is offered
    load: float = 0.6
    slo_scales: tuple[float, ...] = SCALES
    limits: Limits = field(default_factory=Limits)
    drain_s: float = 180.0
    calibration_seconds: float = 3.0
    max_num_seqs: int | None = None
    max_model_len: int = 512
    dtype: str = "float32"
    engine_cpus: tuple[int, ...] = field(default_factory=_cpus)
    other_cpus: tuple[int, ...] = field(default_factory=_cpus)
    compile: bool = False
    control: Mapping[str, Any] = field(default_factory=dict)
    serve_args: tuple[str, ...] = ()
    resident: int | None = None
    seed: int = 0
    max_minutes: float | None = None

    @property
    def is_replay(self) -> bool:
        """Return whether traces are replayed rather than batch sizes swept."""
        return self.suite != "control"

    @property
    def arm_names(self) -> tuple[str, ...]:
        """The arms asked for, or the suite's."""
        default = ABLATION_SUITE if self.suite == "ablation" else CONTROL_ARMS
        return self.arms or default

    @property
    def num_seqs(self) -> int:
        """Most requests a server takes at a time."""
        if self.max_num_seqs is not None:
            return self.max_num_seqs
        return 48 if self.is_replay else max(self.batches)

    @property
    def minutes(self) -> float:
        """Return how long measuring alone takes."""
        cells = self.seconds * len(self.batches) * len(self.domains)
        if self.is_replay:
            cells = self.trace_seconds * (len(self.traces) or 3)
        every = self.repeats * len(self.arm_names) * max(1, len(self.model_sizes))
        return cells * every / 60

    def check(self) -> None:
        """Refuse what cannot run.

        Raises:
            BenchError: With one sentence that names the option.
        """
        if self.suite not in SUITES:
            raise BenchError(f"--suite is one of {', '.join(SUITES)}")
        arms = make_arms(self.arm_names, self.control)
        for option, folder in (("--target", self.target), ("--draft", self.draft)):
            if not folder.is_dir():
                raise BenchError(f"{option}: there is no folder {folder}")
            read_config(folder)
        if not Path(vllm_command(self.venv)[0]).exists():
            raise BenchError(f"--venv: {self.venv} has no bin/vllm")
        runner = os.environ.get("VLLM_USE_V2_MODEL_RUNNER")
        for arm in arms:
            if not arm.is_adaptive:
                continue
            if why := why_not(arm.name, self.venv, runner, compiled=self.compile):
                raise BenchError(why)
        if not self.domains:
            raise BenchError("--domains names no domain")
        if not self.batches or min(self.batches) < 1:
            raise BenchError("--batches are positive whole numbers such as 1,4,16")
        if self.is_replay and not all(scale > 0 for scale in self.slo_scales):
            raise BenchError("--slo-scales are positive factors such as 0.8,1.0")
        for option, number in (
            ("--seconds", self.seconds),
            ("--repeats", self.repeats),
            ("--trace-seconds", self.trace_seconds),
            ("--load", self.load),
            ("--output-tokens", self.output_tokens - 1),
        ):
            if not number > 0:
                raise BenchError(f"{option} is too small")
        if self.keep is not None and not 0 < self.keep <= 1:
            raise BenchError(
                f"--keep is a probability above 0, at most 1; got {self.keep:g}"
            )
        if self.trace_dir is not None and not self.trace_dir.is_dir():
            raise BenchError(f"--trace-dir: there is no folder {self.trace_dir}")
        if not self.is_replay and self.num_seqs < max(self.batches):
            raise BenchError("--max-num-seqs is below the largest of --batches")
        self._check_lengths()

    def _check_lengths(self) -> None:
        lim = self.limits
        if not (1 <= lim.min_input <= lim.max_input):
            raise BenchError("--max-input-tokens is below the shortest prompt")
        if not (2 <= lim.min_output <= lim.max_output):
            raise BenchError("--max-output-tokens is below the shortest output")
        output = lim.max_output if self.is_replay else self.output_tokens
        most = lim.max_input + output + TIDE_MAX_TOKENS + 1
        if most > self.max_model_len:
            raise BenchError(
                f"--max-model-len {self.max_model_len} is too short for prompts of "
                f"{lim.max_input} and outputs of {output} tokens; at least {most}"
            )
        config = read_config(self.target)
        able = config.get("max_position_embeddings", self.max_model_len)
        if self.max_model_len > able:
            raise BenchError(
                f"--max-model-len {self.max_model_len}: the model takes {able} tokens"
            )

    def to_json(self) -> dict[str, Any]:
        """Return the options for the report; folders by their last name."""
        record = asdict(self)
        for key, value in record.items():
            if isinstance(value, Path):
                record[key] = value.name
        record["arms"] = list(self.arm_names)
        record["control"] = dict(self.control)
        return record
