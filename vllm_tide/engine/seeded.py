"""Sampling of requests with a `seed` on Model Runner V1, the same at every length.

vLLM draws such a request's noise from a generator that each drafted token moves on, so
the answer depends on the speculative lengths. Here the noise is a function of the seed
and of the token's position in the output, and a drafted token is accepted if and only
if it is the one that the target samples with that noise. So every token is the target's
own sample, whatever was drafted; a greedy draft's token x is still accepted with the
probability p(x) that rejection sampling gives it.
"""

from __future__ import annotations

from typing import Any

import torch

_MASK = 2**64 - 1


def _mix(value: int) -> int:
    """One output of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


class PositionNoise(torch.Generator):
    """A request's generator, whose numbers depend on its seed and a position only."""

    def __new__(cls, seed: int) -> PositionNoise:
        """A generator on the CPU; torch's takes a device in place of the seed."""
        return super().__new__(cls)

    def __init__(self, seed: int) -> None:
        self._key = _mix(seed & _MASK)

    def at(self, position: int) -> PositionNoise:
        """Begin the numbers of one position of the output."""
        self.manual_seed(_mix((self._key + position) & _MASK))
        return self

    def get_offset(self) -> int:
        """Always 0: vLLM takes back what an unfinished prefill drew, which is nothing.

        A CPU generator has no offset, so upstream's ends the engine there.
        """
        return 0

    def set_offset(self, offset: int) -> None:
        """Nothing to take back."""


class SeededSampling:
    """Samples the requests of a step that have a seed; the others are left alone.

    Args:
        runner: vLLM's `GPUModelRunner` (V1) or its CPU subclass.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner

    def begin(self, drafts: dict[str, list[int]]) -> None:
        """Before a step samples: set noise to each request's last possible position.

        Args:
            drafts: Drafted tokens that the step verifies, by request.
        """
        batch = self._runner.input_batch
        for i, generator in batch.generators.items():
            req_id = batch.req_ids[i]
            state = self._runner.requests[req_id]
            if not isinstance(generator, PositionNoise):
                generator = PositionNoise(state.sampling_params.seed)
                state.generator = batch.generators[i] = generator
            generator.at(len(state.output_token_ids) + len(drafts.get(req_id, ())))

    def sample_drafted(
        self,
        output: torch.Tensor,
        metadata: Any,
        logits: torch.Tensor,
        bonus: torch.Tensor,
    ) -> None:
        """Seam: put the target's own samples in place of rejection sampling's.

        Args:
            output: int32 [n, 1 + longest draft], tokens of the step, -1 where rejected;
                rows of seeded requests with drafts are written.
            logits: float32 [drafted tokens, V], after penalties, temperature, top-k and
                top-p.
            bonus: int32 [n, 1], the token after all drafted ones, already sampled.
        """
        batch, counts = self._runner.input_batch, metadata.num_draft_tokens
        seeded = [i for i in batch.generators if counts[i]]
        if not seeded:
            return
        ends = metadata.cu_num_draft_tokens.tolist()
        rows: list[int] = []
        noise: dict[int, PositionNoise] = {}
        for i in seeded:
            state = self._runner.requests[batch.req_ids[i]]
            first = len(state.output_token_ids)
            for j in range(counts[i]):
                made = PositionNoise(state.sampling_params.seed)
                noise[len(rows)] = made.at(first + j)
                rows.append(ends[i] - counts[i] + j)
        sampler = self._runner.sampler.topk_topp_sampler
        sampled, _ = sampler(logits[rows], noise, None, None)
        tokens, drafted = sampled.tolist(), metadata.draft_token_ids[rows].tolist()
        first = 0
        for i in seeded:
            own, guess = tokens[first : first + counts[i]], drafted[first:]
            first += counts[i]
            same = (a == b for a, b in zip(own, guess, strict=False))
            accepted = next((j for j, good in enumerate(same) if not good), counts[i])
            own = [*own, int(bonus[i])][: accepted + 1]
            output[i] = -1
            output[i, : len(own)] = torch.tensor(own, dtype=output.dtype)
