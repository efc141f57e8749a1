"""Requests rebuilt from verification records, and their groups."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from vllm_tide.deploy.canary_groups import MIN_CREATE_TOKENS, MIN_TOKENS, Groups
from vllm_tide.deploy.served import ServedRequests, bucket_of
from vllm_tide.transport.versions import first_version

PREFILL, VERIFY = 0, 1


def record(
    start, count, accepted=None, *, key=7, prompt=10, version=1, finished=False,
    first=0, cost=1.0, concurrency=4, chance=1.0, memory=False, fast=False,
):  # fmt: skip
    """Return a record as the ring gives it; VERIFY when `accepted` is given."""
    verify = accepted is not None
    return SimpleNamespace(
        key=key,
        phase=VERIFY if verify else PREFILL,
        start=start,
        num_prompt_tokens=prompt,
        num_accepted=accepted if verify else count - 1,
        num_committed=(accepted if verify else count - 1) + 1,
        draft_version=first_version(version) + fast,
        token_ids=np.arange(first, first + count, dtype=np.int32),
        finished=finished,
        tenant=3,
        cost=cost,
        concurrency=concurrency,
        verify_chance=chance,
        memory=memory,
    )


def end_record(key=7):
    return record(0, 0, 0, key=key, finished=True)


def serve(*records, groups=None, engine="e"):
    served = ServedRequests(groups)
    out = []
    for item in records:
        out += served.add(item, engine, 0.0)
    return out


def test_tokens_and_cost_of_every_decode_step_are_counted():
    (request,) = serve(
        record(0, 10),
        record(10, 4, 2, cost=1.5),  # 3 drafts, 2 accepted
        record(13, 4, 0, cost=1.5),
        record(14, 4, 3, cost=1.25),
        record(18, 1, 0),  # no draft
        record(19, 1, cost=0.0),  # of a server with failed control
        end_record(),
    )
    assert request.cells == {(0, 3, 0): [3 + 1 + 4 + 1, 1.5 + 1.5 + 1.25 + 1.0]}
    assert (request.key, request.engine, request.tenant) == (7, "e", 3)
    assert request.versions == (1,)
    assert request.whole and request.ended


def test_first_tokens_are_weighted_by_their_verify_chance():
    (request,) = serve(
        record(0, 10),
        record(10, 4, 2),
        record(13, 2, 0),
        record(14, 3, 1, chance=0.1),
        record(16, 2, 1, chance=0.0),  # the chance is unknown
        record(18, 1, 0),  # nothing was verified
        end_record(),
    )
    assert request.tries == pytest.approx(1 + 1 + 10)
    assert request.hits == pytest.approx(1 + 10)
    assert request.squares == pytest.approx(1 + 1 + 100)


@pytest.mark.parametrize("memory", [True, False])
def test_steps_of_memory_and_fast_draft_do_not_count_for_the_deployed_one(memory):
    begin, how = record(0, 10), {"memory": memory, "fast": not memory}
    shown = [record(10, 4, 2, cost=1.5), record(17, 3, 0), record(18, 1, 0)]
    hidden = [
        record(13, 4, 3, cost=1.1, **how),
        record(19, 4, 0, **how),
        record(20, 1, 0, **how),  # none of it was worth verifying
    ]
    (without,) = serve(begin, *shown, end_record(), groups=Groups())
    served = ServedRequests(Groups())
    for item in (begin, shown[0], hidden[0], *shown[1:], *hidden[1:]):
        assert served.add(item, "e", 0.0) == []
    (among,) = served.add(end_record(), "e", 0.0)
    assert among.cells == without.cells
    for name in ("tries", "hits", "squares", "versions", "whole"):
        assert getattr(among, name) == getattr(without, name), name


def test_a_request_served_by_a_fast_draft_alone_does_not_count():
    served = ServedRequests()
    fast = [record(10, 4, 2, fast=True), record(13, 2, 1, fast=True)]
    for item in (record(0, 10), *fast):
        served.add(item, "e", 0.0)
    (request,) = served.add(end_record(), "e", 0.0)
    assert request.cells == {} and request.tries == 0


def test_steps_are_counted_by_position_concurrency_and_cached_share():
    for start, cached in ((0, 0), (4, 1), (5, 2), (8, 2)):
        (request,) = serve(
            record(start, 10 - start),
            record(10, 4, 1),
            record(10 + 16, 3, 2, concurrency=7),
            record(10 + 20, 3, 0, concurrency=8),
            record(10 + 2000, 2, 1, concurrency=0),
            end_record(),
        )
        assert request.cells == {
            (0, 3, cached): [2, 1],
            (1, 3, cached): [3, 1],
            (1, 4, cached): [1, 1],
            (4, 0, cached): [2, 1],
        }
    assert [bucket_of(n) for n in (0, 15, 16, 63, 64, 1023, 1024)] == [
        0, 0, 1, 1, 2, 3, 4,
    ]  # fmt: skip


def test_a_request_that_spans_a_swap_counts_up_to_the_swap():
    (request,) = serve(
        record(0, 10, version=4),
        record(10, 4, 1, version=4),
        record(12, 4, 3, version=5),
        record(16, 4, 3, version=4),  # reported late
        end_record(),
    )
    assert request.versions == (4, 5, 4)
    assert request.cells == {(0, 3, 0): [2, 1]}


def test_open_requests_are_listed_in_order_of_their_begin():
    served = ServedRequests()
    for key in (8, 7, 6):
        served.add(record(0, 10, key=key), "e", 0.0)
    for key in (7, 8):
        served.add(record(10, 4, 2, key=key), "e", 1.0)
    requests = sorted(served.open_requests(), key=lambda r: r.began)
    assert [(r.key, r.began, r.ended) for r in requests] == [
        (8, 1, False),
        (7, 2, False),
    ]
    (ended,) = served.add(end_record(8), "e", 2.0)
    assert ended.began == 1 and ended.ended
    assert [r.key for r in served.open_requests()] == [7]


@pytest.mark.parametrize(
    "first",
    [
        record(14, 4, 1),  # attached in the middle
        record(0, 12),  # recomputed after a preemption: rows past the prompt
        record(12, 2),
    ],
)
def test_a_request_with_a_missed_beginning_is_not_whole(first):
    (request,) = serve(first, end_record())
    assert not request.whole


@pytest.mark.parametrize("first", [record(8, 2), record(9, 1, 0)])
def test_a_prefix_cached_prompt_is_whole_and_a_last_records_rows_count(first):
    (request,) = serve(first, record(10, 4, 3, finished=True))
    assert request.whole
    assert request.cells == {(0, 3, 2): [4, 1]}


def test_requests_of_two_engines_with_one_key_are_two():
    served = ServedRequests()
    for engine in ("a", "b"):
        served.add(record(0, 10), engine, 0.0)
    served.add(record(10, 4, 3), "a", 0.0)
    (a,) = served.add(end_record(), "a", 0.0)
    (b,) = served.add(end_record(), "b", 0.0)
    assert (a.hits, b.hits) == (1, 0)


def test_an_unknown_requests_end_and_a_negative_position_do_not_count():
    assert serve(end_record()) == []
    assert serve(record(-3, 10), end_record()) == []


def test_idle_requests_and_those_above_the_limit_are_returned():
    served = ServedRequests(max_open=2, idle_s=10.0)
    assert served.add(record(0, 10, key=1), "e", 0.0) == []
    assert served.add(record(0, 10, key=2), "e", 5.0) == []
    (early,) = served.add(record(0, 10, key=3), "e", 6.0)
    assert early.key == 1
    assert [r.key for r in served.flush_idle(15.0)] == [2]
    served.forget("e")
    assert served.flush_idle(1e9) == []


def test_the_nearest_group_of_committed_tokens_is_chosen():
    class Spy(Groups):
        def assign(self, token_ids):
            self.got = list(token_ids)
            return super().assign(token_ids)

    spy = Spy()
    serve(
        record(0, 6, first=0),
        record(4, 6, first=4),  # recomputed: 4 and 5 come again
        record(10, 4, 1, first=10),  # 12 and 13 are rejected
        record(12, 2, 1, first=50),
        end_record(),
        groups=spy,
    )
    assert spy.got == [*range(12), 50, 51]
    serve(
        record(0, 3000, prompt=5000),
        record(3000, 2000, prompt=5000, first=3000),
        *(record(5000 + i, 1, 0, prompt=5000, first=9) for i in range(900)),
        end_record(),
        groups=spy,
    )
    assert spy.got[:512] == list(range(5000 - 512, 5000))
    assert spy.got[512:] == [9] * 512


def test_a_purge_drops_the_open_requests_of_a_tenant():
    served = ServedRequests()
    served.add(record(0, 10, key=1), "e", 0.0)
    other = record(0, 10, key=2)
    other.tenant = 4
    served.add(other, "e", 0.0)
    assert served.purge(3) == 1
    assert served.add(end_record(1), "e", 0.0) == []
    assert len(served.add(end_record(2), "e", 0.0)) == 1
    served.add(record(0, 10, key=5), "e", 0.0)
    assert served.purge() == 1


def test_a_record_of_the_ring_is_understood():
    from tests.transport.samples import make_record, make_spec
    from vllm_tide.transport import Phase

    made = make_record(make_spec(), seed=1, num_rows=4, phase=Phase.VERIFY)
    assert made.finished
    made = replace(made, draft_version=first_version(1))
    (request,) = serve(made)
    ((tokens, cost),) = request.cells.values()
    assert (tokens, cost) == (made.num_accepted + 1, made.cost)


VOCAB = 4096


class Domain:
    """Return a Zipf distribution; a share of the tokens is common to all domains."""

    def __init__(self, seed: int, common: float = 0.35) -> None:
        rng = np.random.default_rng(seed)
        zipf = 1.0 / np.arange(1, VOCAB + 1) ** 1.1
        own = np.zeros(VOCAB)
        own[rng.permutation(VOCAB)] = zipf / zipf.sum()
        shared = np.zeros(VOCAB)
        shared[np.random.default_rng(99).permutation(VOCAB)] = zipf / zipf.sum()
        self.chances = (1 - common) * own + common * shared

    def request(self, rng, size=None):
        """Return tokens of one request on a separate topic."""
        size = int(rng.integers(80, 250)) if size is None else size
        topic = rng.integers(0, VOCAB, 12)
        tokens = rng.choice(VOCAB, size, p=self.chances)
        mine = rng.random(size) < 0.15
        tokens[mine] = rng.choice(topic, int(mine.sum()))
        return tokens.astype(np.int32)


def assign(groups, domains, order, rng):
    return [groups.assign(domains[d].request(rng)) for d in order]


@pytest.mark.parametrize("seed", range(3))
def test_mixed_domains_are_separated_and_one_stays_one(seed):
    rng = np.random.default_rng(seed)
    order = rng.integers(0, 4, 400).tolist()
    ids = assign(Groups(), [Domain(10 * seed + d) for d in range(4)], order, rng)
    pairs = Counter(zip(ids[150:], order[150:], strict=True))
    of_most = {group: max(n for (g, _), n in pairs.items() if g == group)
               for group in set(ids[150:])}  # fmt: skip
    assert sum(of_most.values()) > 0.95 * 250
    groups = Groups()
    alone = Counter(assign(groups, [Domain(seed)], [0] * 200, rng))
    assert alone.most_common(1)[0][1] >= 0.7 * 200 and groups.num_created <= 2


def test_a_new_domain_forms_a_group_at_once():
    rng = np.random.default_rng(1)
    groups = Groups()
    assign(groups, [Domain(0)], [0] * 100, rng)
    before = groups.num_created
    first = groups.assign(Domain(1).request(rng))
    assert groups.num_created == before + 1
    again = [groups.assign(Domain(1).request(rng)) for _ in range(20)]
    assert again.count(first) >= 18


def test_short_requests_join_but_form_no_group():
    rng = np.random.default_rng(0)
    groups, domain = Groups(), Domain(0)
    assert groups.assign(domain.request(rng, MIN_TOKENS - 1)) == -1
    assert groups.assign(domain.request(rng, 200)) == 0
    for _ in range(50):
        groups.assign(domain.request(rng, 200))
    short = Domain(1).request(rng, MIN_CREATE_TOKENS - 1)
    assert groups.assign(short) == 0
    assert groups.ids == (0,)


def test_the_number_of_groups_is_bounded_and_idle_ones_are_replaced():
    rng = np.random.default_rng(0)
    groups = Groups(max_groups=2)
    domains = [Domain(d) for d in range(3)]
    assert assign(groups, domains, [0] * 60 + [1], rng) == [0] * 60 + [1]
    assert groups.assign(domains[2].request(rng)) in (0, 1)  # both were seen just now
    assign(groups, domains, [0] * 60, rng)
    new = groups.assign(domains[2].request(rng))
    assert new == 2  # id 1 is not used again
    assert groups.ids == (0, 2)
