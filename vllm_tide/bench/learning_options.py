"""What the suites that learn while serving have in common: their options."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from vllm_tide.config import ConfigError, parse_tide

from .control_arms import BenchError
from .document import commit
from .server import vllm_command
from .sizes import DEMO, read_config
from .stream import CONCURRENCY_CYCLE


def _allowed() -> tuple[int, ...]:
    return tuple(sorted(os.sched_getaffinity(0)))


def _engine_cpus() -> tuple[int, ...]:
    allowed = _allowed()
    return allowed[: max(1, len(allowed) // 2)]


def _other_cpus() -> tuple[int, ...]:
    allowed = _allowed()
    return allowed[max(1, len(allowed) // 2) :] or allowed


@dataclass(frozen=True, kw_only=True)
class SuiteOptions:
    """Knobs of every learning suite.

    Attributes:
        suite: Its name.
        json: The report.
        work: Logs, models, captured samples; what `resume` reads.
        target: The model, not inflated.
        draft: The first draft.
        prompts: Folder of `<domain>.jsonl.gz`.
        venv: Environment with the patched vLLM.
        model_sizes: Size the served target is inflated to, at most one; empty serves it
            as it is.
        domains: Of the stream, in order.
        requests: Per domain; one number holds for all.
        output_tokens: Per request, exactly.
        concurrency: Requests in flight, one entry per block of four, then again.
        num_speculative_tokens: K.
        tide: Put into the `tide` section of every trained arm.
        engine_cpus: Cores of the engine.
        other_cpus: Cores of API server, client and trainer.
        resume: Keep what an earlier run of the same options measured.
        max_minutes: Nothing is begun after this time.
    """

    suite: str
    json: Path
    work: Path
    target: Path = DEMO / "target"
    draft: Path = DEMO / "draft"
    prompts: Path = DEMO / "prompts"
    venv: Path = Path(sys.prefix)
    model_sizes: tuple[str, ...] = ()
    domains: tuple[str, ...] = ("python",)
    requests: tuple[int, ...] = (64,)
    output_tokens: int = 96
    concurrency: tuple[int, ...] = CONCURRENCY_CYCLE
    num_speculative_tokens: int = 3
    tide: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    max_model_len: int = 1024
    compile: bool = False
    engine_cpus: tuple[int, ...] = field(default_factory=_engine_cpus)
    other_cpus: tuple[int, ...] = field(default_factory=_other_cpus)
    serve_args: tuple[str, ...] = ()
    seed: int = 0
    resume: bool = False
    max_minutes: float | None = None

    def check(self) -> None:
        """Refuse what cannot run.

        Raises:
            BenchError: With one sentence that names the option.
        """
        folders = (("--target", self.target), ("--draft", self.draft))
        for option, folder in folders:
            if not folder.is_dir():
                raise BenchError(f"{option}: there is no folder {folder}")
            read_config(folder)
        if not Path(vllm_command(self.venv)[0]).exists():
            raise BenchError(f"--venv: {self.venv} has no bin/vllm")
        if len(self.model_sizes) > 1:
            raise BenchError("--model-sizes: this suite serves one size at a time")
        if not self.domains or len(set(self.domains)) < len(self.domains):
            raise BenchError("--domains names each domain once, such as python,c")
        self.counts()
        for option, values in (
            ("--requests", self.requests),
            ("--concurrency", self.concurrency),
            ("--output-tokens", (self.output_tokens - 1,)),
            ("--num-speculative-tokens", (self.num_speculative_tokens,)),
        ):
            if not values or min(values) < 1:
                raise BenchError(f"{option} is too small")
        if self.max_minutes is not None and self.max_minutes <= 0:
            raise BenchError("--max-minutes is too small")
        try:
            parse_tide(dict(self.tide))
        except ConfigError as error:
            raise BenchError(f"--tide: {error}") from None

    def counts(self) -> list[int]:
        """Return the number of requests of each domain.

        Raises:
            BenchError: There are neither one nor as many numbers as domains.
        """
        if len(self.requests) == 1:
            return [self.requests[0]] * len(self.domains)
        if len(self.requests) != len(self.domains):
            raise BenchError(
                f"--requests: give one number, or one for each of the "
                f"{len(self.domains)} domains"
            )
        return list(self.requests)

    def to_json(self) -> dict[str, Any]:
        """Return the options for the report; folders by their last name."""
        record = asdict(self)
        for key, value in record.items():
            if isinstance(value, Path):
                record[key] = value.name
        record["tide"] = dict(self.tide)
        return record

    def identity(self) -> dict[str, Any]:
        """Return what must be equal for two runs to be one measurement."""
        mine = self.to_json()
        for key, value in asdict(self).items():
            if isinstance(value, Path):  # which folder, without saying where it is
                digest = hashlib.sha256(str(value.resolve()).encode()).hexdigest()
                mine[key] = f"{value.name} {digest[:12]}"
        mine |= commit()
        for key in ("json", "work", "resume", "max_minutes", *self.may_differ()):
            mine.pop(key, None)
        return mine

    def may_differ(self) -> tuple[str, ...]:
        """Return further options that a resumed run may change."""
        return ()


def option_names(kind: type[SuiteOptions]) -> frozenset[str]:
    """Return the names a suite understands."""
    return frozenset(item.name for item in fields(kind))
