from dataclasses import replace

import pytest
import torch

from bench.harness.common import BenchError
from bench.harness.samples import (
    acceptance,
    fit,
    held_out_every,
    load_samples,
    num_tokens,
    num_trained,
    rate,
    save_samples,
)
from tests.train.toys import HIDDEN, ToyTarget
from vllm_tide.config import TrainConfig
from vllm_tide.train.sample import Branch, TopK

TOY = ToyTarget()
KNOBS = {
    "batch_tokens": 256,
    "learning_rate": 1e-2,
}


def documents(count=12, size=30):
    return [TOY.document(7 * key, size, 4, key) for key in range(count)]


def test_documents_come_back_as_they_were_written(tmp_path):
    document = documents(1)[0]
    topk = TopK(torch.zeros(2, 3, dtype=torch.int32), torch.rand(2, 3), torch.rand(2))
    branch = Branch(
        5,
        torch.tensor([1, 2], dtype=torch.int32),
        torch.rand(2, 3 * HIDDEN).bfloat16(),
        torch.rand(2, HIDDEN),
        topk,
    )
    save_samples(
        tmp_path / "s.st",
        {"a": [replace(document, branches=(branch,))], "b": []},
        {"lost": {"dropped_rows": 2}},
    )
    parts, facts = load_samples(tmp_path / "s.st")
    assert facts == {"lost": {"dropped_rows": 2}} and parts["b"] == []
    (back,) = parts["a"]
    assert torch.equal(back.tokens, document.tokens) and back.key == document.key
    assert torch.equal(back.features, document.features)
    assert back.in_vocab is None and back.num_trained == document.num_trained
    (held,) = back.branches
    assert torch.equal(held.features, branch.features) and held.position == 5
    assert torch.equal(held.teacher_topk.logprobs, topk.logprobs)


def test_a_file_that_holds_none_is_named(tmp_path):
    (tmp_path / "x.st").write_bytes(b"no")
    with pytest.raises(BenchError, match=r"x\.st holds no captured samples"):
        load_samples(tmp_path / "x.st")


def test_requests_are_held_out_whole():
    twice = [d for d in documents(10) for d in (d, replace(d, start=30))]
    train, held = held_out_every(twice, 5)
    assert {s.key for s in held} == {4, 9} and len(held) == 4
    assert not {s.key for s in train} & {s.key for s in held}
    assert num_tokens(twice) == 600 and num_trained(documents(1)) == 26


def test_the_rate_rises_and_falls_to_its_floor():
    rates = [rate(i, 100) for i in range(100)]
    assert rates[0] < rates[4] < 1.0 and max(rates) == rates[5] == 1.0
    assert rates[-1] < 0.03 and min(rates) > 0
    assert all(0 < rate(0, n) <= 1 for n in (1, 2, 3))


def test_a_fit_learns_and_the_same_seed_gives_the_same_loss():
    train, held = held_out_every(documents(20), 5)
    config = TrainConfig(**KNOBS)

    def run():
        draft, steps = TOY.draft(), []
        before = acceptance(draft, TOY.rows, held, 3, config).acceptance()
        done = fit(draft, TOY.rows, train, config, 40, steps.append)
        assert steps == list(range(1, 41)) and done.steps == 40
        after = acceptance(draft, TOY.rows, held, 3, config).acceptance()
        return before, after, done.loss

    first = run()
    assert first[1] > first[0] + 0.5
    assert run() == first


def test_a_fit_without_anything_to_train_on_says_so():
    prompt_only = TOY.document(1, 10, 10, 0)
    with pytest.raises(ValueError, match="anything to train on"):
        fit(TOY.draft(), TOY.rows, [prompt_only], TrainConfig(**KNOBS), 3)
