"""Any content of a draft's directory gives a trainer a draft or a one-line error."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.train.toys import ToyTarget, config
from vllm_tide.draft import DraftError, Eagle3Draft, load_draft, save_draft
from vllm_tide.draft.eagle3_config import Eagle3Config

TOY = ToyTarget()
IDS = "eagle_aux_hidden_state_layer_ids"
MANY = 10**6
ODD: list[dict[str, Any]] = [
    {"intermediate_size": 10**12},
    {"intermediate_size": 10**30},
    {"intermediate_size": True},
    {"head_dim": 10**11},
    {"head_dim": -2},
    {"head_dim": 15},
    {"head_dim": "sixteen"},
    {"head_dim": [16]},
    {"num_attention_heads": 10**18},
    {"num_key_value_heads": 3},
    {"num_key_value_heads": -1},
    {"num_key_value_heads": {}},
    {"hidden_size": 1.5},
    {"draft_vocab_size": "x"},
    {"draft_vocab_size": float("inf")},
    {"target_hidden_size": -64},
    {"vocab_size": 10**15},
    {"rms_norm_eps": "x"},
    {"rms_norm_eps": float("nan")},
    {"max_position_embeddings": float("inf")},
    {"rope_theta": "x"},
    {"rope_theta": -1},
    {"rope_theta": float("nan")},
    {"rope_theta": float("inf")},
    {"rope_scaling": [1]},
    {"rope_scaling": "linear"},
    {"rope_scaling": {"rope_type": ["linear"]}},
    {"rope_scaling": {"rope_type": "linear", "factor": float("nan")}},
    {
        "rope_scaling": {
            "rope_type": "llama3",
            "low_freq_factor": 4.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 10**400,
        }
    },
    {"eagle_config": [1]},
    {"eagle_config": "x"},
    {"transformer_layer_config": {"rope_scaling": 3}},
    {"architectures": 7},
    {"architectures": ["x" * MANY]},
    {"architectures": [{}]},
    {"layer_types": 3},
    {"quantization_config": "x" * MANY},
    {"num_aux_hidden_states": "x" * MANY},
    {IDS: 3},
    {IDS: ["a", "b"]},
    {IDS: {"a": 1}},
    {IDS: [None]},
    {IDS: [0] * MANY},
    {IDS: list(range(MANY))},
    {IDS: list(range(MANY)), "fc_norm": True},
    {IDS: [float("inf")]},
]


@pytest.fixture
def folder(tmp_path):
    save_draft(TOY.draft(), tmp_path, torch.float32)
    return tmp_path


def refused(folder) -> str:
    with pytest.raises(DraftError) as error:
        load_draft(folder, TOY.rows)
    message = str(error.value)
    assert len(message) < 400 and "\n" not in message, message[:400]
    return message


@pytest.mark.parametrize("change", ODD, ids=lambda change: str(change)[:40])
def test_an_invalid_configuration_gives_one_short_line(change, folder):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert "draft" in refused(folder)


@pytest.mark.parametrize(
    "text", [b"[" * 200_000, b"{", b"[]", b"\xff\xfe", b'{"hidden_size": 1', b""]
)
def test_an_invalid_text_gives_one_short_line(text, folder):
    (folder / "config.json").write_bytes(text)
    assert "config.json" in refused(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("kind", ["fifo", "directory", "absent"])
def test_a_special_file_does_not_block(name, kind, folder):
    (folder / name).unlink()
    if kind == "fifo":
        os.mkfifo(folder / name)
    elif kind == "directory":
        (folder / name).mkdir()
    assert name.removeprefix("model") in refused(folder)


def test_a_pipe_as_the_targets_index_does_not_block(folder, tmp_path):
    os.mkfifo(tmp_path / "model.safetensors.index.json")
    with pytest.raises(DraftError):
        load_draft(folder, tmp_path)


def test_a_file_of_many_invalid_tensors_is_not_listed_whole(folder):
    path = folder / "model.safetensors"
    more = {f"odd.{i}.weight": torch.zeros(1) for i in range(2000)}
    save_file(load_file(path) | more, path)
    assert "odd.0.weight" in refused(folder) and "1997 more" in refused(folder)
    save_file({"fc.weight": torch.zeros(1)}, path)
    assert "missing" in refused(folder)
    path.write_bytes(path.read_bytes()[:-2])
    assert "cannot be read" in refused(folder)


@pytest.mark.parametrize(
    "change",
    [
        {"d2t": torch.full((64,), float("nan"))},
        {"d2t": torch.full((64,), 2**62)},
        {"t2d": torch.zeros(64), "d2t": torch.zeros(64).long()},
        {"norm.weight": torch.ones(64, dtype=torch.bool)},
        {"fc.weight": torch.ones(1, 1, 1)},
        {"lm_head.weight": torch.ones(0, 64)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_invalid_tensors_give_one_short_line(change, folder):
    path = folder / "model.safetensors"
    save_file(load_file(path) | change, path)
    assert refused(folder)


def test_valid_numbers_pass():
    shape = config()
    for change in (
        {"rms_norm_eps": 1e-6},
        {"head_dim": 256},
        {"max_position_embeddings": 10_485_760},
        {"rope_theta": 5e6},
        {"num_key_value_heads": None, "max_position_embeddings": None},
    ):
        assert Eagle3Config.from_json(shape.to_json() | change)
    assert Eagle3Draft.initialise(shape, TOY.embed, TOY.head)
