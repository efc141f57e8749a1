import gzip
import json

import pytest

from bench.harness.common import BenchError, StreamError
from bench.harness.stream import (
    StreamOptions,
    build_stream,
    read_prompts,
    segments,
    shift_stream,
)

PROMPTS = {name: [f"{name} {i}" for i in range(40)] for name in ("math", "sql")}


def test_a_stream_shifts_and_may_return_to_other_prompts():
    options = StreamOptions(("math", "sql", "math"), (10, 14, 8), 96, (1, 2, 4))
    stream, more = build_stream(PROMPTS, options, 6)
    assert [r.index for r in stream] == list(range(32))
    assert [(p[0].segment, len(p)) for p in segments(stream)] == [
        ("0 math", 10),
        ("1 sql", 14),
        ("2 math", 8),
    ]
    prompts = [r.prompt for r in (*stream, *more) if r.domain == "math"]
    assert len(more) == 6 and len(set(prompts)) == len(prompts) == 24
    assert not any(r.ignore_eos for r in stream)
    cycle = [*[1] * 4, *[2] * 4, *[4] * 4]
    assert [r.concurrency for r in stream[:10]] == cycle[:10]
    assert [r.concurrency for r in stream[10:24]] == [*cycle, 1, 1]
    with pytest.raises(StreamError, match="has 40 distinct prompts.*fewer than the 41"):
        build_stream(PROMPTS, options, 23)


def test_prompts_are_read_plain_or_gzipped(tmp_path):
    line = json.dumps({"id": 0, "domain": "c", "prompt": "int x;"}) + "\n"
    (tmp_path / "c.jsonl").write_text(line)
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress(line.encode()))
    assert read_prompts(tmp_path, "c") == read_prompts(tmp_path, "d") == ["int x;"]


def test_domains_follow_each_other_and_concurrency_restarts_with_each():
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
