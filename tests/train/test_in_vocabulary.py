"""Rows whose best token a pruned draft can say, by each kind of teacher."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.train.toys import VOCAB, ToyTarget
from vllm_tide.draft.vocab import VocabMap
from vllm_tide.train.evaluate import InVocabulary
from vllm_tide.train.sample import TopK

TOY = ToyTarget()
EVEN = VocabMap.from_target_ids(torch.arange(0, VOCAB, 2), VOCAB)


@pytest.mark.parametrize("size", [1, 256, 300, 513])
def test_by_hidden_teacher_in_pieces(size):
    document = TOY.document(1, size, 1, 5)
    best = (document.teacher_hidden @ TOY.head.T).argmax(-1)
    told = InVocabulary(TOY.rows, torch.float32).rows_of(document, EVEN)
    assert torch.equal(told, best % 2 == 0) and len(set(told.tolist())) == min(size, 2)


def test_by_the_first_of_a_top_k_teacher():
    document = TOY.document(1, 3, 1, 5)
    ids = torch.tensor([[2, 1], [1, 2], [4, 4]], dtype=torch.int32)
    teacher = TopK(ids, torch.zeros(3, 2), torch.zeros(3))
    document = replace(document, teacher_hidden=None, teacher_topk=teacher)
    told = InVocabulary(TOY.rows, torch.float32).rows_of(document, EVEN)
    assert told.tolist() == [True, False, True]


def test_without_a_teacher_none_is_sayable():
    document = replace(TOY.document(1, 3, 1, 5), teacher_hidden=None)
    assert not InVocabulary(TOY.rows, torch.float32).rows_of(document, EVEN).any()


def test_rows_of_the_target_are_taken_once(monkeypatch):
    taken = []
    monkeypatch.setattr(
        type(TOY.rows), "rows_in", lambda rows, dtype: taken.append(dtype) or TOY.head
    )
    sayable = InVocabulary(TOY.rows, torch.float32)
    for _ in range(2):
        sayable.rows_of(TOY.document(1, 3, 1, 5), EVEN)
    assert taken == [torch.float32]
