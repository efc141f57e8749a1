"""Shared by the suites of policies: servers of arms, their calibration, the document.

vLLM's `num_speculative_tokens_per_batch_size` is tuned from static arms, measured for
some seconds at each batch size before anything else: the dynamic arm's server needs it.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.harness.arms import (
    TIDE_MAX_TOKENS,
    Arm,
    make_arms,
    speculative_config,
    why_not,
)
from bench.harness.blocks import MIXED, NONE, Cell
from bench.harness.common import BenchError, OutOfTimeError, Progress
from bench.harness.identity import OutputBook
from bench.harness.measure import (
    CLIENT_NICE,
    WARM_UP_TOKENS,
    ClosedPlan,
    measure_closed,
    warm_up,
)
from bench.harness.models import Target, kv_cache_bytes, read_config, targets_of
from bench.harness.options import ELEMENT_BYTES, CommonOptions, all_cpus, option
from bench.harness.server import (
    BROKEN,
    MIB,
    ServerOptions,
    ServerPool,
    VllmServer,
    sentence,
)
from bench.harness.session import Document, conduct
from bench.harness.stream import BenchRequest, PromptPool, load_pool

# What a server takes beside weights and KV cache, before one was seen.
SERVER_MIB = 1600.0
MOST_FAILURES = 2
KNOWN_DOMAINS = ("matched", "unmatched")


@dataclass(frozen=True, kw_only=True)
class PolicyOptions(CommonOptions):
    """Options of the suites that compare policies."""

    arms: tuple[str, ...] = option((), "none,static3,adaspec,...")
    domains: tuple[str, ...] = option(KNOWN_DOMAINS, "matched,unmatched")
    max_input_tokens: int = 128
    calibration_seconds: float = 3.0
    max_num_seqs: int | None = None
    max_model_len: int = 512
    engine_cpus: tuple[int, ...] = option(all_cpus, "default: all")
    other_cpus: tuple[int, ...] = option(all_cpus, "API server, client")
    control: Mapping[str, Any] = option(
        dict,
        "JSON put into tide.control of every tide arm; {target} in a string is the "
        "model size",
    )

    @property
    def num_seqs(self) -> int:
        return self.max_num_seqs or 48

    @property
    def kinds(self) -> tuple[str, ...]:
        """Domains of which prompts are needed."""
        real = tuple(domain for domain in self.domains if domain != MIXED)
        return real if real and real == self.domains else KNOWN_DOMAINS

    @property
    def calibrated(self) -> tuple[int, ...]:
        """Batch sizes at which static arms are measured to tune the dynamic one."""
        return tuple(b for b in (1, 2, 4, 8, 16, 32) if b < self.num_seqs)

    def check(self) -> None:
        arms = make_arms(self.arm_names, self.control)
        super().check()
        runner = os.environ.get("VLLM_USE_V2_MODEL_RUNNER")
        for arm in arms:
            if not arm.is_adaptive:
                continue
            if why := why_not(arm.name, self.venv, runner, compiled=self.compile):
                raise BenchError(why)
        if not self.domains:
            raise BenchError("--domains names no domain")
        if len(self.model_sizes) > 1:
            raise BenchError("--model-sizes: this suite serves one size at a time")
        if self.output_tokens < 2:
            raise BenchError("--output-tokens is too small")

    def check_length(self, output_tokens: int) -> None:
        most = self.max_input_tokens + output_tokens + TIDE_MAX_TOKENS + 1
        if most > self.max_model_len:
            raise BenchError(
                f"--max-model-len {self.max_model_len} is too short for prompts of "
                f"{self.max_input_tokens} and outputs of {output_tokens} tokens; at "
                f"least {most}"
            )
        able = read_config(self.target).get(
            "max_position_embeddings", self.max_model_len
        )
        if self.max_model_len > able:
            raise BenchError(
                f"--max-model-len {self.max_model_len}: the model takes {able} tokens"
            )


def closed_requests(
    options: PolicyOptions, pool: PromptPool, domain: str, seed: str
) -> Callable[[int, int | None], BenchRequest]:
    """Endless sequence of a closed loop; of mixed domains in turn, by index."""
    domains = options.kinds if domain == MIXED else (domain,)
    order = [pool.sequence(name, f"{options.seed}:{seed}") for name in domains]

    def request_at(index: int, max_tokens: int | None) -> BenchRequest:
        place, which = divmod(index, len(domains))
        prompts = order[which]
        prompt = prompts[place % len(prompts)][: options.max_input_tokens]
        length = options.output_tokens if max_tokens is None else max_tokens
        return BenchRequest(index, domains[which], prompt, length)

    return request_at


def best_lengths(rates: Mapping[tuple[int, int], float]) -> dict[int, int]:
    """Static length that was best at each batch size, of rates by (batch, length).

    The shorter one of equals: it needs less memory and verifies less.
    """
    return {
        batch: max(
            sorted(k for b, k in rates if b == batch),
            key=lambda k, batch=batch: rates[batch, k],
        )
        for batch in sorted({batch for batch, _ in rates})
    }


def schedule_of(
    best: Mapping[int, int], largest_batch: int
) -> list[tuple[int, int, int]]:
    """Schedule: each batch size takes the nearest measured one's length.

    Nearest by ratio (the boundary is the geometric mean), since cost and gain change
    with the logarithm of the batch size rather than with its difference.
    """
    if not best:
        raise ValueError("no batch size was measured")
    batches = sorted(best)
    ends = [math.isqrt(a * b) for a, b in zip(batches, batches[1:], strict=False)]
    ends.append(max(largest_batch, batches[-1]))
    ranges: list[tuple[int, int, int]] = []
    first = 1
    for batch, end in zip(batches, ends, strict=True):
        length = best[batch]
        if end < first:
            continue
        if ranges and ranges[-1][2] == length:
            ranges[-1] = (ranges[-1][0], end, length)
        else:
            ranges.append((first, end, length))
        first = end + 1
    return ranges


class PolicyRun:
    """Measures the arms of one target; a suite says what `visits` are."""

    def __init__(
        self, options: PolicyOptions, target: Target, doc: Document, progress: Progress
    ) -> None:
        self.options, self.target = options, target
        self.doc, self.progress = doc, progress
        control = {
            key: value.replace("{target}", target.name)
            if isinstance(value, str)
            else value
            for key, value in options.control.items()
        }
        self.arms = make_arms(options.arm_names, control)
        self.pool: PromptPool = load_pool(options.prompts, target.path, options.kinds)
        self.book = OutputBook()
        self.run_dir = Path(tempfile.mkdtemp(prefix="vtb-"))
        self.schedule: list[tuple[int, int, int]] | None = None
        self.failures: dict[str, int] = {}

    def visits(self, servers: ServerPool) -> None:
        raise NotImplementedError

    def run(self) -> None:
        try:
            with self._pool() as servers:
                first = next(arm for arm in self.arms if not arm.is_dynamic)
                self._start(servers, [first])
                servers.check_room(self.arms)
                self.visits(servers)
        finally:
            shutil.rmtree(self.run_dir, ignore_errors=True)
            self.progress.say("comparing outputs")
            self.book.rescore(self.target.path, self.options.dtype)
            self.doc.data["identity"][self.target.name] = self.book.to_json()
            self.doc.write()

    def _pool(self) -> ServerPool:
        target = self.target
        weights = sum(f.stat().st_size for f in target.path.glob("*.safetensors"))
        # Checkpoints are 16 bit.
        weights_mib = weights / MIB * ELEMENT_BYTES[self.options.dtype] / 2
        expected_mib = SERVER_MIB + 1.2 * weights_mib + self.kv_bytes / MIB
        say = self.progress.say
        return ServerPool(self.server_options, self._warm_up, say, expected_mib)

    @property
    def kv_bytes(self) -> int:
        options = self.options
        config, size = read_config(self.target.path), ELEMENT_BYTES[options.dtype]
        return kv_cache_bytes(config, options.num_seqs, options.max_model_len, size)

    def server_options(self, arm: Arm) -> ServerOptions:
        options = self.options
        # Arms that share a server share its folder.
        own = self.run_dir / f"{zlib.crc32(arm.server_key.encode()):08x}"
        own.mkdir(mode=0o700, exist_ok=True, parents=True)
        return ServerOptions(
            venv=options.venv,
            model=self.target.path,
            log_path=options.work / "logs" / f"{self.target.name}-{arm.name}.log",
            speculative_config=speculative_config(
                arm, options.draft, own, self.schedule
            ),
            dtype=options.dtype,
            engine_cpus=options.engine_cpus,
            other_cpus=options.other_cpus,
            kv_cache_bytes=self.kv_bytes,
            max_model_len=options.max_model_len,
            max_num_seqs=options.num_seqs,
            enforce_eager=not options.compile,
            extra_args=options.serve_args,
        )

    def _warm_up(self, server: VllmServer) -> None:
        requests = closed_requests(self.options, self.pool, MIXED, "-2")
        warm_up(server, lambda index: requests(index, WARM_UP_TOKENS))

    def _start(self, servers: ServerPool, arms: Sequence[Arm]) -> None:
        for arm in arms:
            try:
                servers.get(arm)
            except BROKEN as error:
                raise BenchError(f"no server: {arm.name}: {sentence(error)}") from None
        facts = self.doc.data["environment"].setdefault("servers", {})
        facts[self.target.name] = {
            "startup_s": servers.startup_s,
            "memory_mib": servers.memory_mib,
        }

    def check_time(self, cell: object) -> None:
        if self.progress.out_of_time(cell):
            limit = self.options.max_minutes
            raise OutOfTimeError(f"--max-minutes {limit:g} is over")

    def calibrate(
        self, servers: ServerPool, batches: Sequence[int]
    ) -> dict[tuple[str, int], float]:
        """Rates by arm and batch: of `none`, of static arms too to tune the dynamic."""
        tuned = any(arm.is_dynamic for arm in self.arms)
        sizes = {*batches, *self.options.calibrated} if tuned else batches
        plan = [
            (arm, batch)
            for arm in self.arms
            if arm.is_static and (tuned or arm.name == NONE)
            for batch in sorted(sizes)
        ]
        self.progress.start([("calibration", batch) for _, batch in plan])
        rates: dict[tuple[str, int], float] = {}
        for arm, batch in plan:
            self.check_time(("calibration", batch))
            self._start(servers, [arm])
            began = time.monotonic()
            requests = closed_requests(self.options, self.pool, MIXED, f"-1:{batch}")
            seconds = self.options.calibration_seconds
            closed = ClosedPlan(batch, seconds=seconds, kinds=len(self.options.kinds))
            salt = {"cache_salt": f"calibration {batch}"}
            try:
                record = measure_closed(servers.get(arm), requests, closed, salt).record
            except BROKEN as error:
                raise BenchError(
                    f"calibration of {arm.name} failed: {sentence(error)}"
                ) from None
            rates[arm.name, batch] = rate = float(record["output_tokens_per_s"])
            took = time.monotonic() - began
            self.doc.data["calibration"].append(
                {
                    "target": self.target.name,
                    "arm": arm.name,
                    "batch": batch,
                    "output_tokens_per_s": rate,
                    "beside_s": round(took - record["duration_s"], 2),
                }
            )
            self.progress.done(("calibration", batch), took)
            self.progress.say(
                f"calibration: {arm.name}, batch {batch}: {rate} tokens/s"
            )
        if tuned:
            lengths = {arm.name: arm.num_tokens for arm in self.arms}
            by_length = {(b, lengths[name]): rate for (name, b), rate in rates.items()}
            best = best_lengths(by_length)
            self.schedule = schedule_of(best, self.options.num_seqs)
            rows = [list(row) for row in self.schedule]
            self.doc.data["schedules"][self.target.name] = rows
            self.progress.say(f"vllm_dynamic tuned: {self.schedule}")
        return rates

    def failed(self, servers: ServerPool, arm: Arm, where: str, error: object) -> None:
        """Notes that a visit failed; its server is started again for the next."""
        self.failures[arm.server_key] = self.failures.get(arm.server_key, 0) + 1
        self.doc.problem(f"{self.target.name}, {where}, {arm.name}: {error}")
        self.progress.say(f"{where}, {arm.name}: FAILED: {error}")
        servers.drop(arm)
        self.doc.write()

    def given_up(self, arm: Arm) -> bool:
        return self.failures.get(arm.server_key, 0) >= MOST_FAILURES


def place_of(cell: Cell, arm: Arm, target: Target) -> dict[str, Any]:
    """Place of a visit, for its record."""
    return {
        "batch": cell.batch,
        "domain": cell.domain,
        "arm": arm.name,
        "target": target.name,
        "trace": cell.trace,
    }


def conduct_policies(
    doc: Document, options: PolicyOptions, kind: type[PolicyRun], size: Sequence[str]
) -> int:
    """Runs a suite on its target; returns 0 only if every output was right."""
    limit = options.max_minutes
    began = time.monotonic()
    progress = Progress(deadline_s=None if limit is None else began + 60 * limit)
    (target,) = targets_of(options.target, size, options.work / "models", progress.say)

    def facts() -> dict[str, Any]:
        return {
            "targets": {target.name: target.facts},
            "target_dtype": options.dtype,
            "draft": options.draft.name,
            "engine_cpus": list(options.engine_cpus),
            "client_api_cpus": list(options.other_cpus),
            "omp_threads": len(options.engine_cpus),
            "enforce_eager": not options.compile,
            "prefix_caching": "on; each visit has a cache salt of its own",
            "seed": options.seed,
            "waiting_servers": "stopped with SIGSTOP",
            "client_nice": f"{CLIENT_NICE} while measuring, where permitted",
        }

    def wrong() -> list[str]:
        return [
            f"WRONG OUTPUTS: {target}, {arm} differs from none"
            for target, arms in doc.data["identity"].items()
            for arm, found in arms.items()
            if found["identical"] is False
        ]

    run = kind(options, target, doc, progress)
    return conduct(doc, options, facts, run.run, progress.say, wrong)
