"""The n-gram memory on Model Runner V2 (`tide.test_time.memory`), on the device.

Order of calls in a step: `grade` (after sampling, before the draft), `propose` (after
the draft). The choice of source is encoded in the sign of the first drafted token
(`first_tokens`), which the host decodes when the step has landed (`from_memory`).

The draft always runs, because Model Runner V2 fixes a step's depth in advance. The
memory proposes as many tokens as the draft.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from vllm_tide.capture.guard import Guard
from vllm_tide.capture.step import Step
from vllm_tide.control.acceptance import HALF_LIFE_TOKENS
from vllm_tide.kernels.ngram_memory import NgramTable
from vllm_tide.memory.source import DRAFT, MEMORY, PRIOR, SHRINK, SWAP_KEEP

# All ranks must retry at the same step, so suspensions are counted in steps.
_STEP_S = 0.02


class MemoryV2:
    """Replacement of drafts by n-gram matches that are predicted to be better.

    Attributes:
        guard: Contains faults; after one the index of all texts is rebuilt.
    """

    def __init__(self, runner: Any) -> None:
        self._states, self._speculator = runner.req_states, runner.speculator
        depth = runner.num_speculative_steps
        self._table = NgramTable(
            runner.max_num_reqs,
            runner.max_model_len,
            depth,
            runner.device,
            (float(PRIOR[DRAFT]), float(PRIOR[MEMORY])),
            SHRINK,
            HALF_LIFE_TOKENS,
        )
        self._steps = self._graded = 0
        self._chose = False
        ranks = runner.vllm_config.parallel_config.tensor_parallel_size
        self.guard = Guard(
            "the n-gram memory", lambda: _STEP_S * self._steps, contains=ranks == 1
        )
        self._warm_up()

    def begin(self) -> None:
        self._steps += 1
        self._chose = False
        self.guard.retry()

    def draft_swapped(self) -> None:
        """Discount the statistics of the old draft after a swap."""
        self._table.counts[DRAFT].mul_(SWAP_KEEP)

    def grade(
        self, slots: Tensor, sampled: Tensor, num_sampled: Tensor, rejected: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Update acceptance statistics with a step's tokens.

        Args:
            slots: int64 [n].
            sampled: int64 [n, w], the step's tokens.
            num_sampled, rejected: int32 [n].

        Returns:
            `num_sampled` and `rejected` for the draft's acceptance estimator: without
            the results of the memory's tokens.
        """
        self._contain(
            "memory_grade", self._grade, slots, sampled, num_sampled, rejected
        )
        if self._graded != self._steps:
            return num_sampled, rejected
        seen = self._table.seen[:, : len(slots)]
        return seen[0], seen[1]

    def propose(
        self, batch: Any, num_sampled: Tensor, drafts: Tensor, depth: int
    ) -> None:
        """Overwrite drafts with a lower expected acceptance than the memory's.

        Args:
            batch: vLLM's `InputBatch` (V2).
            num_sampled: int32 [n].
            drafts: int64 [n, K], of which `depth` were drafted.
        """
        if self._graded == self._steps:
            self._contain(
                "memory_propose", self._propose, batch, num_sampled, drafts, depth
            )

    def first_tokens(self, drafts: Tensor) -> Tensor:
        """Return the first tokens for `from_memory`: int64 [>= n, 1].

        Args:
            drafts: int64 [>= n, K]; returned if the memory proposed nothing.
        """
        return self._table.first[:, None] if self._chose else drafts

    @staticmethod
    def from_memory(step: Step) -> np.ndarray:
        """Return which requests have the memory's drafts; decode `step.drafted`."""
        first = np.asarray(step.drafted)
        memory = (first < 0) & (step.steps > 0)
        step.drafted = np.where(memory, -1 - first, first)
        return memory

    def _contain(self, where: str, call: Any, *args: Any) -> None:
        before = self.guard.faults.total()
        self.guard.run(where, call, *args)
        if self.guard.faults.total() != before:
            self.guard.always("memory_forget", self._table.forget)

    def _grade(
        self, slots: Tensor, sampled: Tensor, num_sampled: Tensor, rejected: Tensor
    ) -> None:
        self._table.grade(
            slots,
            sampled,
            num_sampled,
            rejected,
            self._states.total_len.gpu,
            self._states.prefill_len.gpu,
        )
        self._graded = self._steps

    def _propose(
        self, batch: Any, num_sampled: Tensor, drafts: Tensor, depth: int
    ) -> None:
        states, speculator = self._states, self._speculator
        confidence = None
        if speculator.acceptance_estimator is not None:
            confidence = speculator.draft_token_confidence_probs
        self._table.choose(
            batch.idx_mapping,
            num_sampled,
            states.total_len.gpu,
            states.all_token_ids.gpu,
            # Computed tokens, and the one that was sampled.
            int(batch.seq_lens_cpu_upper_bound[: batch.num_reqs].max()) + 1,
            drafts,
            depth,
            confidence,
        )
        self._chose = True

    def _warm_up(self) -> None:
        """Compile the kernels, with a step without tokens."""
        table, states = self._table, self._states
        one = table.first.new_zeros(1)
        drafts = table.first.new_zeros(1, table.most)
        none = table.known.new_zeros(1)
        total_len = states.total_len.gpu
        table.grade(one, drafts, none, none, total_len, states.prefill_len.gpu)
        confidence = None
        if self._speculator.acceptance_estimator is not None:
            confidence = self._speculator.draft_token_confidence_probs
        texts = states.all_token_ids.gpu
        table.choose(one, none, total_len, texts, 1, drafts, 0, confidence)
