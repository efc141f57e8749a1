"""A new draft vocabulary keeps most rows; its size never changes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.train.toys import HIDDEN, VOCAB, ToyTarget, config
from vllm_tide.draft import DraftError, Eagle3Draft, VocabMap, export_tensors
from vllm_tide.draft.checkpoint import build_draft
from vllm_tide.draft.prune import better_vocab, choose_vocab, coverage, reprune

TOY = ToyTarget()


def vocab(ids: torch.Tensor) -> VocabMap:
    return VocabMap.from_target_ids(ids, VOCAB)


def trained(ids: torch.Tensor) -> Eagle3Draft:
    shape = config(draft_vocab_size=ids.numel())
    draft = Eagle3Draft.initialise(shape, TOY.embed, TOY.head, vocab(ids))
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(torch.randn_like(parameter))
    return draft


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=30),
    st.data(),
)
def test_no_other_choice_covers_more(counts, data):
    size = data.draw(st.integers(1, len(counts)))
    ids = choose_vocab(torch.tensor(counts), size)
    assert bool((ids[1:] > ids[:-1]).all()) and ids.numel() == size
    assert sum(counts[i] for i in ids) == sum(sorted(counts)[-size:])


def test_only_as_many_tokens_change_as_were_counted():
    old = vocab(torch.arange(40))
    counts = torch.zeros(VOCAB)
    counts[:4], counts[50], counts[60] = 10, 30, 1
    new = better_vocab(counts, old)
    assert new is not None
    assert set(new.target_ids.tolist()) == {*range(38), 50, 60}
    assert coverage(counts, new) == 1.0
    assert coverage(counts, old) == pytest.approx(40 / 71)


def test_a_change_that_does_not_pay_is_not_made():
    old = vocab(torch.arange(40))
    counts = torch.zeros(VOCAB)
    assert better_vocab(counts, old) is None
    assert coverage(counts, old) == 1.0
    counts[:4], counts[50] = 1000, 1
    assert better_vocab(counts, old) is None
    assert better_vocab(counts, old, min_gain=0.0) is not None
    assert better_vocab(counts, VocabMap.identity(VOCAB)) is None


def test_remaining_rows_keep_their_weights_and_new_ones_are_the_targets():
    draft = trained(torch.arange(40))
    new = vocab(torch.arange(24, 64))
    again = reprune(draft, new, TOY.rows)
    before = draft.tensor("lm_head.weight")
    after = again.tensor("lm_head.weight")
    assert torch.equal(after[:16], before[24:])  # ids 24..39
    assert torch.equal(after[16:], TOY.head[40:64])
    assert torch.equal(draft.vocab.target_ids, torch.arange(40))  # not changed
    for name, value in draft.named_tensors().items():
        if name != "lm_head.weight":
            assert torch.equal(again.tensor(name), value)
    x = torch.randn(5, HIDDEN)
    old_logits = x @ before.T
    new_logits = x @ after.T
    torch.testing.assert_close(new_logits[:, :16], old_logits[:, 24:])


def test_a_repruned_draft_is_published_under_the_same_names_and_loads_again():
    draft = trained(torch.arange(40))
    draft.constants["d2t"] = draft.constants["d2t"].to(torch.int32)
    draft.tensor("lm_head.weight").requires_grad_(False)
    again = reprune(draft, vocab(torch.arange(10, 50)), TOY.rows)
    assert not again.tensor("lm_head.weight").requires_grad
    first, second = export_tensors(draft), export_tensors(again)
    assert {n: (t.dtype, t.shape) for n, t in first.items()} == {
        n: (t.dtype, t.shape) for n, t in second.items()
    }
    loaded = build_draft(again.config, second, TOY.rows)
    assert torch.equal(loaded.vocab.target_ids, torch.arange(10, 50))
    # As in a restarted trainer: without t2d.
    del second["t2d"]
    loaded = build_draft(again.config, second, TOY.rows)
    assert torch.equal(loaded.vocab.target_ids, torch.arange(10, 50))


def test_impossible_repruning_is_refused():
    draft = trained(torch.arange(40))
    with pytest.raises(DraftError, match="differs from the served size"):
        reprune(draft, vocab(torch.arange(41)), TOY.rows)
    borrowed = build_draft(
        TOY.draft().config, export_tensors(TOY.draft()), TOY.rows, {"lm_head.weight"}
    )
    with pytest.raises(DraftError, match="shared with the target"):
        reprune(borrowed, VocabMap.identity(VOCAB), TOY.rows)


def test_a_clone_copies_the_weights_and_shares_all_else():
    draft = trained(torch.arange(0, VOCAB, 2))
    copy = draft.clone()
    assert copy.vocab is draft.vocab and copy.embed is draft.embed
    assert copy.constants is draft.constants and copy.config == draft.config
    before = {name: t.detach().clone() for name, t in draft.named_tensors().items()}
    name = "fc.weight"
    copy.take({name: torch.zeros_like(before[name])})
    assert not copy.tensor(name).any()
    for other, value in draft.named_tensors().items():
        assert torch.equal(value, before[other])
        assert other == name or torch.equal(copy.tensor(other), before[other])
