"""Captured rows equal a Transformers forward over the same tokens, every position."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests import toys
from tests.engine.offline_engine import OfflineEngine, only_manifest
from tests.engine.records import counted, drain, floats
from vllm_tide.transport.record import Phase, Record
from vllm_tide.transport.ring import Collect, RingReader

pytestmark = pytest.mark.vllm

PROMPTS = [
    list(b"hello world"),
    list(b"def main(argv):\n    return 0 " * 4),
    list(b"abc abc abc"),
    list(b"the quick brown fox jumps over the lazy dog " * 3),
    [7],
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    target = toys.make_target(folder / "target")
    return target, toys.make_draft(folder / "draft", target)


def case(models: tuple[Path, Path], run_dir: Path, **capture: Any) -> dict[str, Any]:
    return {
        "target": str(models[0]),
        "speculative_config": {
            "method": "eagle3",
            "model": str(models[1]),
            "num_speculative_tokens": 3,
            "disable_eagle_block_drop": True,
            "tide": {
                # The test reads the ring, and each step drafts.
                "preset": "observe",
                "run_dir": str(run_dir),
                "capture": {"ring_mib": 16, **capture},
            },
        },
        # Chunked prefill: prompts longer than 32 tokens arrive in several steps, in
        # one batch with other requests' verifications.
        "engine": {
            "max_num_batched_tokens": 32,
            "max_num_seqs": 4,
            "enable_prefix_caching": True,
            "block_size": 32,
        },
    }


@pytest.fixture(scope="module")
def started(models, tmp_path_factory) -> Iterator[Any]:
    """Engines by teacher, started once: a test's first work must `forget`."""
    with ExitStack() as stack:

        @cache
        def start(teacher: str) -> tuple[OfflineEngine, RingReader]:
            folder = tmp_path_factory.mktemp(teacher)
            run = case(models, folder, teacher=teacher, teacher_topk=8)
            engine = stack.enter_context(OfflineEngine(run))
            return engine, RingReader.attach(only_manifest(folder).ring)

        yield start


class Oracle:
    """Transformers' own forward in fp32."""

    def __init__(self, target: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)

    def __call__(self, tokens: list[int]) -> tuple[torch.Tensor, ...]:
        """Features [S, 3H], final hidden [S, H] and log-probabilities [S, V]."""
        with torch.no_grad():
            out = self.model(torch.tensor([tokens]), output_hidden_states=True)
        states = out.hidden_states
        features = torch.cat([states[i][0] for i in toys.AUX_LAYERS], dim=-1)
        return features, states[-1][0], torch.log_softmax(out.logits[0], dim=-1)


def check_record(record: Record, committed: dict[int, int], oracle: Oracle) -> None:
    """Compare one record with the oracle run on exactly the tokens it saw."""
    prefix = [committed[i] for i in range(record.start)]
    features, hidden, logprobs = oracle(prefix + record.token_ids.tolist())
    rows = slice(record.start, record.start + record.num_rows)
    close = {"atol": 0.02, "rtol": 0.02}
    torch.testing.assert_close(floats(record.features), features[rows], **close)
    taught = slice(record.start + record.teacher_start, rows.stop)
    if record.teacher_hidden is not None:
        torch.testing.assert_close(
            floats(record.teacher_hidden), hidden[taught], **close
        )
    if record.teacher_topk_ids is not None:
        ids = torch.from_numpy(record.teacher_topk_ids).long()
        top = torch.from_numpy(record.teacher_topk_logprobs.copy())
        want = logprobs[taught].gather(1, ids)
        torch.testing.assert_close(top, want, atol=1e-3, rtol=1e-3)
        tail = 1 - want.exp().sum(-1)
        got = torch.from_numpy(record.teacher_tail_logprob.copy()).exp()
        torch.testing.assert_close(got, tail, atol=1e-3, rtol=1e-2)


def check_all(
    records: list[Record], sequences: list[list[int]], oracle: Oracle
) -> dict[int, dict[int, int]]:
    """Replay all records in order; returns the committed tokens of each key."""
    committed: dict[int, dict[int, int]] = {}
    for record in records:
        if record.num_rows == 0:
            continue
        mine = committed.setdefault(record.key, {})
        for j in range(record.num_accepted + 1):
            mine[record.start + j] = int(record.token_ids[j])
        if record.start > 0 and 0 not in mine:
            # A prefix-cache hit: the missing tokens are known to the test only.
            (full,) = {
                tuple(s)
                for s in sequences
                if s[record.start : record.start + 1] == [mine[record.start]]
                and len(s) > record.start
            }
            for i in range(record.start):
                mine.setdefault(i, full[i])
        check_record(record, mine, oracle)
        if record.next_token >= 0:
            mine[record.start + record.num_accepted + 1] = record.next_token
    return committed


@pytest.mark.parametrize("teacher", ["hidden", "topk"])
def test_captured_rows_equal_transformers(models, started, teacher):
    oracle = Oracle(models[0])
    engine, reader = started(teacher)
    report = engine.work(PROMPTS, forget=True, params={"max_tokens": 20})
    records = drain(reader)
    assert report["faults"] == {}
    sequences = [p + t for p, t in zip(PROMPTS, report["tokens"], strict=True)]
    committed = check_all(records, sequences, oracle)
    rebuilt = {tuple(m[i] for i in sorted(m)) for m in committed.values()}
    # Every token but the last (never an input) has its row.
    for sequence in sequences:
        assert any(r[: len(sequence)] == tuple(sequence) for r in rebuilt)
    verify = [r for r in records if r.phase == Phase.VERIFY and r.num_rows > 1]
    assert verify, "no verification was captured"
    rejected = [r for r in verify if r.num_accepted < r.num_rows - 1]
    assert rejected, "no rejected row was captured"
    assert any(r.phase == Phase.PREFILL and r.start > 0 for r in records)


def test_prefix_cache_hits_are_said_and_refusals_are_kept(models, started):
    oracle = Oracle(models[0])
    engine, reader = started("hidden")
    shared = list(b"a shared preamble that is longer than any block size" * 3)
    first = engine.work([shared + [1]], forget=True, params={"max_tokens": 4})
    drain(reader)
    assert first["dropped"].get("prefix_cached", 0) == 0
    second = engine.work([shared + [2]], params={"max_tokens": 4})
    records = [r for r in drain(reader) if r.num_rows]
    missing = records[0].start
    # All whole blocks: without `disable_eagle_block_drop` the last one is left out.
    assert missing == 32 * (len(shared) // 32)
    assert second["dropped"]["prefix_cached"] == missing
    check_all(records, [shared + [2] + second["tokens"][0]], oracle)

    before = second["rows"]
    out = engine.work(
        PROMPTS[:3],
        params={"max_tokens": 4},
        extra=[{"tide_capture": False}, {"tide_capture": "maybe"}, None],
        salts=[None, None, "pepper"],
    )
    assert out["rows"] == before
    assert out["dropped"]["opted_out"] == 1
    assert out["dropped"]["malformed_opt_out"] == 1
    assert out["dropped"]["salted"] == 1
    assert [r for r in drain(reader) if r.num_rows] == []


def test_rows_become_metadata_only_while_the_trainer_pauses(models, started):
    oracle = Oracle(models[0])
    tenants = [{"tide_tenant": name} for name in ("a", "b", "a")]
    work = {"params": {"max_tokens": 20}, "extra": tenants, "forget": True}
    engine, reader = started("topk")
    full_report = engine.work(PROMPTS[:3], **work)
    full = [r for r in drain(reader) if r.num_rows]
    reader.set_collect(Collect.METADATA)
    report = engine.work(PROMPTS[:3], **work)
    light = [r for r in drain(reader) if r.num_rows]
    reader.set_collect(Collect.FULL)
    again = engine.work(PROMPTS[:3], **work)
    last = [r for r in drain(reader) if r.num_rows]
    assert report["faults"] == {}
    assert report["tokens"] == full_report["tokens"] == again["tokens"]
    assert not any(r.metadata_only for r in full + last) and all(
        r.metadata_only for r in light
    )
    assert report["rows"] == full_report["rows"]
    assert report["dropped"]["ids_only"] == sum(r.num_rows for r in light)
    assert again["dropped"]["ids_only"] == report["dropped"]["ids_only"]
    for r in light:
        assert r.features.shape == (r.num_rows, 0)
        assert r.teacher_hidden is r.teacher_topk_ids is None
    # The same rounds were served, so the same ids and verdicts come.
    assert counted(light) == counted(full) == counted(last)
    sequences = [p + t for p, t in zip(PROMPTS, report["tokens"], strict=False)]
    check_all(last, sequences, oracle)
    # Two tenants; a request keeps its own through all records.
    of_key = {}
    for r in full + light + last:
        assert of_key.setdefault(r.key, r.tenant) == r.tenant != 0
    assert len(of_key) == 9
    assert sorted(Counter(of_key.values()).values()) == [3, 6]


def test_sampling_rate_zero_captures_nothing(models, tmp_path):
    with OfflineEngine(case(models, tmp_path, sample_rate=0.0)) as engine:
        reader = RingReader.attach(only_manifest(tmp_path).ring)
        report = engine.work(PROMPTS[:2], params={"max_tokens": 4})
        assert report["rows"] == 0
        assert report["dropped"]["not_sampled"] == 2
        assert drain(reader) == []


def test_preempted_requests_are_recomputed_and_captured_right(models, tmp_path):
    oracle = Oracle(models[0])
    run = case(models, tmp_path)
    # Too few blocks of 32 tokens for four requests that grow by 60 tokens each.
    run["engine"] |= {"num_gpu_blocks_override": 13, "enable_prefix_caching": False}
    with OfflineEngine(run) as engine:
        reader = RingReader.attach(only_manifest(tmp_path).ring)
        report = engine.work(PROMPTS[:4], params={"max_tokens": 60})
        records = drain(reader)
    preemptions = [
        value
        for name, value in report["metrics"].items()
        if name.startswith("vllm:num_preemptions")
    ]
    assert sum(preemptions) > 0
    assert report["faults"] == {}
    sequences = [p + t for p, t in zip(PROMPTS[:4], report["tokens"], strict=True)]
    committed = check_all(records, sequences, oracle)
    rebuilt = {tuple(m[i] for i in sorted(m)) for m in committed.values()}
    for sequence in sequences:
        assert any(r[: len(sequence)] == tuple(sequence) for r in rebuilt)


def test_stop_strings_and_ended_requests(models, started):
    oracle = Oracle(models[0])
    engine, reader = started("hidden")
    free = engine.work(PROMPTS[:2], forget=True, params={"max_tokens": 30})
    drain(reader)
    # A byte that the first request emits somewhere in the middle ends it there.
    stop = [bytes([t]).decode() for t in free["tokens"][0][3:] if 32 < t < 127]
    report = engine.work(
        PROMPTS[:2], params={"max_tokens": 30, "stop": stop[:1] or ["zz"]}
    )
    # The end of a request is told with the next step.
    engine.work(PROMPTS[2:3], params={"max_tokens": 2})
    records = drain(reader)
    assert report["faults"] == {}
    sequences = [p + t for p, t in zip(PROMPTS[:2], report["tokens"], strict=True)]
    check_all(records, sequences, oracle)
    ended = {r.key for r in records if r.finished}
    assert len(ended) >= 2
