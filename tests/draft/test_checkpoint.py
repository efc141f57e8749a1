"""Checkpoints: write and read, strictness, errors that name the tensor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from tests.train.toys import HIDDEN, VOCAB, ToyTarget, config
from vllm_tide.draft import (
    DraftError,
    Eagle3Config,
    Eagle3Draft,
    TargetRows,
    VocabMap,
    export_tensors,
    load_draft,
    save_draft,
)
from vllm_tide.draft.checkpoint import build_draft

TOY = ToyTarget()


def _pruned() -> Eagle3Draft:
    vocab_map = VocabMap.from_target_ids(torch.arange(3, 43), VOCAB)
    return Eagle3Draft.initialise(
        config(draft_vocab_size=40), TOY.embed, TOY.head, vocab_map
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_draft_loads_bit_identically(tmp_path, dtype):
    draft = _pruned()
    save_draft(draft, tmp_path, dtype)
    again = load_draft(tmp_path, TOY.rows)
    assert again.config == draft.config
    assert again.checkpoint_dtype == dtype
    assert torch.equal(again.vocab.target_ids, draft.vocab.target_ids)
    before, after = export_tensors(draft, dtype), export_tensors(again)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fc.weight": None}, "missing fc.weight"),
        ({"extra.weight": torch.zeros(1)}, "unexpected extra.weight"),
        ({"norm.weight": torch.zeros(3)}, r"norm.weight has shape \(3,\)"),
        ({"fc.weight": torch.zeros(HIDDEN, 96, dtype=torch.int8)}, "quantised"),
        ({"d2t": None}, "d2t is missing"),
        ({"d2t": torch.zeros(40, dtype=torch.int64) + 60}, "outside"),
        ({"t2d": torch.ones(VOCAB, dtype=torch.bool)}, "t2d"),
        ({"lm_head.weight": None}, "lm_head.weight is missing"),
    ],
)
def test_wrong_tensors_are_refused_by_name(change, message):
    draft = _pruned()
    tensors = export_tensors(draft, torch.float32) | change
    tensors = {n: t for n, t in tensors.items() if t is not None}
    with pytest.raises(DraftError, match=message):
        build_draft(draft.config, tensors, TOY.rows)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["Eagle3Qwen3ForCausalLM"]}, "architecture"),
        ({"num_hidden_layers": 2}, "num_hidden_layers"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "yarn"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 3, 3]}, "repeats a layer"),
        ({"norm_before_fc": True, "fc_norm": True}, "exclude"),
        ({"layer_types": ["sliding_attention"]}, "sliding"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"hidden_size": None}, "hidden_size"),
    ],
)
def test_unsupported_configs_are_refused(change, message):
    with pytest.raises(DraftError, match=message):
        Eagle3Config.from_json(config().to_json() | change)


def test_borrowed_lm_head_is_frozen_and_not_exported():
    draft = TOY.draft()
    tensors = export_tensors(draft, torch.float32)
    shared = {"lm_head.weight"}
    again = build_draft(draft.config, tensors, TOY.rows, shared)
    assert not again.tensor("lm_head.weight").requires_grad
    assert "lm_head.weight" not in export_tensors(again)


def test_target_rows_from_shards_and_tied(tmp_path: Path):
    embed, head = torch.randn(9, 4), torch.randn(9, 4)
    save_file({"model.embed_tokens.weight": embed}, tmp_path / "a.safetensors")
    save_file({"lm_head.weight": head}, tmp_path / "b.safetensors")
    index = {
        "model.embed_tokens.weight": "a.safetensors",
        "lm_head.weight": "b.safetensors",
    }
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": index}))
    settings_path = tmp_path / "config.json"
    settings_path.write_text(json.dumps({"vocab_size": 8}))
    rows = TargetRows.load(tmp_path)
    assert torch.equal(rows.lm_head, head[:8])
    assert torch.equal(rows.embed_tokens, embed[:8])
    settings_path.write_text(json.dumps({"tie_word_embeddings": True}))
    tied = TargetRows.load(tmp_path)
    assert torch.equal(tied.lm_head, embed)


@settings(deadline=None, max_examples=50)
@given(st.sets(st.integers(0, 99), min_size=1))
def test_vocabulary_maps_are_inverse(target_ids):
    ids = torch.tensor(sorted(target_ids))
    vocab = VocabMap.from_target_ids(ids, 100)
    assert torch.equal(vocab.draft_ids[vocab.target_ids], torch.arange(len(ids)))
    assert int(vocab.t2d.sum()) == len(ids)
    again = VocabMap.from_d2t(vocab.d2t, 100)
    assert torch.equal(again.target_ids, ids)
    again.check_t2d(vocab.t2d)
