import gzip
import json

import pytest

from bench.harness.common import BenchError, StreamError
from bench.harness.stream import (
    AFTER_SHIFT,
    BEFORE_SHIFT,
    StreamOptions,
    build_stream,
    read_prompts,
    segments,
    shift_stream,
)

BEFORE = [f"before {i}" for i in range(40)]
AFTER = [f"after {i}" for i in range(40)]
OPTIONS = StreamOptions(
    num_before=10, num_after=20, block_requests=2, concurrency_cycle=(1, 2, 4, 3)
)


def test_phases_follow_each_other_and_the_last_quarter_is_final():
    stream = build_stream(BEFORE, AFTER, OPTIONS)
    assert [r.index for r in stream] == list(range(30))
    assert [r.phase for r in stream] == [BEFORE_SHIFT] * 10 + [AFTER_SHIFT] * 20
    assert [r.index for r in stream if r.final] == list(range(25, 30))


def test_segments_are_before_after_and_final():
    parts = segments(build_stream(BEFORE, AFTER, OPTIONS))
    assert [(p[0].segment, len(p)) for p in parts] == [
        (BEFORE_SHIFT, 10),
        (AFTER_SHIFT, 15),
        ("final", 5),
    ]


def test_concurrency_goes_through_the_cycle_in_each_phase():
    stream = build_stream(BEFORE, AFTER, OPTIONS)
    cycle = [1, 1, 2, 2, 4, 4, 3, 3]
    assert [r.concurrency for r in stream[:10]] == [*cycle, 1, 1]
    assert [r.concurrency for r in stream[10:18]] == cycle


def test_too_few_prompts_are_refused_with_the_counts():
    with pytest.raises(StreamError, match="has 3 distinct prompts.*wants 10"):
        build_stream(BEFORE[:3], AFTER, OPTIONS)


def test_prompts_are_read_plain_or_gzipped(tmp_path):
    line = json.dumps({"id": 0, "domain": "c", "prompt": "int x;"}) + "\n"
    (tmp_path / "c.jsonl").write_text(line)
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress(line.encode()))
    assert read_prompts(tmp_path, "c") == read_prompts(tmp_path, "d") == ["int x;"]


def test_domains_follow_each_other_and_concurrency_begins_anew_with_each():
    prompts = {name: [f"{name} {i}" for i in range(30)] for name in ("a", "b")}
    stream = shift_stream(prompts, [4, 10], 16, (1, 2), 0)
    assert [r.index for r in stream] == list(range(14))
    assert [(p[0].segment, len(p)) for p in segments(stream)] == [
        ("0 a", 4),
        ("1 b", 10),
    ]
    assert [r.concurrency for r in stream] == [1] * 4 + [1] * 4 + [2] * 4 + [1] * 2
    with pytest.raises(BenchError, match="--requests: domain 'a' has 30"):
        shift_stream(prompts, [31, 1], 16, (1,), 0)
