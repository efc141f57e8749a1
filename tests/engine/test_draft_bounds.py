"""Bounds of a draft: rows, norms, logits, and how often it is published."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.engine.shared_engine import DEMO, draft_tensors
from tests.engine.test_swap_adaptation import Swaps
from tests.train.toys import ToyTarget, config
from vllm_tide.draft import Eagle3Draft, VocabMap, export_tensors
from vllm_tide.draft.rows import RowLayout, Rows, StepRows
from vllm_tide.draft.tensor_bytes import to_bytes
from vllm_tide.engine import staged_draft
from vllm_tide.engine.staged_draft import DraftContract, DraftRefused, Stager
from vllm_tide.transport.draft_weights import DraftWeights
from vllm_tide.transport.weights import WeightsSegment, WeightsWriter

pytestmark = pytest.mark.vllm

TARGET = torch.tensor([0.5, 0.3, 0.2])
NAN, INF = float("nan"), float("inf")
ATTACK = ("q_proj", "k_proj", "input_layernorm", "hidden_norm")


@pytest.fixture
def swaps(tmp_path, monkeypatch):
    made = Swaps(tmp_path, monkeypatch)
    yield made
    made.close()


def answers(logits: list[float], temperature: float, count: int = 4096) -> Counter[int]:
    """Return vLLM's answers to drafts of these logits, as the worker leaves them."""
    from vllm.platforms import current_platform
    from vllm.utils import cpu_triton_utils as kernels
    from vllm.v1.spec_decode.llm_base_proposer import (
        compute_probs_and_sample_next_token,
    )

    from vllm_tide.engine.worker_v1 import WorkerTideV1

    current_platform.import_kernels()
    torch.manual_seed(0)
    worker = object.__new__(WorkerTideV1)
    worker._draws_drafts, worker.control = True, None
    proposed = torch.tensor([logits] * count)
    worker.on_draft_logits(proposed)
    sampling: Any = SimpleNamespace(
        all_greedy=False,
        all_random=True,
        temperature=torch.full((count,), temperature),
        generators={},
    )
    drafted, probs = compute_probs_and_sample_next_token(proposed, sampling)
    ends = torch.arange(1, count + 1, dtype=torch.int32)
    rows, vocab = (count, len(TARGET)), len(TARGET)
    target, out = TARGET.repeat(count, 1), torch.full((count, 2), -1)
    given = (ends, drafted.to(torch.int32), probs, target)
    recovered = torch.empty(count, dtype=torch.int32)
    noise = torch.empty(rows).exponential_().reciprocal()
    kernels._sample_recovered_tokens_kernel_impl(recovered, *given, noise, vocab)
    kernels._rejection_random_sample_kernel_impl(
        out,
        *given,
        torch.zeros(count, 1, dtype=torch.int32),
        recovered,
        torch.rand(count, dtype=torch.float64),
        torch.zeros(count, dtype=torch.bool),
        1,
        vocab,
    )
    return Counter(out[:, 0].tolist())


@pytest.mark.parametrize("temperature", [0.01, 1.0])
@pytest.mark.parametrize(
    "logits",
    [
        [NAN] * 3,
        [INF] * 3,
        [-INF] * 3,
        [0.0, NAN, 1.0],
        [INF, 0.0, -INF],
        [3e38, 0.0, -3e38],
        [0.0, 1.0, -INF],
    ],
)
def test_unusual_draft_rows_give_the_targets_answers(logits, temperature):
    tokens = answers(logits, temperature)
    shares = torch.tensor([tokens[token] / 4096 for token in range(3)])
    assert (shares - TARGET).abs().max() < 0.03, shares


def test_repeated_publications_cannot_make_a_draft_grow(swaps):
    tensors = dict(swaps.base)
    for _ in range(8):
        tensors["fc.weight"] = tensors["fc.weight"] * 15
        swaps.made.install_ordered(swaps.stage(tensors))
    assert swaps.state() == ("1", {"norm": 7})
    assert swaps.serves(swaps.base | {"fc.weight": swaps.base["fc.weight"] * 15})


def probed(tmp_path: Any, dtype: torch.dtype, tensors: dict[str, Any]) -> None:
    draft = SimpleNamespace(dtype=dtype)
    engine: Any = SimpleNamespace(
        model_config=SimpleNamespace(get_total_num_hidden_layers=lambda: 4),
        speculative_config=SimpleNamespace(draft_model_config=draft),
    )
    check = staged_draft.overflow_check(tmp_path, engine)
    assert check is not None
    check(tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_draft_with_overflowing_logits_is_refused(dtype):
    own = {n: t for n, t in draft_tensors(DEMO / "draft").items() if n != "t2d"}
    shared = {n: t for n, t in own.items() if n != "lm_head.weight"}
    for tensors in (own, shared):
        probed(DEMO / "draft", dtype, tensors)
    grown = own | {n: 3e4 * t.float() for n, t in own.items() if "norm" in n}
    for tensors in (grown, {n: grown[n] for n in shared}):
        if dtype == torch.float16:
            with pytest.raises(DraftRefused, match="overflow") as refused:
                probed(DEMO / "draft", dtype, tensors)
            assert refused.value.reason == "not_finite"
        else:
            probed(DEMO / "draft", dtype, tensors)
    # Attention overflows, with float32 too.
    named = [n for n in own if n.split(".")[-2] in ATTACK]
    assert len(named) == len(ATTACK)
    with pytest.raises(DraftRefused, match="overflow"):
        probed(DEMO / "draft", dtype, own | {n: 15.0**8 * own[n] for n in named})


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm_before_residual": True, "fc_norm": True},
        {"norm_before_fc": True, "draft_vocab_size": 40},
    ],
)
def test_the_probe_computes_the_same_as_the_draft(changes, tmp_path):
    from vllm_tide.draft.probe import ROWS, probe_rows

    target, shape = ToyTarget(), config(**changes)
    vocab_map = VocabMap.from_target_ids(
        torch.arange(shape.draft_vocab_size), shape.vocab_size
    )
    random = torch.Generator().manual_seed(0)
    features = torch.randn(ROWS, shape.feature_size, generator=random)
    rows = torch.randn(ROWS, shape.hidden_size, generator=random)
    embed = torch.cat([torch.zeros(1, shape.hidden_size), rows])
    draft = Eagle3Draft.initialise(shape, target.embed, target.head, vocab_map)
    draft.embed = embed
    packed = Rows(
        torch.arange(ROWS + 1),
        torch.zeros(ROWS + 1, dtype=torch.int64),  # no rotation
        torch.cat([features, features[:1]]),
        RowLayout([0, ROWS + 1], [ROWS + 1], [], []),
        [StepRows(torch.arange(ROWS), torch.arange(ROWS))],
    )
    weights = draft.compute_weights(torch.float32)
    (normed,) = draft.forward_steps(packed, weights)
    want = draft.logits(normed, weights)
    tensors = export_tensors(draft, torch.float32)
    got = probe_rows(shape, tensors, torch.float32)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("pause", [0.004, 0.58])
def test_frequent_publications_take_little_time(pause, monkeypatch):
    """A publication every 0.1 s for a minute of virtual time."""
    now = [100.0]
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr(staged_draft, "time", clock)
    tensors = {"fc.weight": torch.ones(4, 6)}
    segment = WeightsSegment.create(1 << 16)
    writer = WeightsWriter.attach(segment.name)
    stager, swaps = Stager(segment, DraftContract(tensors, 4.0)), 0
    try:
        for step in range(1200):
            now[0] += 0.05
            if step % 2 == 0:
                version = step // 2 + 1
                writer.publish(DraftWeights.encode(to_bytes(tensors), version))
            stager.poll(now[0])
            if (staged := stager.take(stager.staged_version)) is not None:
                swaps += 1
                now[0] += pause
                stager.done(staged, pause)
        assert staged is None or staged.version >= version - 20, "not the newest"
        assert 4 <= swaps <= 121 and swaps * pause < 0.06 * 60, swaps
    finally:
        writer.close()
        segment.close()
