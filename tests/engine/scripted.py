"""Policies that a work names, and a memory with full certainty."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np


class Scripted:
    """A policy that follows a script and ignores what it observes.

    Args:
        script: [steps, most verified (-1: a random prefix)] per engine step, cycled.

    Attributes:
        outcomes: Tokens that the adapter reported, since this policy was set.
        confidences: The draft's confidences, per pass.
    """

    def __init__(self, script: list[list[int]], seed: int = 0) -> None:
        self.script = script
        self.random = np.random.default_rng(seed)
        self.step = -1
        self.size = 0
        self.limit = [0, 0]
        self.drafted = 0
        self.confidences: list[list[float]] = []
        self.outcomes = {"verified": 0, "accepted": 0, "emitted": 0}
        self.memory = self.remembered = None

    def plan(self, batch, now):
        """Plan the script's next line."""
        from vllm_tide.control.batch import Plan

        self.step += 1
        self.size = len(batch.slots)
        self.memory = batch.memory
        self.limit = self.script[self.step % len(self.script)]
        self.drafted = 0
        return Plan(self.limit[0], "script")

    def go_on(self, step, confidence):
        """Continue until the script's number of steps."""
        assert len(confidence) == self.size
        self.drafted = step
        self.confidences.append([float(value) for value in confidence])
        return step < self.limit[0]

    def take_block(self, confidences):
        """Take all tokens of a block, of which the script's number may be verified."""
        assert confidences.shape[1] == self.size
        self.drafted = min(len(confidences), self.limit[0])
        self.confidences += [[float(value) for value in row] for row in confidences]

    def choose(self):
        """Choose a random prefix of each request's drafts, or all of them."""
        most = min(self.limit[1], self.drafted)
        lengths = np.full(self.size, most)
        if self.limit[1] < 0:
            lengths = self.random.integers(0, self.drafted + 1, self.size)
        self.remembered = None
        if self.memory is not None:
            # Either source at any length.
            there = (self.memory.survival >= 0).sum(axis=0)
            self.remembered = (self.random.random(self.size) < 0.6) & (there > 0)
            other = self.random.integers(0, there + 1)
            lengths = np.where(self.remembered, other, lengths)
        return lengths

    def observe(self, outcome):
        """Add up what the adapter reports."""
        self.outcomes["verified"] += int(outcome.verified.sum())
        self.outcomes["accepted"] += int(outcome.accepted.sum())
        self.outcomes["emitted"] += int(outcome.emitted.sum())

    def add(self, slot, sampled, now):
        """Store nothing."""

    def drop(self, slot):
        """Forget nothing."""

    def draft_swapped(self):
        """Learn nothing."""

    def stats(self):
        """Return the numbers that an adapter reads for its report."""
        return {
            "steps": self.step,
            "draft_passes": 0,
            "steps_by_depth": [],
            "steps_without_drafts": {},
        }


def policy_of(script: Any, control: Any) -> Any:
    """Return the policy of a script, or the real one of that name."""
    from vllm_tide.control.policies import AdaSpecPolicy, ControlSettings, StaticPolicy
    from vllm_tide.control.step_times import StepTimes

    if not isinstance(script, str):
        return Scripted(script)
    if script == "static":
        return StaticPolicy(control.num_speculative_tokens)
    root = Path(__file__).parents[2]
    sys.path[:0] = [str(root), str(root / "scripts")]
    from tests.control.toys import published

    most = control.num_speculative_tokens
    settings = ControlSettings(k_max=most, max_requests=control.capacity)
    assert script == "adaspec", script
    return AdaSpecPolicy(settings, StepTimes(published("Llama-3.3-70B")))


def spoilt(logits: Any, changes: list[list[Any]]) -> None:
    """Change a draft's logits in place.

    Args:
        logits: [n, V].
        changes: In order, of ["scale", by], ["permute", seed] and
            ["fill", share of the entries, value, seed].
    """
    import torch

    for kind, number, *more in changes:
        if kind == "scale":
            logits.mul_(number)
        elif kind == "permute":
            random = torch.Generator().manual_seed(number)
            order = torch.randperm(logits.shape[1], generator=random)
            logits.copy_(logits[:, order])
        else:
            value, seed = more
            random = torch.Generator().manual_seed(seed)
            chosen = torch.rand(logits.shape, generator=random) < number
            logits.masked_fill_(chosen, float(value))


class Garbage:
    """Makes memories propose random tokens with full certainty while it is enabled."""

    def __init__(self) -> None:
        self.on = False

    def on_v1(self) -> None:
        """Replace the lookup of Model Runner V1."""
        from vllm_tide.memory.ngram import NgramIndex

        inner, random = NgramIndex.propose, np.random.default_rng(0)

        def propose(index, slots, text):
            tokens, matched = inner(index, slots, text)
            if not self.on:
                return tokens, matched
            return random.integers(0, 256, tokens.shape), np.full(len(slots), 16)

        NgramIndex.propose = propose

    def on_v2(self) -> None:
        """Replace the lookup on the device, for Model Runner V2."""
        import torch

        from vllm_tide.kernels.ngram_memory import NgramTable

        inner, random = NgramTable.choose, torch.Generator().manual_seed(0)

        def choose(table, slots, sampled, total, texts, longest, drafts, depth, sure):
            own = drafts[:, 0].clone()
            inner(table, slots, sampled, total, texts, longest, drafts, depth, sure)
            if self.on:
                shape = drafts[:, :depth].shape
                drafts[:, :depth] = torch.randint(0, 256, shape, generator=random)
                table.first[: len(slots)] = -1 - own
                table.is_memory[slots] = 1

        NgramTable.choose = choose
