from collections import Counter

import pytest

from bench.harness.common import BenchError
from bench.harness.stream import (
    mixed_stream,
    read_domains,
    segments,
    shift_stream,
    stretches,
)

PROMPTS = {name: [f"{name} {i}" for i in range(30)] for name in ("a", "b", "c")}


def shifted(seed=0):
    return shift_stream(PROMPTS, [4, 10, 6], 16, (1, 2), seed)


def test_domains_follow_each_other_and_all_but_the_first_are_shifted():
    stream = shifted()
    assert [r.index for r in stream] == list(range(20))
    assert [(s.name, s.domain, s.shifted) for s in stretches(stream)] == [
        ("0 a", "a", False),
        ("1 b", "b", True),
        ("2 c", "c", True),
    ]
    assert [len(part) for part in segments(stream)] == [4, 10, 6]


def test_concurrency_begins_anew_with_each_domain():
    stream = shifted()
    assert [r.concurrency for r in stream] == [1] * 4 + [1] * 4 + [2] * 4 + [1] * 2 + [
        1
    ] * 4 + [2] * 2


def test_the_same_seed_gives_the_same_streams_and_another_one_others():
    assert shifted() == shifted() != shifted(1)
    assert mixed_stream(shifted(), (2,), 0) == mixed_stream(shifted(), (2,), 0)


def test_mixed_traffic_is_the_same_requests_in_another_order():
    stream = mixed_stream(shifted(), (2,), 0)
    assert Counter(r.prompt for r in stream) == Counter(r.prompt for r in shifted())
    assert [r.index for r in stream] == list(range(20))
    assert [r.domain for r in stream] != [r.domain for r in shifted()]
    parts = stretches(stream)
    assert len(parts) == 4 and all(s.shifted and s.domain == "mixed" for s in parts)
    assert len({r.domain for r in segments(stream)[0]}) > 1


def test_too_few_prompts_name_the_option():
    with pytest.raises(BenchError, match="--requests: domain 'a' has 30"):
        shift_stream(PROMPTS, [31, 1, 1], 16, (1,), 0)


def test_a_missing_domain_names_the_option(tmp_path):
    with pytest.raises(BenchError, match="--prompts"):
        read_domains(tmp_path, ["nope"])
