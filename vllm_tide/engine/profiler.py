"""Measures forward times on the engine's own kernels, before anything is served.

vLLM's own runner, V1 or V2, is given crafted `SchedulerOutput`s (as vLLM's
`warmup_kernels` does for its V2 runner): requests that claim a context in the KV cache,
with blocks of their own, real positions, drafts to verify and prompts to prefill.
Everything a served step runs, runs: input preparation, both models, sampler, rejection.
Times come from the control's own clock, so what is fitted is what is observed later.
"""

from __future__ import annotations

import logging
import os
import time
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from vllm_tide.config import ConfigError
from vllm_tide.control.online_time import RoundSample
from vllm_tide.engine.facts import facts
from vllm_tide.engine.profile_steps import Group, Limits, Step, Take, groups, steps_of

# A shape is settled when its fastest repeats agree.
_FASTEST = 3
_AGREE = 1.05


class Recorder:
    """Rounds by shape, of which the faster half of a shape's repeats counts.

    What disturbs a round only ever lengthens it, and by much: its threads meet at
    barriers many times, so one that loses its core for a scheduler's slice makes a
    draft pass of half a millisecond take ten times as long.
    """

    def __init__(self) -> None:
        self._rounds: dict[Hashable, list[RoundSample]] = defaultdict(list)

    def add(self, shape: Hashable, sample: RoundSample) -> None:
        self._rounds[shape].append(sample)

    def settled(self, shape: Hashable) -> bool:
        times = sorted(map(_seconds, self._rounds[shape]))
        return len(times) >= _FASTEST and times[_FASTEST - 1] <= _AGREE * times[0]

    def samples(self) -> list[RoundSample]:
        found = []
        for rounds in self._rounds.values():
            found += sorted(rounds, key=_seconds)[: (len(rounds) + 1) // 2]
        return found


def _seconds(sample: RoundSample) -> float:
    """Time in the two models; host time before a step is not a kernel's."""
    drafted = 0.0
    if sample.steps >= 1:
        drafted += sample.draft_first_s
    if sample.steps >= 2:
        drafted += sample.draft_next_s
    return sample.target_s + drafted


logger = logging.getLogger("vllm.tide")

QUICK_SECONDS = 8.0
FULL_SECONDS = 120.0
_MOST_PASSES = 30
_MOST_STEPS = 15
_PREFILL = 512  # tokens kept free for the one prompt beside a batch
_PREFIX = "_tide_profile_"


def measure(
    worker: Any,
    *,
    quick: bool,
    num_speculative_tokens: int,
    budget_s: float | None = None,
) -> list[RoundSample]:
    """Measure rounds of many shapes; every rank calls it alike.

    Args:
        worker: vLLM's `Worker` with its KV cache and our `tide`, nothing being served.
        quick: Few shapes, because a start-up waits.
        budget_s: Seconds to spend, up to twice that until each shape was measured
            twice; None: by `quick`.

    Returns:
        The measured rounds, without each shape's first run.

    Raises:
        ValueError: The engine has no room for a single shape.
    """
    if budget_s is None:
        budget_s = QUICK_SECONDS if quick else FULL_SECONDS
    agree = worker.tide.agree
    bench = _Bench(worker, num_speculative_tokens)
    if next(groups(bench.limits, quick=quick), None) is None:
        raise ValueError(
            "the engine is too small to measure: raise --max-model-len, the size of "
            "the KV cache or --max-num-batched-tokens, or give a profile."
        )
    began = time.monotonic()

    def spent(share: float) -> bool:
        # The leader's clock decides for all ranks: they run the models together.
        return bool(agree(int(time.monotonic() - began > share * budget_s)))

    with _undisturbed(worker), torch.inference_mode():
        bench.touch_cache(quick=quick)
        # First uses compile and allocate.
        visited: list[Group] = []
        pace = 0.0  # seconds per row
        for group in groups(bench.limits, quick=quick):
            dear = pace * group.rows > 0.06 * budget_s
            if agree(int(dear)):
                group = group.thinned()
            at = time.monotonic()
            logger.debug(
                "vllm_tide: profile: batch of %d, context %d (%.0f s)",
                group.requests,
                group.context,
                at - began,
            )
            bench.run(group)
            visited.append(group)
            pace = (time.monotonic() - at) / group.rows
            if spent(0.3):
                break
        bench.recorder = Recorder()
        for done in range(_MOST_PASSES):
            # The leader's rounds decide, for the same reason.
            left = [group for group in visited if not agree(int(bench.settled(group)))]
            if not left:
                break
            logger.debug(
                "vllm_tide: profile: pass %d, %d of %d batches (%.0f s of %.0f)",
                done + 1,
                len(left),
                len(visited),
                time.monotonic() - began,
                budget_s,
            )
            # One round of a shape may be a strange one: there is time for a second.
            limit = 1.0 if done > 1 else 2.0
            for group in left:
                bench.run(group)
                if done and spent(limit):
                    break
            if spent(limit):
                break
        bench.clean_up()
    samples = bench.recorder.samples()
    logger.info(
        "vllm_tide: profile: %d rounds kept in %.0f s",
        len(samples),
        time.monotonic() - began,
    )
    return samples


class _Bench:
    """Feeds the runner with groups of made-up requests and collects the samples."""

    def __init__(self, worker: Any, num_speculative_tokens: int) -> None:
        self._worker = worker
        self._runner = runner = worker.model_runner
        self._runs = steps_of(worker)
        self._steps = num_speculative_tokens
        self._random = np.random.default_rng(0)
        self._vocab = int(runner.model_config.get_vocab_size())
        cache = runner.kv_cache_config
        self._block_sizes = [
            int(group.kv_cache_spec.block_size) for group in cache.kv_cache_groups
        ]
        self._num_blocks = int(cache.num_blocks)
        self._next_block = 1  # block 0 is the null block
        self._running: list[str] = []
        self._ended: set[str] = set()
        self._count = 0
        self.recorder = Recorder()
        self.limits = self._limits(worker.vllm_config.scheduler_config)

    def _limits(self, scheduler: Any) -> Limits:
        steps, runner = self._steps, self._runner
        length = min(
            int(runner.max_model_len),
            int(getattr(runner, "effective_drafter_max_model_len", 1 << 30)),
        )
        # A step may lengthen a request by 1 + K tokens; half its length at most.
        group = max(min(_MOST_STEPS, length // 2 // (steps + 1) - 1), 1)
        self._growth = (group + 1) * (steps + 1)
        block = max(self._block_sizes)
        self._slack = slack = self._growth + steps + 1 + block
        # Every KV cache group takes its blocks from the same pool.
        tokens = (self._num_blocks - 1) // len(self._block_sizes)
        tokens *= min(self._block_sizes)
        tokens -= _PREFILL + slack
        requests = max(min(int(scheduler.max_num_seqs), tokens // slack), 1)
        return Limits(
            requests=requests,
            rows=int(scheduler.max_num_batched_tokens),
            length=length - self._growth - steps - 1,
            cached=tokens - requests * slack,
            steps=steps,
            group=group,
        )

    def touch_cache(self, *, quick: bool) -> None:
        """Give every block we use memory of its own.

        A cache that was never written may be one page of zeros mapped everywhere,
        which makes long contexts look free.
        """
        tokens = _PREFILL + max(
            (group.requests + 1) * self._slack + group.requests * group.context
            for group in groups(self.limits, quick=quick)
        )
        blocks = len(self._block_sizes) * tokens // min(self._block_sizes) + 1
        for cache in self._runner.kv_caches:
            if (
                not isinstance(cache, torch.Tensor)
                or self._num_blocks not in cache.shape
            ):
                continue
            dim = cache.shape.index(self._num_blocks)
            part = cache.narrow(dim, 0, min(blocks, self._num_blocks))
            part.fill_(0.01 if part.is_floating_point() else 1)

    def run(self, group: Group) -> None:
        """Run every step of a group once."""
        self._ended.update(self._running)
        self._next_block = 1
        self._running = [self._name() for _ in range(group.requests)]
        # Kernels read whole blocks: contexts that differ, as they do when serving.
        spread = 0.5 if group.requests > 1 else 0.0
        contexts = np.linspace(1.0 - spread, 1.0 + spread, group.requests)
        contexts = np.clip(contexts * group.context, 1, self.limits.length)
        new = [
            self._request(name, int(context), 1)
            for name, context in zip(self._running, contexts, strict=True)
        ]
        # The batch comes into being here: not a step like those that follow.
        self._step(new, dict.fromkeys(self._running, 1), {}, 0, lambda sample: None)
        for step in group.steps:
            self._measured(group, step)
        self._runs.settle()

    def settled(self, group: Group) -> bool:
        """True if no step of a group needs to be repeated."""
        return all(
            self.recorder.settled((group.requests, group.context, step))
            for step in group.steps
        )

    def clean_up(self) -> None:
        from vllm.v1.core.sched.output import SchedulerOutput

        self._ended.update(self._running)
        self._running = []
        output = SchedulerOutput.make_empty()
        output.finished_req_ids, self._ended = self._ended, set()
        self._worker.execute_model(output)

    def _measured(self, group: Group, step: Step) -> None:
        lengths = self._lengths(step.verified)
        drafts = {
            name: self._tokens(length)
            for name, length in zip(self._running, lengths, strict=True)
        }
        spec = {name: tokens for name, tokens in drafts.items() if tokens}
        scheduled = {name: 1 + len(tokens) for name, tokens in drafts.items()}
        new = []
        before = self._next_block
        if step.prefill:
            name = self._name()
            new = [self._request(name, 0, step.prefill)]
            scheduled[name] = step.prefill
        shape = (group.requests, group.context, step)
        take = partial(self.recorder.add, shape)
        self._step(new, scheduled, spec, step.steps, take)
        self._ended.update([request.req_id for request in new])
        self._next_block = before

    def _step(
        self,
        new: list[Any],
        scheduled: dict[str, int],
        spec: dict[str, list[int]],
        steps: int,
        take: Take,
    ) -> None:
        from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput

        output = SchedulerOutput.make_empty()
        output.scheduled_new_reqs = new
        output.num_scheduled_tokens = scheduled
        output.total_num_scheduled_tokens = sum(scheduled.values())
        output.scheduled_spec_decode_tokens = spec
        output.finished_req_ids, self._ended = self._ended, set()
        fresh = {request.req_id for request in new}
        old = [name for name in scheduled if name not in fresh]
        cached = CachedRequestData.make_empty()
        cached.req_ids = old
        progress = self._runs.progress(old)
        cached.num_computed_tokens, cached.num_output_tokens = progress
        cached.new_block_ids = [None] * len(old)
        output.scheduled_cached_reqs = cached
        self._runs.run(output, steps, take)

    def _request(self, name: str, context: int, rows: int) -> Any:
        from vllm import SamplingParams
        from vllm.v1.core.sched.output import NewRequestData

        tokens = self._tokens(context + rows)
        blocks = []
        for size in self._block_sizes:
            count = -(-(len(tokens) + self._growth + self._steps) // size)
            blocks.append(list(range(self._next_block, self._next_block + count)))
            self._next_block += count
        if self._next_block > self._num_blocks:
            raise RuntimeError("a profile's requests do not fit the KV cache")
        return NewRequestData(
            req_id=name,
            prompt_token_ids=tokens,
            mm_features=[],
            sampling_params=SamplingParams(temperature=0.0, max_tokens=self._growth),
            pooling_params=None,
            block_ids=tuple(blocks),
            num_computed_tokens=context,
            lora_request=None,
            prefill_token_ids=tokens,
        )

    def _lengths(self, verified: int) -> list[int]:
        """Random lengths up to K, as a verifier's choice would be, with that sum.

        Where nothing is chosen per request, the same length for all, near that sum.
        """
        num = len(self._running)
        if self._runs.uniform:
            return [round(verified / num)] * num
        share = min(verified / (num * self._steps), 1.0)
        lengths = self._random.binomial(self._steps, share, num)
        while (missing := verified - int(lengths.sum())) != 0:
            step = 1 if missing > 0 else -1
            movable = np.nonzero(lengths < self._steps if step > 0 else lengths > 0)[0]
            chosen = self._random.permutation(movable)[: abs(missing)]
            lengths[chosen] += step
        return [int(length) for length in lengths]

    def _tokens(self, count: int) -> list[int]:
        return self._random.integers(0, self._vocab, count).tolist()

    def _name(self) -> str:
        self._count += 1
        return f"{_PREFIX}{self._count}"


@contextmanager
def _undisturbed(worker: Any) -> Iterator[None]:
    """Made-up requests must reach neither the trainer nor the policy."""
    tide, control = worker.tide, worker.tide.control
    capture, policy = tide.capture, control.policy
    tide.capture = control.policy = None
    states = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(states)
        tide.capture, control.policy = capture, policy


def measure_engine(
    model: str,
    draft: str,
    *,
    num_speculative_tokens: int,
    dtype: str = "auto",
    quick: bool = False,
    seconds: float | None = None,
    serve_args: Sequence[str] = (),
) -> tuple[list[RoundSample], dict[str, Any]]:
    """Starts an engine in this process, measures it and stops it.

    Args:
        seconds: Time to spend; None: by `quick`.

    Returns:
        The measured rounds of the leading rank, and the facts they hold for.
    """
    arguments = ["--dtype", dtype, *serve_args]
    with open_engine(model, draft, num_speculative_tokens, arguments) as engine:
        ranks = engine.collective_rpc(
            measure_worker, args=(quick, num_speculative_tokens, seconds)
        )
    samples, facts = ranks[0]
    return samples, facts


@contextmanager
def open_engine(
    model: str, draft: str, num_speculative_tokens: int, serve_args: Sequence[str]
) -> Iterator[Any]:
    """A controlled vLLM engine in this process, as `LLMEngine`."""
    # The engine core in this process: the worker is reached without serialisation.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from huggingface_hub.errors import HfHubHTTPError
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.llm_engine import LLMEngine

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog="vllm-tide profile"))
    words = parser.parse_args(["--model", model, *serve_args])
    words.speculative_config = {
        "method": "eagle3",
        "model": draft,
        "num_speculative_tokens": num_speculative_tokens,
        "tide": {
            "capture": {"enabled": False},
            "swap": {"enabled": False},
            # Needs no times, so that it starts on Model Runner V2 too.
            "control": {"policy": "threshold"},
        },
    }
    try:
        config = EngineArgs.from_cli_args(words).create_engine_config()
    except (OSError, ValueError, HfHubHTTPError) as error:
        said = " ".join(str(error).split()).partition(" [type=")[0]
        raise ConfigError(
            f"vLLM cannot serve target {model!r} with draft {draft!r}: {said}"
        ) from error
    engine = LLMEngine.from_vllm_config(config)
    try:
        yield engine
    finally:
        engine.engine_core.shutdown()


def measure_worker(
    worker: Any, quick: bool, num_speculative_tokens: int, seconds: float | None
) -> tuple[list[RoundSample], dict[str, Any]]:
    """Measure inside a worker; arguments as in `measure_engine`."""
    samples = measure(
        worker,
        quick=quick,
        num_speculative_tokens=num_speculative_tokens,
        budget_s=seconds,
    )
    return samples, facts(worker)
