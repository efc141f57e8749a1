"""Both forms of a draft are equivalent; an export has its measurements."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.train.toys import VOCAB, ToyTarget, config
from vllm_tide.draft import DraftError, Eagle3Config, Eagle3Draft, VocabMap, load_draft
from vllm_tide.draft.checkpoint import export_tensors, read_tensors, save_draft
from vllm_tide.draft.config import Rope, read_config
from vllm_tide.draft.export import ExportedDraft, from_directory, write_export
from vllm_tide.draft.speculators import (
    Verifier,
    save_speculators,
    speculators_config,
)

TOY = ToyTarget()
TARGET = Verifier("org/target", ("LlamaForCausalLM",), 5)
SHAPES = [
    {},
    {"draft_vocab_size": 40, "rope": Rope(5e5, "llama3", 8.0, 1.0, 4.0, 64)},
    {"fc_norm": True, "norm_output": True, "norm_before_residual": True},
    {"norm_before_fc": True, "aux_layer_ids": (1, 4), "rope": Rope(1e4, "linear", 2.0)},
]


def make(**changes: object) -> Eagle3Draft:
    shape = config(**changes)
    vocab_map = VocabMap.from_target_ids(torch.arange(shape.draft_vocab_size), VOCAB)
    return Eagle3Draft.initialise(shape, TOY.embed, TOY.head, vocab_map)


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def assert_same(got: dict, want: dict) -> None:
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype, name
        assert torch.equal(got[name], tensor), name


@pytest.mark.parametrize("changes", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hugging_face_to_speculators_and_back_is_exact(tmp_path, changes, dtype):
    save_draft(make(**changes), tmp_path / "hf", dtype)
    first = from_directory(tmp_path / "hf")
    save_speculators(tmp_path / "spec", first.config, first.tensors, TARGET)
    second = from_directory(tmp_path / "spec")
    assert second.config == first.config
    assert second.verifier == TARGET
    assert_same(dict(second.tensors), read_tensors(tmp_path / "hf"))
    write_export(tmp_path / "back", second, "hf")
    assert_same(read_tensors(tmp_path / "back"), read_tensors(tmp_path / "hf"))
    assert read_config(tmp_path / "back") == read_config(tmp_path / "hf")
    names = read_tensors(tmp_path / "spec")
    assert not [n for n in names if "midlayer" in n]
    assert "layers.0.self_attn.q_proj.weight" in names
    # A server compares publications with the names that it loaded.
    loaded = load_draft(tmp_path / "spec", TOY.rows)
    assert_same(export_tensors(loaded, stored_names=True), names)


@pytest.mark.vllm
@pytest.mark.parametrize("changes", SHAPES)
def test_vllm_reads_the_same_shape_from_either_form(changes):
    base = pytest.importorskip("vllm.transformers_utils.configs.speculators.base")
    shape = config(**changes)
    raw = speculators_config(shape, TARGET, "bfloat16")
    extracted = base.SpeculatorsConfig.extract_vllm_speculative_config(raw)
    assert extracted == {"method": "eagle3", "num_speculative_tokens": 5}
    read = base.SpeculatorsConfig.extract_transformers_pre_trained_config(raw)
    assert read["architectures"] == ["Eagle3LlamaForCausalLM"]
    flat = shape.to_json()
    for name in read.keys() & flat.keys() - {"architectures"}:
        assert read[name] == flat[name], name
    assert read.get("num_aux_hidden_states", 3) == shape.num_aux
    assert Eagle3Config.from_json({**read, "architectures": []}) == shape


def exported(**more: object) -> ExportedDraft:
    draft = make(draft_vocab_size=40)
    return ExportedDraft(draft.config, export_tensors(draft), TARGET, **more)


def test_the_card_has_the_measurements_and_nothing_else(tmp_path):
    figures = {"holdout_acceptance_new": 2.25, "loss": float("nan"), "gain": None}
    write_export(tmp_path / "out", exported(figures=figures, version=7), "speculators")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| Acceptance length, held out, teacher-forced | 2.250 |" in card
    assert "version 7" in card
    assert "40 of 64 tokens" in card
    for absent in ("loss", "Gain", "Served", "nan"):
        assert absent not in card
    write_export(tmp_path / "bare", exported(), "hf")
    assert "No measurements" in (tmp_path / "bare" / "README.md").read_text()


@pytest.mark.parametrize("form", ["hf", "speculators"])
def test_an_export_has_no_local_paths_and_is_readable_by_others(
    tmp_path, form, monkeypatch
):
    """Read by the hub's own library; it has no data of this machine."""
    from huggingface_hub import ModelCard

    (tmp_path / "models" / "a").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    places = ["models/a", str(tmp_path / "models" / "a"), "../a", "~/a", "a/b/c"]
    for number, place in enumerate(places):
        target = Verifier(place, ("LlamaForCausalLM",), 5)
        draft = replace(exported(trained=True), verifier=target)
        out = write_export(tmp_path / str(number), draft, form)
        for name in ("README.md", "config.json"):
            text = (out / name).read_text()
            assert place not in text and str(tmp_path) not in text
            assert "name_or_path" not in text
        card = ModelCard.load(out / "README.md")
        assert card.data.base_model is None and card.data.license is None
        assert "serve TARGET --speculative-config" in card.text
        assert "trained by vllm_tide" in card.text
        assert {oct(path.stat().st_mode)[-3:] for path in out.iterdir()} == {"644"}
        assert oct(out.stat().st_mode)[-3:] == "755"
    read_back = from_directory(out).verifier
    assert form == "hf" or read_back == Verifier("", ("LlamaForCausalLM",), 5)
    write_export(tmp_path / "out", exported(), form)
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert card.data.base_model == "org/target"
    assert set(card.data.tags) >= {"eagle3", "speculative-decoding", "vllm"}
    assert "trained" not in card.text
    assert ("speculators" in card.data.tags) == (form == "speculators")


def test_an_export_is_whole_or_absent(tmp_path):
    out = write_export(tmp_path / "out", exported(), "hf")
    assert files(out) == {"README.md", "config.json", "model.safetensors"}
    assert files(tmp_path) == {"out"}
    with pytest.raises(DraftError, match="not empty"):
        write_export(out, exported(), "hf")
    nameless = ExportedDraft(exported().config, exported().tensors)
    with pytest.raises(DraftError, match="--target"):
        write_export(tmp_path / "other", nameless, "speculators")
    whole = exported()
    for name, message in (
        ("fc.weight", r"missing fc\.weight"),
        ("d2t", "d2t is missing"),
    ):
        short = {key: t for key, t in whole.tensors.items() if key != name}
        with pytest.raises(DraftError, match=message):
            write_export(tmp_path / "other", replace(whole, tensors=short), "hf")
    assert files(tmp_path) == {"out"}
    # The mapping that a publication leaves out is rebuilt.
    short = {key: t for key, t in whole.tensors.items() if key != "t2d"}
    out = write_export(tmp_path / "short", replace(whole, tensors=short), "hf")
    assert torch.equal(read_tensors(out)["t2d"], whole.tensors["t2d"])


def test_a_speculators_config_without_switches_reads_as_in_vllm():
    raw = speculators_config(config(), TARGET, "bfloat16")
    for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
        del raw[name]
    raw["target_hidden_size"] = None
    shape = Eagle3Config.from_json(json.loads(json.dumps(raw)))
    assert shape.norm_before_residual  # the speculators default
    assert not shape.norm_before_fc
    assert shape.target_hidden_size == shape.hidden_size
