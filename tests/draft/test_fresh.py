"""A fresh draft fits its target, starts from its output rows, and is built once."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.train.toys import LLAMA, VOCAB, ToyTarget
from vllm_tide.config import FreshConfig
from vllm_tide.draft import DraftError, Eagle3Config, TargetRows, load_draft
from vllm_tide.draft.checkpoint import read_tensors
from vllm_tide.draft.fresh import (
    first_target_ids,
    fresh_config,
    fresh_directory,
    fresh_layer_ids,
    is_fresh,
    with_vocab_size,
)
from vllm_tide.draft.target import rows_fingerprint

TOY = ToyTarget()


@pytest.fixture
def target(tmp_path: Path) -> Path:
    folder = tmp_path / "target"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    rows = {"model.embed_tokens.weight": TOY.embed, "lm_head.weight": TOY.head}
    save_file(rows, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_lm_head_starts_from_the_targets_rows_as_a_copy(target, tmp_path, dtype):
    folder = fresh_directory(target, FreshConfig(), dtype, tmp_path / "c")
    rows = TargetRows.load(target)
    draft = load_draft(folder, rows)
    assert is_fresh(folder)
    assert draft.owns_lm_head and not draft.owns_embed
    assert draft.config.draft_vocab_size == VOCAB
    assert draft.config.aux_layer_ids == (2, 4, 5)
    assert draft.config.rope.theta == 5e5
    assert draft.checkpoint_dtype == dtype
    stored = read_tensors(folder)["lm_head.weight"]
    theirs = rows.lm_head.to(dtype)
    # vLLM would serve the target's module for both if all were equal.
    assert int((stored != theirs).sum()) == 1
    torch.testing.assert_close(stored.float(), theirs.float(), rtol=2**-7, atol=0)


def test_a_pruned_lm_head_has_the_rows_of_its_tokens(target, tmp_path):
    (target / "generation_config.json").write_text('{"eos_token_id": [63, 50]}')
    # FreshConfig requires 64 tokens at least: this target has no more.
    settings = FreshConfig().model_copy(update={"draft_vocab_size": 20})
    draft = load_draft(
        fresh_directory(target, settings, torch.float32, tmp_path / "c"), target
    )
    ids = draft.vocab.target_ids
    assert ids.tolist() == [*range(18), 50, 63]
    assert torch.equal(draft.tensor("lm_head.weight"), TOY.head[ids])
    assert torch.equal(draft.constants["d2t"], draft.vocab.d2t)


def test_it_is_built_once_and_again_for_another_configuration(target, tmp_path):
    cache = tmp_path / "c"
    first = fresh_directory(target, FreshConfig(), torch.float32, cache)
    stamp = (first / "model.safetensors").stat().st_mtime_ns
    assert fresh_directory(target, FreshConfig(), torch.float32, cache) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == stamp
    others = {
        fresh_directory(target, FreshConfig(), torch.bfloat16, cache),
        fresh_directory(target, FreshConfig(draft_vocab_size=64), torch.float32, cache),
    }
    assert len(others | {first}) == 3
    assert {path.name[0] for path in cache.iterdir()}.isdisjoint({"."})
    for path in (cache, first):
        assert path.stat().st_mode & 0o777 == 0o700


def test_a_damaged_copy_is_built_again(target, tmp_path):
    cache = tmp_path / "c"
    first = fresh_directory(target, FreshConfig(), torch.float32, cache)
    # Copies: the file behind them is overwritten.
    want = {name: t.clone() for name, t in read_tensors(first).items()}
    (first / "model.safetensors").write_bytes(b"cut short")
    again = fresh_directory(target, FreshConfig(), torch.float32, cache)
    assert again == first
    got = read_tensors(again)
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_several_servers_may_start_at_once(target, tmp_path):
    def build(_: int) -> Path:
        return fresh_directory(target, FreshConfig(), torch.float32, tmp_path / "c")

    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(build, range(4)))) == 1
    assert len(list((tmp_path / "c").iterdir())) == 1


def test_other_weights_or_another_shape_have_another_fingerprint(target):
    first = rows_fingerprint(target)
    assert rows_fingerprint(target) == first
    other = TOY.head.clone()
    other[0, 0] += 1
    rows = {"model.embed_tokens.weight": TOY.embed, "lm_head.weight": other}
    save_file(rows, target / "model.safetensors")
    second = rows_fingerprint(target)
    (target / "config.json").write_text(json.dumps(LLAMA | {"rope_theta": 1e4}))
    assert len({first, second, rows_fingerprint(target)}) == 3


def test_an_unusable_target_gives_one_line(target, tmp_path):
    quantised = {"model.embed_tokens.weight": TOY.embed.to(torch.int8)}
    save_file(quantised, target / "model.safetensors")
    with pytest.raises(DraftError, match="quantised"):
        fresh_directory(target, FreshConfig(), torch.float32, tmp_path / "c")
    (tmp_path / "file").write_text("")
    with pytest.raises(DraftError, match="XDG_CACHE_HOME"):
        fresh_directory(target, FreshConfig(), torch.float32, tmp_path / "file" / "c")
    with pytest.raises(DraftError, match="at least 3 are needed"):
        fresh_layer_ids(2)
    assert fresh_layer_ids(3) == (0, 1, 2) and fresh_layer_ids(32) == (2, 16, 29)
    assert list((tmp_path / "c").iterdir()) == []
    os.remove(target / "model.safetensors")
    with pytest.raises(DraftError, match="no .safetensors"):
        fresh_directory(target, FreshConfig(), torch.float32, tmp_path / "c")


def shape(raw: dict, **settings: object) -> Eagle3Config:
    return fresh_config(raw, FreshConfig(**settings))


def test_a_fresh_draft_has_as_many_tokens_as_its_trainer_can_afford():
    def size(vocab: int, device: str, **settings: int) -> int | None:
        return with_vocab_size(FreshConfig(**settings), vocab, device).draft_vocab_size

    assert size(49152, "cpu") == 4096
    assert size(49152, "cuda:1") == 32768
    assert size(1000, "cpu") == size(1000, "cuda") == 1000
    assert size(49152, "cpu", draft_vocab_size=8192) == 8192


def test_shapes_of_published_families():
    gpt_oss = shape(
        LLAMA
        | {"model_type": "gpt_oss", "hidden_size": 2880, "head_dim": 64}
        | {"num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 201088}
        | {"rope_parameters": {"rope_type": "yarn", "rope_theta": 150000.0}}
        | {"intermediate_size": 2880},
        draft_vocab_size=64000,
    )
    assert (gpt_oss.rope.kind, gpt_oss.rope.theta) == ("default", 150000.0)
    assert (gpt_oss.draft_vocab_size, gpt_oss.intermediate_size) == (64000, 2880)
    latent = shape(LLAMA | {"kv_lora_rank": 512, "hidden_size": 7168})
    assert (latent.num_attention_heads, latent.num_key_value_heads) == (56, 14)
    gemma = shape(
        {
            "text_config": LLAMA
            | {
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 8.0},
                    "sliding_attention": {"rope_theta": 1e4},
                }
            }
        }
    )
    assert (gemma.rope.kind, gemma.rope.factor) == ("linear", 8.0)
    with pytest.raises(DraftError, match=r"tide\.fresh\.draft_vocab_size: 100"):
        shape(LLAMA, draft_vocab_size=100)
    for one in (gpt_oss, latent, gemma):
        assert Eagle3Config.from_json(one.to_json()) == one


def test_first_tokens_are_special_ones_bytes_and_the_lowest(tmp_path):
    vocab = {"a": 90, "<0x0A>": 91, "the": 5, "é": 92}
    tokenizer = {
        "model": {"vocab": vocab},
        "added_tokens": [{"id": 97, "content": "<tool>"}, {"content": "no id"}],
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "config.json").write_text('{"eos_token_id": 99, "bos_token_id": null}')
    added = {"added_tokens_decoder": {"98": {}, "x": {}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(added))
    ids = first_target_ids(tmp_path, 100, 20)
    assert set(ids.tolist()) == {*range(14), 90, 91, 92, 97, 98, 99}
    # Half at most is reserved; the end of a text comes first.
    few = first_target_ids(tmp_path, 100, 4)
    assert set(few.tolist()) == {0, 1, 99, 90}
    assert first_target_ids(tmp_path, 100, 100).tolist() == list(range(100))
    assert first_target_ids(tmp_path / "none", 100, 3).tolist() == [0, 1, 2]
