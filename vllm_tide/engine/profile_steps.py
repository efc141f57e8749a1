"""How the made-up steps of a profile are run, on each of vLLM's model runners.

On V1 a step is over, and timed, when its calls return. On V2 it was only launched then:
with asynchronous scheduling the next one is launched before it is waited for, as the
engine does, so that on a GPU the launches hide behind the step before as they do while
serving. Times are those of the control's own clock, events on a GPU.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from vllm_tide.control.online_time import RoundSample
from vllm_tide.engine.event_timer import Reading

Take = Callable[[RoundSample], None]


class Steps(Protocol):
    """Runs a worker's steps.

    Attributes:
        uniform: Whether all requests of a step verify the same number of tokens there.
    """

    uniform: bool

    def progress(self, names: Sequence[str]) -> tuple[list[int], list[int]]:
        """Computed tokens and output tokens of requests, for `CachedRequestData`."""

    def run(self, output: Any, steps: int, take: Take) -> None:
        """Run a step.

        Args:
            output: vLLM's `SchedulerOutput`, whole but for the draft's length.
            steps: Draft steps.
            take: Gets its times, maybe only when a later step is run.
        """

    def settle(self) -> None:
        """Wait until every step has been taken."""


def steps_of(worker: Any) -> Steps:
    """What runs the steps of vLLM's worker, with its `tide`."""
    return StepsV2(worker) if worker.use_v2_model_runner else StepsV1(worker)


class StepsV1:
    """Steps of Model Runner V1.

    Args:
        worker: vLLM's worker.
    """

    uniform = False

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._control = worker.tide.control

    def progress(self, names: Sequence[str]) -> tuple[list[int], list[int]]:
        """See `Steps`."""
        states = [self._worker.model_runner.requests[name] for name in names]
        # All but the newest token are computed, as after any decoding step.
        computed = [state.num_tokens - 1 for state in states]
        return computed, [len(state.output_token_ids) for state in states]

    def run(self, output: Any, steps: int, take: Take) -> None:
        """See `Steps`."""
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
        """See `Steps`."""


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step of V2 that may still run.

    Attributes:
        output: What was scheduled.
        outcome: vLLM's `AsyncOutput`.
        read: Its times, once it has ended.
        ended: Happens when it has; None: it has.
        take: Gets the times.
    """

    output: Any
    outcome: Any
    read: Reading
    ended: torch.cuda.Event | None
    take: Take


class StepsV2:
    """Steps of Model Runner V2.

    Args:
        worker: vLLM's worker.
    """

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
        """See `Steps`; what is under way counts as accepted, as in the scheduler."""
        return [self._computed[name] for name in names], [1] * len(names)

    def run(self, output: Any, steps: int, take: Take) -> None:
        """See `Steps`."""
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
        while len(self._under_way) > self._ahead:
            self._land(self._under_way.popleft())

    def settle(self) -> None:
        """See `Steps`."""
        while self._under_way:
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
