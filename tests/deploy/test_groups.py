"""Groups of similar requests from token ids."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from vllm_tide.deploy.groups import (
    FOUNDING_TOKENS,
    MIN_TOKENS,
    Groups,
)

VOCAB = 4096


class Domain:
    """Zipf over a vocabulary; a share of the tokens is common to all domains."""

    def __init__(self, seed: int, common: float = 0.35) -> None:
        rng = np.random.default_rng(seed)
        zipf = 1.0 / np.arange(1, VOCAB + 1) ** 1.1
        own = np.zeros(VOCAB)
        own[rng.permutation(VOCAB)] = zipf / zipf.sum()
        shared = np.zeros(VOCAB)
        shared[np.random.default_rng(99).permutation(VOCAB)] = zipf / zipf.sum()
        self.chances = (1 - common) * own + common * shared

    def request(self, rng, size=None):
        """Tokens of one request, with a topic of its own."""
        size = int(rng.integers(80, 250)) if size is None else size
        topic = rng.integers(0, VOCAB, 12)
        tokens = rng.choice(VOCAB, size, p=self.chances)
        mine = rng.random(size) < 0.15
        tokens[mine] = rng.choice(topic, int(mine.sum()))
        return tokens.astype(np.int32)


def assign(groups, domains, order, rng):
    return [groups.assign(domains[d].request(rng)) for d in order]


@pytest.mark.parametrize("seed", range(3))
def test_mixed_domains_are_told_apart_and_one_stays_one(seed):
    rng = np.random.default_rng(seed)
    order = rng.integers(0, 4, 400).tolist()
    ids = assign(Groups(), [Domain(10 * seed + d) for d in range(4)], order, rng)
    pairs = Counter(zip(ids[150:], order[150:], strict=True))
    of_most = {group: max(n for (g, _), n in pairs.items() if g == group)
               for group in set(ids[150:])}  # fmt: skip
    assert sum(of_most.values()) > 0.95 * 250
    groups = Groups()
    alone = Counter(assign(groups, [Domain(seed)], [0] * 200, rng))
    assert alone.most_common(1)[0][1] >= 0.7 * 200 and groups.num_founded <= 2


def test_a_new_domain_founds_a_group_at_once():
    rng = np.random.default_rng(1)
    groups = Groups()
    assign(groups, [Domain(0)], [0] * 100, rng)
    before = groups.num_founded
    first = groups.assign(Domain(1).request(rng))
    assert groups.num_founded == before + 1
    again = [groups.assign(Domain(1).request(rng)) for _ in range(20)]
    assert again.count(first) >= 18


def test_short_requests_join_but_found_nothing():
    rng = np.random.default_rng(0)
    groups, domain = Groups(), Domain(0)
    assert groups.assign(domain.request(rng, MIN_TOKENS - 1)) == -1
    assert groups.assign(domain.request(rng, 200)) == 0
    for _ in range(50):
        groups.assign(domain.request(rng, 200))
    short = Domain(1).request(rng, FOUNDING_TOKENS - 1)
    assert groups.assign(short) == 0
    assert groups.ids == (0,)


def test_number_of_groups_is_bounded_and_idle_ones_give_way():
    rng = np.random.default_rng(0)
    groups = Groups(max_groups=2)
    domains = [Domain(d) for d in range(3)]
    assert assign(groups, domains, [0] * 60 + [1], rng) == [0] * 60 + [1]
    assert groups.assign(domains[2].request(rng)) in (0, 1)  # both were seen just now
    assign(groups, domains, [0] * 60, rng)
    new = groups.assign(domains[2].request(rng))
    assert new == 2  # id 1 is not used again
    assert groups.ids == (0, 2)
