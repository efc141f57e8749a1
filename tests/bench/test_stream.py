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
OPTIONS = StreamOptions(num_before=10, num_after=20, concurrency_cycle=(1, 2, 4))


def test_a_stream_has_a_shift_a_final_quarter_and_a_cycle_of_concurrency():
    stream = build_stream(BEFORE, AFTER, OPTIONS)
    assert [r.index for r in stream] == list(range(30))
    assert [r.phase for r in stream] == [BEFORE_SHIFT] * 10 + [AFTER_SHIFT] * 20
    assert [r.index for r in stream if r.final] == list(range(25, 30))
    assert [(p[0].segment, len(p)) for p in segments(stream)] == [
        (BEFORE_SHIFT, 10),
        (AFTER_SHIFT, 15),
        ("final", 5),
    ]
    cycle = [*[1] * 4, *[2] * 4, *[4] * 4]
    assert [r.concurrency for r in stream[:10]] == cycle[:10]
    assert [r.concurrency for r in stream[10:24]] == [*cycle, 1, 1]
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
