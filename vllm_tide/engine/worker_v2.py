"""TIDE's part of the worker on Model Runner V2: the runner's hooks.

Calls before any step: `attach`, `make_verification`, `plan_graphs`. Order of calls in
a step: `begin_step`, `on_logits`, `before_draft`, `on_draft_logits` in each draft pass
(on a GPU inside its captured graph), `on_first_draft_pass`, `on_drafted`, `on_step`,
`choose_drafts` with synchronous scheduling.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vllm_tide.capture.guard import Guard
from vllm_tide.capture.step import Step
from vllm_tide.config import TideConfig
from vllm_tide.engine.adaptive_arguments import offered, replay_each, rounded
from vllm_tide.engine.control_v2 import ControlV2
from vllm_tide.engine.steps import ConfidenceTable, StepLog
from vllm_tide.engine.timers import EventTimer, HostClock, Reading
from vllm_tide.engine.worker import WorkerTide

if TYPE_CHECKING:
    from vllm_tide.control.time_model import TimeModel
    from vllm_tide.engine.verification import StepCostVerification


logger = logging.getLogger("vllm.tide")

# Prefixes of upstream's warm-up requests, which compile kernels.
DUMMY_REQUEST_PREFIXES = ("_warmup_", "_v2_mixed_warmup", "_sparse_mla_v2_warmup")


class WorkerTideV2(WorkerTide[ControlV2]):
    """TIDE in one worker with Model Runner V2."""

    _block = False  # one draft pass drafts all tokens

    def __init__(self, worker: Any, config: TideConfig) -> None:
        runner = worker.model_runner
        depth = runner.num_speculative_steps
        self._runner = runner
        self._async = bool(worker.vllm_config.scheduler_config.async_scheduling)
        self._log = StepLog(
            runner.max_num_tokens, runner.max_num_reqs, depth, runner.device
        )
        self.max_steps = len(self._log.buffers)
        speculative = worker.vllm_config.speculative_config
        self._block = bool(speculative.parallel_drafting)
        self._confidences = ConfidenceTable(
            runner.max_num_reqs, depth, runner.vocab_size, runner.device, self._block
        )
        # Separate from capture's guard: control continues while capture is suspended.
        self._steps = Guard("reading steps")
        self._is_dummy = False
        self._lengths: list[int] = []  # draft lengths with captured graphs
        self._step: Step | None = None  # opened, and not filled yet
        self._number = 0  # of the step
        # Landed steps by number, with the requests that had the memory's drafts.
        self._settled: list[tuple[int, list[str]]] = []
        self._adaptive = bool(speculative.enable_adaptive_verification)
        self._verification: StepCostVerification | None = None
        super().__init__(worker, config)

    def attach(self) -> None:
        """Set the attribute `tide` of the runner and its speculator."""
        runner = self._runner
        runner.tide = runner.speculator.tide = self
        if self.control is None:
            return
        if self._config.test_time.memory == "ngram":
            from vllm_tide.engine.memory_v2 import MemoryV2

            self.control.memory = MemoryV2(runner)
        if runner.device.type != "cpu":
            speculative = self._worker.vllm_config.speculative_config
            table = speculative.num_speculative_tokens_per_batch_size
            if self._config.control.policy != "static" and table:  # none: DP ranks
                self._lengths = offered(
                    runner.num_speculative_steps, runner.max_num_reqs
                )
            self.control.lengths = self._lengths
            # It measures nothing, so it does not need the KV cache.
            self.warm_up()

    def plan_graphs(self, init: Callable[[Any], None], mode: Any) -> None:
        """Create the draft's graph managers and plan graphs for each length (hook).

        Args:
            init: Upstream's method, which takes the `CUDAGraphMode`.
        """
        runner = self._runner
        if runner.device.type == "cpu":
            init(mode)
            return
        speculative = self._worker.vllm_config.speculative_config
        table = speculative.num_speculative_tokens_per_batch_size
        if self._block:  # the draft has one length
            speculative.num_speculative_tokens_per_batch_size = None
        init(mode)
        speculative.num_speculative_tokens_per_batch_size = table
        draft = None if self._block else runner.speculator.prefill_cudagraph_manager
        replay_each(runner.cudagraph_manager, draft, self._lengths)

    def make_verification(self, create: Callable[..., Any], **upstream: Any) -> Any:
        """Create vLLM's manager of adaptive verification with TIDE's costs (hook).

        Args:
            create: Upstream's factory. It returns None if the option is off, and raises
                for attention backends without graphs for mixed lengths.

        Returns:
            The manager, or None.
        """
        try:
            if create(**upstream) is None:
                return None
        except ValueError as error:
            self._do_without_verification(error)
            return None
        from vllm_tide.engine.verification import EXPLORE_SHARE, StepCostVerification

        control = self._config.control
        self._verification = StepCostVerification(
            self.control,
            EXPLORE_SHARE if control.probe_share else 0.0,
            self._start_with if control.policy == "adaspec" else None,
            self._block,
            self._group is None,
            **{name: upstream[name] for name in StepCostVerification.UPSTREAM},
        )
        return self._verification

    def _start_with(self, times: TimeModel) -> None:
        """Start the policy with the times that vLLM measured after graph capture."""
        if self.control is not None and self._leader:
            from vllm_tide.engine.policy_start import start_policy

            start_policy(self._worker, self.control, self._config.control, times)

    def _do_without_verification(self, error: ValueError) -> None:
        """Switch adaptive verification off: a step has one length for all requests."""
        if self._leader:
            logger.warning(
                "vllm_tide: %s Until then tide.control limits the length of each step "
                "equally for all its requests, in the scheduler.",
                error,
            )
        runner, self._adaptive = self._runner, False
        for part in (
            runner.speculator,
            runner.rejection_sampler,
            self._worker.vllm_config.speculative_config,
        ):
            part.enable_adaptive_verification = False
        runner.speculator.acceptance_estimator = None
        if self.control is not None:
            on_host = runner.device.type == "cpu"
            self.control.trims = on_host and not self._async
            self.control.cut_on_device = False
            if not on_host:
                self.warm_up()

    def begin_step(self, scheduler_output: Any) -> None:
        """Install a draft on a directive, and remove ended requests (hook)."""
        scheduled = scheduler_output.num_scheduled_tokens
        # A warm-up step contains warm-up requests only.
        self._is_dummy = next(iter(scheduled), "").startswith(DUMMY_REQUEST_PREFIXES)
        if self._is_dummy:
            return
        self._between_steps(scheduler_output)
        self._steps.retry()
        if self._verification is not None:
            base = 0 if self.swapper is None else self.swapper.number
            self._verification.begin_step(scheduler_output, base)
        ended = tuple(scheduler_output.finished_req_ids)
        self._steps.run("begin", self._begin, ended, not scheduled)
        if self._steps.tripped:
            self._forget(ended)
        self._take_requests(scheduler_output)
        if self.control is not None:
            self.control.end(ended)
            if self.control.memory is not None:
                self.control.memory.begin()
            self.control.begin(scheduler_output)

    def on_logits(self, logits: torch.Tensor | None) -> None:
        """Process the target's raw logits before sampling (hook)."""
        if self.control is not None:
            self.control.target_ran()
        super().on_logits(logits)

    def before_draft(
        self,
        batch: Any,
        hidden_states: torch.Tensor,
        aux_hidden_states: Sequence[torch.Tensor],
        sampled_token_ids: torch.Tensor,
        *counts: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Open a step and stage its rows, before the draft overwrites them (hook).

        Args:
            batch: vLLM's `InputBatch` (V2).
            hidden_states: [>= rows, H], after the final norm.
            aux_hidden_states: num_aux tensors [>= rows, H].
            sampled_token_ids: int64 [n, w].
            counts: Sampled and rejected tokens, int32 [n] each.

        Returns:
            `counts` for the draft's acceptance estimator; see `MemoryV2.grade`.
        """
        if self._is_dummy:
            return counts
        self._steps.run("open", self._open, batch, hidden_states, aux_hidden_states)
        if self.control is None or self.control.memory is None:
            return counts
        return self.control.memory.grade(batch.idx_mapping, sampled_token_ids, *counts)

    def on_first_draft_pass(self) -> None:
        """Mark the launch of the draft's first pass, outside of its graph (hook)."""
        if self.control is not None:
            self.control.clock.first_drafted()

    def on_drafted(
        self, batch: Any, num_sampled: torch.Tensor, drafts: torch.Tensor, depth: int
    ) -> None:
        """Replace drafts by the n-gram memory's; see `MemoryV2.propose` (hook)."""
        if self.control is None or self._is_dummy:
            return
        if self._block:
            self.control.clock.first_drafted()
        if self.control.memory is not None:
            self.control.memory.propose(batch, num_sampled, drafts, depth)

    def on_draft_logits(
        self, logits: torch.Tensor, draft_step: torch.Tensor | None = None
    ) -> None:
        """Process the draft's logits of one draft pass (hook).

        Args:
            logits: [n, V], one row for each request of the batch, or padding; for a
                block see `ConfidenceTable.keep`.
            draft_step: int64 [], number of the pass, on the device for graph replay.
        """
        if draft_step is None or self.control is None:
            return
        if self._runner.speculator.acceptance_estimator is None:
            self._steps.run("draft_logits", self._confidences.keep, logits, draft_step)
        self.control.clock.drafted()  # the first pass runs in every step

    def on_step(
        self,
        output: Any,
        batch: Any,
        sampler_output: Any,
        hidden_states: torch.Tensor,
        aux_hidden_states: Sequence[torch.Tensor],
        num_drafted: int,
    ) -> None:
        """Record a step after all of it is enqueued; set `output.tide` (hook).

        Args:
            hidden_states: [>= rows, H], after the final norm.
            aux_hidden_states: num_aux tensors [>= rows, H].
        """
        if self._is_dummy:
            return
        reading = None
        self._number += 1
        if self.control is not None:
            reading = self.control.step_ends(num_drafted)
        self._steps.run(
            "step", self._record, batch, sampler_output, num_drafted, reading
        )
        if self._steps.tripped and self.control is not None:
            self._log.skip()
            self.control.stop()
        if self._leader:
            output.tide = self._reports.always("report", self._report)
            if self.control is not None:
                # Sent in each step: the scheduler broadcasts it with the next one.
                depth = self.control.depth
                if self._lengths:  # up, because control raises the depth by one
                    limited = self.control.limited  # a longer step may miss the limit
                    depth = rounded(depth, self._lengths, up=not limited)
                output.tide = {**(output.tide or {}), "depth": int(depth)}
                if self._verification is not None:
                    output.tide["step_costs"] = self.control.step_costs()
                if self.control.memory is not None:
                    # The source of a step's drafts is known when it has landed.
                    output.tide |= {"step": self._number, "settled": self._settled}
                    self._settled = []

    def warm_up(self) -> None:
        """Start the policy, after the models are loaded and before requests (hook)."""
        if self.control is None or not self._leader:
            return
        from vllm_tide.engine.policy_start import start_policy

        start_policy(self._worker, self.control, self._config.control)

    def _begin(self, ended: tuple[str, ...], empty: bool) -> None:
        if not self._log.begin(ended):
            self._forget(ended)
        elif empty:
            self._take_landed()

    def _open(self, batch: Any, *hidden: Any) -> None:
        if self.capture is None and self.control is None:
            return
        version = 0 if self.swapper is None else self.swapper.version
        prompt_len = self._runner.req_states.prompt_len.np
        self._step = step = self._log.open(batch, prompt_len, version)
        if self.capture is None:
            return
        if step is None:
            self.capture.dropped["behind"] += batch.num_tokens
            return
        self._guard.run("stage", self.capture.stage, step, *hidden)

    def _record(
        self, batch: Any, sampler_output: Any, num_drafted: int, reading: Reading | None
    ) -> None:
        step, self._step = self._step, None
        if step is not None and step.req_ids is batch.req_ids:
            step.reading, step.steps = reading, num_drafted
            step.number = self._number
            if self.control is not None:
                step.explored = self.control.explored
            if self._verification is not None:
                step.verify_chance = self._verification.verify_chance
            drafts = self._runner.speculator.draft_tokens
            if self.control is not None and self.control.memory is not None:
                drafts = self.control.memory.first_tokens(drafts)
            table = self._confidences.table
            estimator = self._runner.speculator.acceptance_estimator
            if estimator is not None and self.control is not None:
                self._confidences.take(estimator, batch.idx_mapping)
            self._log.fill(step, batch, sampler_output, table, drafts)
        self._take_landed()

    def _take_landed(self) -> None:
        """Observe and write the steps that have landed; on a CPU also this one.

        This takes up to a millisecond, several on a CPU, so it follows the launch of a
        step.

        With asynchronous scheduling a request's end is known one step late. Therefore a
        step is written after the next one has begun, which lists its ended requests.
        """
        for step in self._log.landed():
            if self.control is not None:
                self.control.learn(step)
            if step.memory is not None and self._leader:
                names = [step.req_ids[i] for i in np.flatnonzero(step.memory)]
                self._settled.append((step.number, names))
        for step in self._log.done(wait_for_next=self._async):
            overrun = step.ended or ()
            if self.capture is not None:
                skipped = overrun if self._async else ()
                self._guard.always("write", self.capture.write, step, skipped)
            self._forget(overrun)

    def _faults(self) -> Counter[str]:
        faults = super()._faults() + self._steps.faults
        if self.control is not None and self.control.memory is not None:
            faults += self.control.memory.guard.faults
        if self._verification is not None:
            faults += self._verification.guard.faults
        return faults

    def _open_control(self, worker: Any) -> None:
        control, runner = self._config.control, self._runner
        on_host = runner.device.type == "cpu"
        self.control = ControlV2(
            runner.max_num_reqs,
            runner.max_model_len,
            control,
            runner.num_speculative_steps,
            # On a GPU a step has not landed when its drafts go to the scheduler.
            trims=on_host and not (self._async or self._adaptive),
            clock=HostClock() if on_host else EventTimer(self.max_steps),
        )
        self.control.cut_on_device = self._adaptive
        cuts = self._adaptive or self.control.trims
        if control.verify and self._leader and not cuts:
            logger.info(
                "vllm_tide: tide.control.verify: each step has one draft depth for all "
                "requests; set enable_adaptive_verification to cut each request's "
                "drafts on the device."
            )
