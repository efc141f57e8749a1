"""The sample buffer: shares, age, duplicates, stale branches, purge."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.train.toys import HIDDEN, ToyTarget
from vllm_tide.config import TrainConfig
from vllm_tide.train.reservoir import SampleBuffer, cap_factors, in_holdout
from vllm_tide.train.sample import Branch, Sample
from vllm_tide.transport.tenant import NO_TENANT

TOY = ToyTarget()
KNOBS = {
    "batch_tokens": 128,
    "buffer_tokens": 4096,
    "holdout_share": 0.3,
}
TRAIN_KEYS = [k for k in range(4000) if not in_holdout(k, 0.3)]
HOLDOUT_KEYS = [k for k in range(4000) if in_holdout(k, 0.3)]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr("vllm_tide.train.reservoir.WINDOW_TOKENS", 64)
    monkeypatch.setattr("vllm_tide.train.reservoir.HOLDOUT_TOKENS", 1024)


def buffer_of(**changes) -> tuple[SampleBuffer, SimpleNamespace]:
    """Return a buffer and its clock (Unix time)."""
    clock = SimpleNamespace(now=1000.0)
    config = TrainConfig(**{**KNOBS, **changes})
    return SampleBuffer(config, lambda: clock.now), clock


def document(key: int, size: int = 20, prompt: int = 3, **more) -> Sample:
    return replace(TOY.document(key % 64, size, prompt, key), **more)


def part(sample: Sample, lo: int, hi: int) -> Sample:
    return sample.window(lo, hi, 0)


def branch(position: int, version: int = 0, size: int = 2) -> Branch:
    return Branch(
        position=position,
        tokens=torch.full((size,), version, dtype=torch.int32),
        features=torch.zeros(size, 3 * HIDDEN),
        teacher_hidden=None,
    )


def trained(buffer: SampleBuffer, key: int) -> list[int]:
    """Return every trained position of a request, with repetition."""
    out: list[int] = []
    for sample in [*buffer.train, *buffer.holdout]:
        if sample.key == key:
            out += sample.trained_positions.tolist()
    return sorted(out)


# ------------------------------------------------------------------ plain passes


def test_a_plain_pass_has_every_window_once_and_new_ones_first():
    buffer, _ = buffer_of()
    for key in TRAIN_KEYS[:10]:
        buffer.add(document(key))
    assert {s.key for s in buffer.shuffled()} == set(TRAIN_KEYS[:10])
    buffer.end_cycle(buffer.newest, buffer.new_tokens)
    assert (buffer.fresh, buffer.new_tokens) == ([], 0)
    for key in TRAIN_KEYS[10:15]:
        buffer.add(document(key))
    assert [s.key for s in buffer.fresh] == TRAIN_KEYS[10:15]
    keys = [s.key for s in buffer.shuffled()]
    assert len(keys) == 15
    assert set(keys[:5]) == set(TRAIN_KEYS[10:15])
    until = buffer.newest
    buffer.add(document(TRAIN_KEYS[15]))
    assert {s.key for s in buffer.shuffled(until=until)} == set(TRAIN_KEYS[:15])
    buffer.train[-1].trained.append(0)  # and the cycle was interrupted
    assert [s.key for s in buffer.fresh] == TRAIN_KEYS[10:15]
    buffer.end_cycle(until, 60)
    assert (buffer.fresh, buffer.new_tokens) == ([], 60)


def test_counts_agree_with_the_stored_windows():
    buffer, clock = buffer_of(buffer_tokens=1024, tenant_share=0.3)
    rng = random.Random(3)
    for step in range(100):
        key = rng.randrange(40)
        doc = document(key, rng.randint(4, 200), tenant=key % 5)
        lo = rng.randrange(0, doc.num_tokens - 3)
        doc = part(doc, lo, rng.randint(lo + 3, doc.num_tokens))
        start = doc.start
        buffer.add(replace(doc, branches=(branch(start + 1, rng.randrange(6)),)))
        clock.now += rng.random()
        if step % 23 == 0:
            buffer.shuffled()
        if step % 31 == 0:
            buffer.purge(tenant=rng.randrange(5), before=clock.now - 5)
        for side, tokens in ((buffer.train, buffer.train_tokens),
                             (buffer.holdout, buffer.holdout_tokens)):  # fmt: skip
            assert tokens == sum(s.num_tokens for s in side)
            assert all(s.num_trained for s in side)
        assert {id(s) for s in buffer.fresh} <= {id(s) for s in buffer.train}
        counts = Counter(trained(buffer, key))
        assert not counts or max(counts.values()) == 1


# -------------------------------------------------------------------- duplicates


@pytest.mark.parametrize("keys", [TRAIN_KEYS, HOLDOUT_KEYS])
def test_a_recomputed_document_replaces_the_previous_one(keys):
    buffer, _ = buffer_of()
    old, new = document(keys[0]), document(keys[0])
    new = replace(new, features=new.features + 1)
    buffer.add(old)
    buffer.add(document(keys[1]))
    buffer.add(new)
    (holdout,) = [s for s in [*buffer.train, *buffer.holdout] if s.key == keys[0]]
    assert torch.equal(holdout.features, new.features)
    assert buffer.evicted["duplicate"] == 20


def test_an_overlapping_document_replaces_from_its_first_trained_row():
    buffer, _ = buffer_of()
    whole = document(TRAIN_KEYS[0], 40)
    middle = document(TRAIN_KEYS[1], 40)
    buffer.add(middle)
    buffer.add(part(middle, 10, 20))  # context before it and teachers after it stay
    outer, inner = buffer.train
    assert outer.num_tokens == 40
    assert inner.trained_positions.tolist() == list(range(11, 20))
    assert outer.trained_positions.tolist() == [*range(3, 11), *range(20, 40)]
    buffer, _ = buffer_of()
    buffer.add(part(whole, 0, 25))
    buffer.add(part(whole, 15, 40))
    first, second = buffer.train
    # Row 15 has no predecessor in the second: only the first can train it.
    assert (first.start, first.num_tokens) == (0, 16)
    assert second.num_tokens == 25
    assert trained(buffer, whole.key) == list(range(3, 40))
    assert buffer.evicted["duplicate"] == 9


def test_a_branch_is_stored_once():
    buffer, _ = buffer_of()
    whole = document(TRAIN_KEYS[0], 40)
    old = replace(whole, branches=(branch(5), branch(18)))
    buffer.add(old)
    buffer.add(replace(part(whole, 10, 20), branches=(branch(18, 7),)))
    branches = [
        (b.position, int(b.tokens[0])) for s in buffer.train for b in s.branches
    ]
    assert branches == [(5, 0), (18, 7)]


# ------------------------------------------------------------------------ tenants


def test_a_tenant_fills_its_share_of_the_buffer_and_no_more():
    buffer, _ = buffer_of(tenant_share=0.25)
    for key in TRAIN_KEYS[:20]:
        buffer.add(document(key, tenant=1))
    for key in TRAIN_KEYS[20:400]:
        buffer.add(document(key, tenant=2))
    counts = Counter(s.tenant for s in buffer.train)
    assert counts[2] == 1024 // 20
    assert counts[1] == 20
    assert buffer.evicted["train"] == 0
    # Its own oldest are removed, not the others'.
    newest = [s.key for s in buffer.train if s.tenant == 2]
    assert newest == TRAIN_KEYS[400 - counts[2] : 400]
    for key in HOLDOUT_KEYS[:200]:  # and on the held-out side
        buffer.add(document(key, tenant=2))
    assert buffer.holdout_tokens <= 256
    for key in TRAIN_KEYS[400:500]:  # a request without a tenant has no bound
        buffer.add(document(key))
    assert sum(s.num_tokens for s in buffer.train if s.tenant == NO_TENANT) == 2000


def test_a_heavy_tenant_draws_its_share_while_the_buffer_is_not_full():
    buffer, _ = buffer_of(tenant_share=0.25)
    for key in TRAIN_KEYS[:50]:
        buffer.add(document(key, tenant=9))
    for key in TRAIN_KEYS[50:65]:
        buffer.add(document(key, tenant=key % 5 + 1))
    drawn: Counter[int] = Counter()
    for _ in range(60):
        for sample in buffer.shuffled():
            drawn[sample.tenant] += sample.num_tokens
    assert drawn[9] / drawn.total() == pytest.approx(0.25, abs=0.03)


def test_random_masses_keep_the_share_with_the_fewest_caps():
    rng = random.Random(0)
    for _ in range(200):
        count = rng.randint(1, 8)
        masses = {t: 10 ** rng.uniform(-3, 3) for t in range(1, count + 1)}
        if rng.random() < 0.5:
            masses[NO_TENANT] = 10 ** rng.uniform(-3, 3)
        share = rng.uniform(0.05, 0.95)
        factors = cap_factors(masses, share)
        assert NO_TENANT not in factors and all(0 < f < 1 for f in factors.values())
        after = {t: mass * factors.get(t, 1.0) for t, mass in masses.items()}
        largest = max((mass for t, mass in after.items() if t), default=0.0)
        if NO_TENANT in masses or count * share > 1:
            assert largest <= (share + 1e-9) * sum(after.values())
            # A tenant that is cut is exactly at the bound.
            for tenant in factors:
                bound = share * sum(after.values())
                assert after[tenant] == pytest.approx(bound)
        else:  # no share is possible: equal ones
            assert largest == pytest.approx(sum(after.values()) / count)
    assert cap_factors({}, 0.5) == cap_factors({NO_TENANT: 10.0, 1: 1.0}, 0.5) == {}
    assert cap_factors({1: 10.0, 2: 1.0}, 1.0) == {}


# ----------------------------------------------- a heavy client and the held-out side

HONEST, LOUD, ATTACK_TOKENS = 7, 8, 84_224


@pytest.mark.parametrize(
    ("honest", "attacker"),
    [
        (lambda n: NO_TENANT, lambda n: LOUD),  # one stable name
        (lambda n: HONEST, lambda n: NO_TENANT),  # no name
        (lambda n: HONEST + n % 4, lambda n: 1000 + n),  # a new one for each request
    ],
)
def test_a_flood_leaves_half_of_the_honest_holdout_windows(honest, attacker):
    """Twice what would flush all of them, at the defaults; tenants by number."""
    clock = SimpleNamespace(now=0.0)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("vllm_tide.train.reservoir.WINDOW_TOKENS", 1024)
        patched.setattr("vllm_tide.train.reservoir.HOLDOUT_TOKENS", 8192)
        buffer, whole = SampleBuffer(TrainConfig(), lambda: clock.now), document(0, 256)
    keys = iter(random.Random(5).sample(range(1 << 60), 60_000))
    while len(buffer.holdout) < 32:
        tenant = honest(len(buffer.holdout))
        buffer.add(replace(whole, key=next(keys), tenant=tenant))
        clock.now += 1.0
    mine = {sample.key for sample in buffer.holdout}
    for count in range(2 * ATTACK_TOKENS // 256):
        buffer.add(replace(whole, key=next(keys), tenant=attacker(count)))
        clock.now += 0.128
    assert buffer.holdout_tokens <= 8192
    assert sum(sample.key in mine for sample in buffer.holdout) >= 16


def test_holdout_follows_a_shift_and_silent_tenants_lose_their_floor():
    buffer, clock = buffer_of()  # 51 windows of 20 tokens
    for key in HOLDOUT_KEYS[:60]:
        buffer.add(document(key, tenant=1))
    clock.now += 601
    for key in HOLDOUT_KEYS[60:300]:
        buffer.add(document(key, tenant=key % 2 * 2))
    left = Counter(s.tenant for s in buffer.holdout)
    assert left[1] <= 3 and min(left[0], left[2]) > 15


# --------------------------------------------------------------------------- purge


def test_purge_by_tenant_and_by_time():
    buffer, clock = buffer_of()
    for key in range(30):
        buffer.add(document(key, tenant=key % 3))
        clock.now += 1
    both = [*buffer.train, *buffer.holdout]
    assert buffer.purge(tenant=1) == (10, 200)
    assert {s.tenant for s in [*buffer.train, *buffer.holdout]} == {0, 2}
    assert buffer.purge(tenant=2, before=1015.0) == (5, 100)
    assert buffer.purge(before=1010.0) == (4, 80)
    assert buffer.purge() == (11, 220)
    assert buffer.purge() == (0, 0)
    assert not buffer.train and not buffer.holdout and not buffer.fresh
    assert buffer.train_tokens == buffer.holdout_tokens == buffer.new_tokens == 0
    assert buffer.evicted["purged"] == sum(s.num_tokens for s in both)
    assert not buffer.shuffled()


def test_windows_older_than_max_age_are_forgotten_on_both_sides():
    buffer, clock = buffer_of(max_age_s=12.0)
    for key in range(30):
        buffer.add(document(key))
        clock.now += 1
    assert buffer.expired(buffer.train[0]) and not buffer.expired(buffer.train[-1])
    before = Counter(s.key for s in [*buffer.train, *buffer.holdout])
    assert buffer.expire()
    left = {s.key for s in [*buffer.train, *buffer.holdout]}
    # The oldest one left was taken in exactly 12 s ago.
    assert left == set(range(18, 30))
    assert len(before) == 30 and buffer.evicted == {"expired": 360}
    assert not buffer.expire()
    clock.now += 100
    assert buffer.expire()
    assert buffer.evicted == {"expired": 600}
    assert not buffer.shuffled() and buffer.new_tokens == 0


def test_holdout_requests_are_evaluated_cyclically_and_new_ones_at_once():
    buffer, _ = buffer_of()
    for key in HOLDOUT_KEYS[:30]:
        buffer.add(document(key))
    holdout = [s.key for s in buffer.holdout]
    scored = set(holdout[:-5])
    seen = Counter()
    for evaluation in range(30):
        chosen, others = buffer.split_holdout(scored, 100, evaluation)
        keys = [s.key for s in chosen + others]
        assert len(set(keys)) == len(keys) and set(keys) <= set(holdout)
        assert sum(s.num_tokens for s in others) == 100
        assert set(holdout[-5:]) <= {s.key for s in chosen}
        assert sum(s.num_tokens for s in chosen if s.key in scored) == 100
        seen.update(s.key for s in chosen)
    assert set(seen) == set(holdout)
    assert buffer.split_holdout(scored, 10**6, 0)[1] == []
    assert buffer.split_holdout((), 0, 0)[1] == []
    assert all(
        any(buffer.split_holdout(holdout, 1, evaluation)) for evaluation in range(30)
    )
