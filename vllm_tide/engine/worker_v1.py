"""TIDE's part of the worker on Model Runner V1 (the CPU backend): the runner's hooks.

Order of calls in a step: `begin_step`, `has_drafts`, `on_logits`, `plan_draft`,
`on_draft_logits` and `draft_again` for each draft pass, `choose_drafts`, `on_sampled`.
All results of a step are on the host at its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from vllm_tide.capture.step import Step
from vllm_tide.config import TideConfig
from vllm_tide.engine.control_v1 import ControlV1
from vllm_tide.engine.trainer_process import use_one_blas_thread
from vllm_tide.engine.worker import WorkerTide


class WorkerTideV1(WorkerTide[ControlV1]):
    """TIDE in one worker with Model Runner V1."""

    def __init__(self, worker: Any, config: TideConfig) -> None:
        from vllm.v1.outputs import DraftTokenIds

        self._recurrent = bool(worker.vllm_config.model_config.is_hybrid)
        self._no_drafts = DraftTokenIds([], [])
        how = worker.vllm_config.speculative_config.draft_sample_method
        self._draws_drafts = how != "greedy"
        super().__init__(worker, config)

    def attach(self) -> None:
        """Set the attribute `tide` of the runner and its proposer."""
        runner = self._worker.model_runner
        runner.tide = runner.drafter.tide = self

    def begin_step(self, scheduler_output: Any) -> None:
        """Install a draft on a directive, and remove ended requests (hook)."""
        if self.control is not None:
            self.control.begin(scheduler_output)
        self._between_steps(scheduler_output)
        self._forget(tuple(scheduler_output.finished_req_ids))
        self._take_requests(scheduler_output)

    def plan_draft(
        self,
        num_tokens: int,
        scheduler_output: Any,
        sampled_token_ids: Any,
        aux_hidden_states: Any,
        attention: Any,
    ) -> int:
        """Return the maximal draft depth of this step; 0 skips the draft (hook)."""
        if self.control is None:
            return num_tokens
        return self.control.plan(
            scheduler_output, sampled_token_ids, aux_hidden_states, attention
        )

    def draft_again(self) -> bool:
        """Return whether the draft runs once more, after each draft pass (hook)."""
        return self.control is None or self.control.go_on()

    def warm_up(self) -> None:
        """Start the policy, after the KV cache exists and before requests (hook)."""
        if self.control is not None and self._leader:
            from vllm_tide.engine.policy_start import start_policy

            start_policy(self._worker, self.control, self._config.control)

    def has_drafts(self, scheduler_output: Any) -> bool:
        """Return whether a step takes the target's speculative path (hook).

        Recurrent layers read their state at an offset that only this path applies, so
        with them every step takes it. Otherwise only verify steps do.
        """
        return self._recurrent or bool(scheduler_output.scheduled_spec_decode_tokens)

    def on_draft_logits(self, logits: torch.Tensor) -> None:
        """Process the draft's logits of one pass; replace non-finite values (hook).

        Rejection sampling keeps the target's distribution for any draft distribution.
        For a row that is not a distribution vLLM's sampler returns token 0.
        """
        if self._draws_drafts:
            # They are divided by a temperature, which is at least 0.01 in vLLM.
            most = torch.finfo(logits.dtype).max / 128
            logits.nan_to_num_(0.0).clamp_(-most, most)
        if self.control is not None:
            # One fused softmax: four times faster here than max and logsumexp.
            confidence = torch.softmax(logits.float(), dim=-1).amax(dim=-1)
            self.control.on_draft_logits(confidence)

    def on_sampled(
        self,
        output: Any,
        scheduler_output: Any,
        hidden_states: torch.Tensor,
        aux_hidden_states: Sequence[torch.Tensor] | None,
    ) -> None:
        """Process the step's results and set `output.tide` to a report (hook)."""
        if self.capture is not None:
            self._guard.run(
                "sampled",
                self._capture,
                scheduler_output,
                output.sampled_token_ids,
                hidden_states,
                aux_hidden_states,
            )
        if self.control is not None:
            self.control.end()
        if self._leader:
            output.tide = self._reports.always("report", self._report)
            runner = self._worker.model_runner
            if not runner.use_async_scheduling:
                # A separate request for the drafts would cost two messages.
                drafts = self._no_drafts
                if self.control is None or not self.control.same:
                    drafts = runner.take_draft_token_ids()
                output.tide = {**(output.tide or {}), "drafts": drafts}
                if self.control is not None and self.control.verified_memory:
                    output.tide["memory"] = list(self.control.verified_memory)

    def _capture(
        self, scheduler_output: Any, sampled: list[list[int]], *hidden: Any
    ) -> None:
        assert self.capture is not None  # noqa: S101 (asked by `on_sampled`)
        version = 0 if self.swapper is None else self.swapper.version
        step = landed_step(
            self._worker.model_runner, scheduler_output, sampled, version
        )
        if self.control is not None:
            self._guard.run("cost", self.control.fill, step)
        self.capture.record(step, *hidden)

    def _open_control(self, worker: Any) -> None:
        use_one_blas_thread()
        facts = self._facts
        self.control = ControlV1(
            worker.model_runner,
            self._config.control,
            facts.num_speculative_tokens,
            len(facts.aux_layer_ids),
            facts.hidden_size,
            self.agree,
            self._leader,
            self._config.test_time.memory == "ngram",
            bool(worker.vllm_config.speculative_config.parallel_drafting),
        )


def landed_step(
    runner: Any, scheduler_output: Any, sampled: list[list[int]], version: int
) -> Step:
    """Return the `Step` that ends on Model Runner V1.

    Args:
        runner: vLLM's `GPUModelRunner` (V1) or its CPU subclass.
        sampled: Committed tokens by request; empty for a prefill chunk that is not
            the last.
        version: Version of the draft that runs after the step.
    """
    batch = runner.input_batch
    names = batch.req_ids
    n, spec = len(names), scheduler_output.scheduled_spec_decode_tokens
    given = [spec.get(name, ()) for name in names]
    drafts = np.array([len(tokens) for tokens in given], np.int32)
    padding = np.array([sum(t < 0 for t in tokens) for tokens in given], np.int32)
    counts = [len(tokens) for tokens in sampled]
    width = max(counts, default=1) or 1
    filled = [
        [*tokens, *[0] * (width - count)]
        for tokens, count in zip(sampled, counts, strict=True)
    ]
    return Step(
        req_ids=names,
        bounds=runner.query_start_loc.np[: n + 1],
        drafts=drafts,
        padding=padding,
        logit_ends=np.cumsum(drafts + 1),
        num_prompt_tokens=batch.num_prompt_tokens[:n],
        version=version,
        steps=1,  # drafts of a request that was not scheduled may be verified later
        start=batch.num_computed_tokens_cpu[:n],
        emitted=np.array(counts, np.int32),
        sampled=np.array(filled, np.int32).reshape(n, width),
        token_ids=runner.input_ids.np,
    )
