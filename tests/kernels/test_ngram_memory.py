"""The memory on a device: its proposals, counts and writes, per request.

The reference keeps whole texts and searches them position by position.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vllm_tide.kernels import ngram_memory as op
from vllm_tide.kernels.ngram_memory import NgramTable
from vllm_tide.memory.source import MATCHES

K, R = 4, 5
PRIOR, SHRINK, HALF_LIFE = (0.6, 0.4), 8.0, 50.0
DRAFT, MEMORY = 0, 1
LONGEST = 4000


def follow(text, window):
    """Return what followed the last match of the text's end, and the match length."""
    best = (0, 0, 0)
    low = max(len(text) - window, 0)
    for end in range(low + 1, len(text)):
        run = 0
        while run < 8 and end - run > low and text[end - 1 - run] == text[-1 - run]:
            run += 1
        order = sum(run >= size for size in (2, 3, 5))
        best = max(best, (order, end, run) if order else best)
    order, end, run = best
    if not order:
        return [-1] * K, 0
    return [text[end + k % (len(text) - end)] for k in range(K)], run


class Reference:
    """The same memory by loops, in float64."""

    def __init__(self, window):
        self.window = window
        self.texts: dict[int, list[int]] = {}
        self.proposed: dict[int, tuple[list[list[int]], int, bool]] = {}
        self.counts = np.zeros((2, 2, len(MATCHES) + 1, K))

    @property
    def chance(self):
        tries, hits = self.counts[:, 0], self.counts[:, 1]
        prior = np.array(PRIOR)[:, None]
        mean = (hits.sum(2) + SHRINK * prior) / (tries.sum(2) + SHRINK)
        return (hits + SHRINK * mean[:, :, None]) / (tries + SHRINK)

    def grade(self, came):
        """`came`: tokens by slot."""
        labels, correct = [0, 0], []
        for slot, tokens in came.items():
            if slot not in self.proposed or not tokens:
                continue
            proposed, bucket, _ = self.proposed[slot]
            for source in (DRAFT, MEMORY):
                for k, guess in enumerate(proposed[source]):
                    if guess < 0 or k >= len(tokens):
                        break
                    labels[source] += 1
                    correct.append((source, bucket, k, guess == tokens[k]))
                    if guess != tokens[k]:
                        break
        for source in (DRAFT, MEMORY):
            self.counts[source] *= 0.5 ** (labels[source] / HALF_LIFE)
        for source, bucket, k, right in correct:
            self.counts[source, 0, bucket, k] += 1
            self.counts[source, 1, bucket, k] += right

    def choose(self, slot, drafts, depth):
        """Return the chosen drafts, and the gain of the memory's."""
        tokens, run = follow(self.texts[slot], self.window)
        bucket = int(np.searchsorted(MATCHES, run, side="right"))
        worth = np.cumprod(self.chance[:, bucket, :depth], axis=1).sum(axis=1)
        gain = worth[MEMORY] - worth[DRAFT] if run else -1.0
        self.proposed[slot] = ([drafts[:depth], tokens], bucket, gain > 0)
        return (tokens[:depth] + drafts[depth:] if gain > 0 else drafts), gain


class Rig:
    """Both memories, fed with the same requests."""

    def __init__(self, window=1 << 15, seed=0):
        device = torch.get_default_device()
        self.table = NgramTable(R, LONGEST, K, device, PRIOR, SHRINK, HALF_LIFE, window)
        self.reference = Reference(self.table.window)
        self.texts = torch.zeros(R, LONGEST, dtype=torch.int32)
        self.total = torch.zeros(R, dtype=torch.int32)
        self.prefill = torch.zeros(R, dtype=torch.int32)
        self.random = np.random.default_rng(seed)
        self.choices: list[tuple[int, int, float]] = []

    def admit(self, slot, prompt):
        """Admit another request to the slot without notice to the table."""
        self.texts[slot, : len(prompt)] = torch.tensor(prompt, dtype=torch.int32)
        self.total[slot] = self.prefill[slot] = len(prompt)
        self.reference.texts[slot] = list(prompt)
        self.reference.proposed.pop(slot, None)

    def step(self, came, drafts, depth=K, sure=None):
        """Run one step: tokens by slot (none inside of a prompt); the chosen drafts."""
        slots, n = list(came), len(came)
        sampled = torch.full((n, K + 1), -1)
        for i, slot in enumerate(slots):
            tokens, at = came[slot], int(self.total[slot])
            sampled[i, : len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
            self.texts[slot, at : at + len(tokens)] = sampled[i, : len(tokens)]
            self.total[slot] += len(tokens)
            self.reference.texts[slot] += tokens
        names = torch.tensor(slots)
        num = torch.tensor([len(came[slot]) for slot in slots], dtype=torch.int32)
        rejected = torch.tensor([7] * n, dtype=torch.int32)
        whose = self.table.is_memory[names].clone()
        self.table.grade(names, sampled, num, rejected, self.total, self.prefill)
        self.reference.grade(came)
        counts, chance = self.table.counts.cpu(), self.table.chance.cpu()
        np.testing.assert_allclose(counts, self.reference.counts, rtol=1e-5)
        np.testing.assert_allclose(chance, self.reference.chance, rtol=1e-5)
        seen = self.table.seen[:, :n]
        assert torch.equal(seen[0], torch.where(whose > 0, num.clamp(max=1), num))
        assert torch.equal(seen[1], torch.where(whose > 0, 0, rejected))
        given = torch.tensor([drafts[slot] for slot in slots])
        made = given.clone()
        self.table.choose(
            names,
            num,
            self.total,
            self.texts,
            int(self.total.max()) + 3,
            made,
            depth,
            sure,
        )
        for i, slot in enumerate(slots):
            stands = drafts[slot]
            if came[slot]:
                stands, gain = self.reference.choose(slot, drafts[slot], depth)
                assert abs(gain) > 1e-5, "no choice here hangs on rounding"
                self.choices.append((slot, self.reference.proposed[slot][1], gain))
                first = -1 - drafts[slot][0] if gain > 0 else drafts[slot][0]
                assert self.table.first[i] == first
            assert made[i].tolist() == stands
        return made.tolist()


def live(window, steps, seed=4):
    """Add, end and suspend requests in turn; some texts repeat, and some do not."""
    rig = Rig(window, seed=seed)
    random = rig.random
    lives: dict[int, int] = {}
    for _ in range(steps):
        for slot in range(R):
            if lives.get(slot, 0) == 0 and random.random() < 0.5:
                size = int(random.choice([2, 5, 40, 1500]))
                period = int(random.choice([3, 9, 9, 2000]))
                base = random.integers(0, 3000, period)
                rig.admit(slot, np.resize(base, size).tolist())
                lives[slot] = int(random.integers(3, 14))
        came, drafts = {}, {}
        for slot in [s for s in random.permutation(R).tolist() if lives.get(s)]:
            text = rig.reference.texts[slot]
            lives[slot] -= 1
            count = int(random.integers(0, K + 2))
            guess, run = follow(text, rig.table.window)
            good = run and random.random() < 0.9
            tokens = guess + [5] if good else random.integers(0, 9, K + 1).tolist()
            came[slot] = tokens[:count]
            drafts[slot] = [*tokens[:1], 9, *random.integers(0, 9, K - 2).tolist()]
        if came:
            rig.step(came, drafts, int(random.integers(1, K + 1)))
    taken = [bucket for _, bucket, gain in rig.choices if gain > 0]
    left = [bucket for _, bucket, gain in rig.choices if gain < 0 and bucket]
    assert len(taken) > 8 and len(left) > 5
    assert (rig.reference.counts[MEMORY, 0].sum(axis=1) > 0).sum() >= 3, "buckets"
    assert rig.reference.counts[DRAFT, 1].sum() > 1


@pytest.mark.interpreted
@pytest.mark.parametrize(
    "window", [256, pytest.param(1 << 15, marks=pytest.mark.nightly)]
)
def test_it_equals_the_reference_over_many_requests(window):
    live(window, 24)


@pytest.mark.interpreted
def test_a_slots_next_request_gets_no_proposals_of_the_previous_one():
    rig = Rig()
    drafts = {0: [100] * K}
    rig.admit(0, [7] * 1100)
    for _ in range(4):
        rig.step({0: [7] * 3}, drafts)
    rig.reference.counts[:] = 0
    rig.reference.counts[MEMORY] = 100  # a high estimate
    rig.table.counts.copy_(torch.tensor(rig.reference.counts))
    assert rig.step({0: [7]}, drafts) == [[7] * K]
    rig.admit(0, [7, 3])  # as the previous one began: all its matches are beyond
    assert rig.step({0: []}, drafts) == [[100] * K]
    assert rig.step({0: [7, 7]}, drafts) == [[100] * K]
    # A preempted request comes back as a new one with a longer text.
    rig.admit(0, [*rig.reference.texts[0], 3, 7])
    assert rig.step({0: [7]}, drafts) == [[3, 7, 7, 3]]
    # A text that is not copied whole is neither searched nor known.
    names, num = torch.tensor([0]), torch.tensor([1], dtype=torch.int32)
    rig.admit(0, [7] * 2000)
    rig.total[0] += 1
    made = torch.tensor(drafts[0])[None]
    rig.table.choose(names, num, rig.total, rig.texts, 900, made, K, None)
    assert made.tolist() == [drafts[0]] and rig.table.known[0] == 0
    assert rig.table.is_memory[0] == 0


@pytest.mark.interpreted
def test_verify_chances_of_the_chosen_drafts_are_reported():
    rig = Rig()
    rig.reference.counts[MEMORY] = 100
    rig.table.counts.copy_(torch.tensor(rig.reference.counts))
    rig.admit(0, [7] * 20)
    rig.admit(2, [1, 2, 3, 4])
    sure = torch.full((R, K + 2), 0.5)[:, 1:-1]
    made = rig.step({2: [5], 0: [7]}, {0: [9] * K, 2: [8] * K}, 3, sure)
    assert made == [[8] * K, [7, 7, 7, 9]]
    assert sure[0].tolist() == [0.5] * K and sure[1, 3] == 0.5
    assert (sure[1, :3] > 0.9).all(), "it was nearly always right"


@pytest.mark.interpreted
def test_without_a_draft_nothing_is_proposed_but_everything_is_graded():
    rig = Rig()
    rig.admit(0, [1, 2, 3, 1, 2])
    none = {0: [-1] * K}
    names, num = torch.tensor([0]), torch.tensor([1], dtype=torch.int32)
    for token in (3, 1, 2):
        sampled = torch.full((1, 1), token)
        rig.texts[0, rig.total[0]] = token
        rig.total[0] += 1
        rig.table.grade(names, sampled, num, num, rig.total, rig.prefill)
        made = torch.tensor(none[0])[None]
        rig.table.choose(names, num, rig.total, rig.texts, 99, made, 0, None)
        assert made.tolist() == [none[0]] and rig.table.is_memory[0] == 0
        assert rig.table.first[0] == -1
    tries, hits = rig.table.counts[MEMORY]
    assert tries[:, 0].sum() == hits[:, 0].sum() > 1.5
    assert rig.table.counts[DRAFT].sum() == 0


def test_the_buckets_are_those_of_model_runner_v1():
    assert op._BUCKETS.value == len(MATCHES) + 1
    assert MATCHES == (2, 3, 4, 5, 8), "written out in the kernel"
    from vllm_tide.memory.ngram import MOST_MATCH, ORDERS

    assert op._MOST_MATCH.value == MOST_MATCH and ORDERS == (5, 3, 2)


def test_no_step_size_compiles_another_kernel():
    numbers = set()
    for variant in op.variants():
        numbers |= {name for name, kind in variant.types.items() if kind == "i32"}
    assert numbers == set(op._NUMBERS)


@pytest.mark.interpreted
def test_a_fault_is_contained_and_texts_are_read_again(monkeypatch):
    from types import SimpleNamespace as Of

    from vllm_tide.engine.memory_v2 import MemoryV2

    def on_device(values):
        return Of(gpu=torch.tensor(values, dtype=torch.int32))

    text = [[7] * 8]
    states = Of(
        total_len=on_device([4]),
        prefill_len=on_device([4]),
        all_token_ids=on_device(text),
    )
    speculator = Of(acceptance_estimator=None)
    sizes = {"max_num_reqs": 1, "max_model_len": 8, "num_speculative_steps": 2}
    device = torch.device("cpu")
    ranks = Of(tensor_parallel_size=1)
    runner = Of(
        req_states=states,
        speculator=speculator,
        device=device,
        vllm_config=Of(parallel_config=ranks),
        **sizes,
    )
    memory = MemoryV2(runner)
    assert memory._table.known.tolist() == [0], "compiling leaves nothing behind"
    memory._table.counts[MEMORY] = 100.0
    slots, one = torch.tensor([0]), torch.tensor([1], dtype=torch.int32)
    batch = Of(idx_mapping=slots, num_reqs=1, seq_lens_cpu_upper_bound=one + 7)

    def step():
        states.total_len.gpu[0] += 1
        memory.begin()
        seen = memory.grade(slots, torch.tensor([[7]]), one, one * 3)
        drafts = torch.tensor([[5, 6]])
        memory.propose(batch, one, drafts, 2)
        return drafts.tolist(), [int(x) for x in seen], memory.first_tokens(drafts)

    drafts, seen, first = step()
    assert drafts == [[7, 7]] and seen == [1, 3] and first.tolist() == [[-6]]
    drafts, seen, _ = step()
    assert drafts == [[7, 7]] and seen == [1, 0], "the estimator hears of the draft's"
    choose = NgramTable.choose
    monkeypatch.setattr(NgramTable, "choose", lambda *args: 1 // 0)
    drafts, _, first = step()
    assert drafts == [[5, 6]] == first.tolist()
    assert memory.guard.faults == {"memory_propose": 1}
    assert memory._table.known.tolist() == memory._table.is_memory.tolist() == [0]
    ranks.tensor_parallel_size = 2  # they would have different drafts
    with pytest.raises(ZeroDivisionError):
        MemoryV2(runner)._contain("memory_propose", lambda: 1 // 0)
    monkeypatch.setattr(NgramTable, "choose", choose)
    states.total_len.gpu[0] -= 1
    assert step()[0] == [[7, 7]] and memory._table.known[0] == 7
