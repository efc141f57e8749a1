"""The made-up steps of a profile, and how each of vLLM's model runners runs them.

On V1 a step is over, and timed, when its calls return. On V2 it was only launched then:
with asynchronous scheduling the next one is launched before it is waited for, as the
engine does, so that on a GPU the launches hide behind the step before as they do while
serving. Times are those of the control's own clock, events on a GPU.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from vllm_tide.control.online_time import RoundSample
from vllm_tide.engine.timers import Reading


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the engine.

    Attributes:
        length: Most tokens of a request, with room for drafts.
        cached: Most tokens of all requests together in the KV cache.
        group: Most steps of a group: each lengthens its requests by some tokens.
    """

    requests: int
    rows: int
    length: int
    cached: int
    steps: int
    group: int


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a group.

    Attributes:
        prefill: Prompt tokens of one more request, all computed in this step; 0: none.
    """

    verified: int
    steps: int
    prefill: int = 0


@dataclass(frozen=True, slots=True)
class Group:
    """Requests of one context length.

    Attributes:
        context: Mean of the tokens each has in the KV cache when its first step begins.
        steps: Steps, in the order they are run.
    """

    requests: int
    context: int
    steps: tuple[Step, ...]

    @property
    def rows(self) -> int:
        return sum(self.requests + step.verified + step.prefill for step in self.steps)

    def thinned(self) -> Group:
        """About a third of the steps, among them the first two and the last."""
        last = len(self.steps) - 1
        kept = sorted({*range(0, last, 4), min(1, last), last})
        return replace(self, steps=tuple(self.steps[i] for i in kept))


# (share of the longest length verified per request, share drafted, prefill rows); first
# what every decision of a batch compares: nothing, and about one token of each.
_QUICK = (
    (0.0, 0.0, 0),
    (0.15, 0.15, 0),
    (0.4, 0.5, 0),
    (1.0, 1.0, 0),
    (0.15, 0.3, 96),
)
_FULL = (
    (0.0, 0.0, 0),
    (0.15, 0.15, 0),
    (0.0, 1.0, 0),
    (0.08, 0.3, 0),
    (0.3, 0.3, 0),
    (0.45, 0.7, 0),
    (0.6, 0.5, 0),
    (0.8, 1.0, 0),
    (1.0, 1.0, 0),
    (0.0, 0.3, 40),
    (0.15, 0.0, 150),
    (0.5, 0.5, 330),
)
_QUICK_CONTEXTS = (700, 60, 250)
_FULL_CONTEXTS = (600, 60, 1400, 200, 3800)


def groups(limits: Limits, *, quick: bool) -> Iterator[Group]:
    """Groups, the most telling first; for `quick` fewer of everything.

    A group is a batch of requests around one context length; its steps differ in what
    is verified, drafted and prefilled beside. Every round of groups has all batch
    sizes, so that a measurement that runs out of time lacks contexts rather than sizes;
    sizes ascend within it, because the cost of large ones is linear in their tokens
    anyway.
    """
    sizes = batch_sizes(limits.requests)
    contexts = _QUICK_CONTEXTS if quick else _FULL_CONTEXTS
    seen = set()
    for turn in range(1 if quick else len(contexts)):
        for i, requests in enumerate(sizes):
            most = min(limits.length, limits.cached // requests)
            context = min(contexts[(i + turn) % len(contexts)], most)
            steps = _steps(requests, limits, _QUICK if quick else _FULL)
            if context >= 1 and steps and (requests, context) not in seen:
                seen.add((requests, context))
                yield Group(requests, context, steps)


def batch_sizes(most: int) -> list[int]:
    """1, 2, 4, ... and the largest."""
    sizes = [1 << i for i in range(most.bit_length()) if 1 << i < most]
    return [*sizes, most]


def _steps(
    requests: int, limits: Limits, table: tuple[tuple[float, float, int], ...]
) -> tuple[Step, ...]:
    found = []
    for verified, drafted, prefill in table:
        tokens = round(verified * limits.steps * requests)
        steps = min(max(round(drafted * limits.steps), drafted > 0.0), limits.steps)
        if prefill and requests + 1 > limits.requests:
            continue
        prefill = min(prefill, limits.length, limits.rows - requests - tokens)
        if prefill >= 0 and requests + tokens + prefill <= limits.rows:
            found.append(Step(tokens, steps, prefill))
    found = list(dict.fromkeys(found))
    if len(found) > limits.group:
        chosen = np.linspace(0, len(found) - 1, limits.group).round().astype(int)
        found = [found[i] for i in chosen]
    return tuple(found)


Take = Callable[[RoundSample], None]


class StepsV1:
    """Steps of Model Runner V1.

    Attributes:
        uniform: Whether all requests of a step verify the same number of tokens there.
    """

    uniform = False

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._control = worker.tide.control

    def progress(self, names: Sequence[str]) -> tuple[list[int], list[int]]:
        """Computed tokens and output tokens of requests, for `CachedRequestData`."""
        states = [self._worker.model_runner.requests[name] for name in names]
        # All but the newest token are computed, as after any decoding step.
        computed = [state.num_tokens - 1 for state in states]
        return computed, [len(state.output_token_ids) for state in states]

    def run(self, output: Any, steps: int, take: Take) -> None:
        """Run a step; `take` gets its times, maybe only when a later step is run.

        Args:
            output: vLLM's `SchedulerOutput`, whole but for the draft's length.
        """
        control, worker = self._control, self._worker
        output.num_spec_tokens_to_schedule = control.num_speculative_tokens
        control.force(steps)
        control.on_round.append(take)
        try:
            worker.execute_model(output)
            worker.sample_tokens(None)
            worker.take_draft_token_ids()
        finally:
            control.on_round.pop()
            control.force(None)

    def settle(self) -> None:
        """Wait until every step has been taken."""


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step of V2 that may still run.

    Attributes:
        read: Its times, once it has ended.
        ended: Happens when it has; None: it has.
    """

    output: Any
    outcome: Any
    read: Reading
    ended: torch.cuda.Event | None
    take: Take


class StepsV2:
    """Steps of Model Runner V2."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._runner = runner = worker.model_runner
        self._control = worker.tide.control
        self.uniform = not self._control.trims
        asynchronous = worker.vllm_config.scheduler_config.async_scheduling
        self._ahead = 1 if asynchronous else 0
        self._random = torch.Generator(runner.device).manual_seed(0)
        self._computed: dict[str, int] = {}
        self._under_way: deque[_Launched] = deque()

    def progress(self, names: Sequence[str]) -> tuple[list[int], list[int]]:
        """Tokens so far; those under way count as accepted, as in the scheduler."""
        return [self._computed[name] for name in names], [1] * len(names)

    def run(self, output: Any, steps: int, take: Take) -> None:
        for name in output.finished_req_ids:
            self._computed.pop(name, None)
        for new in output.scheduled_new_reqs:
            self._computed[new.req_id] = new.num_computed_tokens
        # On V2 drafts are where the last step left them, on the device: no token (-1)
        # where it drafted less than is verified now.
        drafts, vocab = self._runner.req_states.draft_tokens, self._runner.vocab_size
        drafts.random_(0, vocab, generator=self._random)
        output.num_spec_tokens_to_schedule = steps
        self._worker.execute_model(output)
        outcome = self._worker.sample_tokens(None)
        for name, tokens in output.num_scheduled_tokens.items():
            self._computed[name] += tokens
        ended = None
        if self._runner.device.type != "cpu":
            ended = torch.cuda.Event()
            ended.record()
        read = self._control.reading
        self._under_way.append(_Launched(output, outcome, read, ended, take))
        self.settle(self._ahead)

    def settle(self, ahead: int = 0) -> None:
        while len(self._under_way) > ahead:
            self._land(self._under_way.popleft())

    def _land(self, step: _Launched) -> None:
        if step.ended is not None:
            step.ended.synchronize()
        found = step.outcome.get_output()
        drafted = step.output.scheduled_spec_decode_tokens
        for name, tokens in zip(found.req_ids, found.sampled_token_ids, strict=True):
            drafts = len(drafted.get(name, ()))
            if name in self._computed:
                accepted = min(max(len(tokens) - 1, 0), drafts)
                self._computed[name] -= drafts - accepted
        sample = step.read()
        if sample is not None:
            step.take(sample)


def steps_of(worker: Any) -> StepsV1 | StepsV2:
    return StepsV2(worker) if worker.use_v2_model_runner else StepsV1(worker)
