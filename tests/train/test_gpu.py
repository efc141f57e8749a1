"""The trainer on a GPU: its turns, its refusals, and a CPU's steps."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch

from tests.train.toys import ToyTarget
from vllm_tide.config import TrainConfig
from vllm_tide.draft import DraftError
from vllm_tide.draft.eagle3 import Eagle3Draft
from vllm_tide.draft.target import TargetRows
from vllm_tide.train import turns
from vllm_tide.train.evaluate import evaluate
from vllm_tide.train.gpu import claim
from vllm_tide.train.pacing import Pacer
from vllm_tide.train.packing import pack
from vllm_tide.train.step import TrainStep


def test_a_turn_claims_its_share_of_wall_time():
    pacer = Pacer(0.25)
    pacer.worked(100.0, 1.0)
    assert pacer.rest(101.0) == 3.0
    pacer.worked(110.0, 1.0)  # the time before is not saved up
    assert pacer.rest(111.0) == 3.0
    pacer.worked(112.0, 1.0)  # begun too early: a debt
    assert pacer.rest(113.0) == 5.0


def test_a_rest_goes_on_asking_the_caller(monkeypatch):
    answers, rests = iter([True, True, True, False]), iter([1.0, 1.0, 0.0])
    monkeypatch.setattr(turns.time, "sleep", lambda seconds: None)
    fake = Mock(rest=lambda: next(rests))
    watch = turns.Watch(lambda: next(answers), fake)
    assert watch()
    assert not watch()
    assert [c[0] for c in fake.mock_calls] == ["begin", "end", "begin", "end", "begin"]


def test_a_gpu_that_is_not_there_gets_one_sentence():
    claim("cpu")
    with pytest.raises(DraftError, match=r"tide\.train\.device: 'cuda:99', but .* use"):
        claim("cuda:99")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("attention", ["packed", "flex"])
@pytest.mark.parametrize("loss", [{"forward_kl": 1.0}, {"tv": 1.0, "next_token": 0.5}])
def test_steps_are_those_of_a_cpu(attention, loss):
    toy, found = ToyTarget(), {}
    documents = [toy.document(i, 40, 3, i) for i in range(6)]
    for place, attends in (("cpu", "packed"), ("cuda", attention)):
        rows = TargetRows(embed := toy.embed.to(place), head := toy.head.to(place))
        draft = Eagle3Draft.initialise(toy.draft(head_dim=16).config, embed, head)
        config = TrainConfig(compute_dtype="float32", attention=attends, loss=loss)
        step = TrainStep(draft, rows, config)
        losses = [step.run(pack(documents)).loss for _ in range(5)]
        seen = evaluate(draft, rows, documents, 3, attention=attends)
        found[place] = [*losses, seen.acceptance("mass")]
    assert found["cuda"] == pytest.approx(found["cpu"], rel=2e-2)
