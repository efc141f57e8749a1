"""The configuration, and draft against target: the server's messages, from headers."""

import pytest

from tests.doctor.samples import (
    TARGET,
    draft_tensors,
    examined,
    make_subject,
    write_draft,
    write_model,
)
from vllm_tide.doctor.models import draft_bytes
from vllm_tide.doctor.run import Status


@pytest.fixture
def target(tmp_path):
    return write_model(tmp_path / "target", TARGET)


def fit_of(tmp_path, section=None, **models):
    return examined(make_subject(tmp_path, section, **models), "fit")


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({}, "layers [1, 2, 3]"),
        ({"hidden_size": 128}, "its hidden_size is 128, but the target's hidden size"),
        ({"vocab_size": 321}, "its vocab_size is 321"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 9]}, "the ids must be distinct"),
        ({"hidden_act": "gelu"}, "The trainer cannot load the draft"),
        ({"intermediate_size": 64}, "has shape (64, 128)"),
    ],
)
def test_a_draft_is_checked_against_the_target(tmp_path, target, change, part):
    draft = write_draft(tmp_path / "d", **change)
    finding = fit_of(tmp_path, draft=draft, model=target)
    assert finding.status is (Status.FAILED if change else Status.OK)
    assert part in finding.sentence


def test_files_that_are_no_whole_draft_fail(tmp_path, target):
    tensors = draft_tensors()
    del tensors["fc.weight"]
    draft = write_draft(tmp_path / "d", tensors)
    assert "missing fc.weight" in fit_of(tmp_path, draft=draft, model=target).sentence
    for content in (b"", b"\xff" * 64, b"\x02" + b"\0" * 7 + b"[]"):
        (draft / "model.safetensors").write_bytes(content)
        finding = fit_of(tmp_path, draft=draft, model=target)
        assert finding.status is Status.FAILED
        assert "is not a complete safetensors file" in finding.sentence


def test_a_draft_stored_as_bin_is_checked_like_any(tmp_path, target):
    import torch

    draft, path = write_draft(tmp_path / "d"), tmp_path / "d" / "pytorch_model.bin"
    size = draft_bytes(make_subject(tmp_path, draft=draft, model=target))
    (draft / "model.safetensors").unlink()
    tensors = {name: torch.from_numpy(a) for name, a in draft_tensors().items()}
    torch.save(tensors, path)
    finding = fit_of(tmp_path, draft=draft, model=target)
    assert (finding.status, size) == (
        Status.OK,
        draft_bytes(make_subject(tmp_path, draft=draft, model=target)),
    )
    del tensors["norm.weight"]
    torch.save(tensors, path)
    finding = fit_of(tmp_path, draft=draft, model=target)
    assert "missing norm.weight" in finding.sentence
    path.write_bytes(path.read_bytes()[:5000])
    finding = fit_of(tmp_path, draft=draft, model=target)
    assert finding.status is Status.FAILED
    assert "pytorch_model.bin is missing, damaged, or no" in finding.sentence


def test_missing_models_are_skipped(tmp_path, target):
    draft = write_draft(tmp_path / "d")
    for named in (
        {"draft": tmp_path / "gone", "model": target},
        {"model": target},
        {"draft": draft},
        {"draft": draft, "model": "no/such"},  # nothing is fetched
    ):
        assert fit_of(tmp_path, **named).status is Status.SKIPPED, named
    absent = fit_of(tmp_path, draft=draft, model=str(tmp_path / "gone"))
    assert absent.status is Status.FAILED and "There is no model at" in absent.sentence


def test_a_bad_setting_is_not_blamed_on_the_draft(tmp_path, target):
    subject = make_subject(tmp_path, draft=write_draft(tmp_path / "d"), model=target)
    subject.speculative["method"] = "mtp"
    subject.speculative["tide"] = {"run_dir": "/proc/x"}
    assert examined(subject, "fit").status is Status.OK


def test_a_fresh_draft_is_checked_and_not_built(tmp_path, target, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    finding = fit_of(tmp_path, draft="fresh", model=target)
    assert finding.status is Status.OK
    section = {"fresh": {"draft_vocab_size": 1000}}
    finding = fit_of(tmp_path, section, draft="fresh", model=target)
    assert finding.status is Status.FAILED
    assert "tide.fresh.draft_vocab_size" in finding.sentence
    assert not (tmp_path / "cache").exists()


def test_the_drafts_size_is_that_of_its_tensors(tmp_path, target):
    draft = write_draft(tmp_path / "d")
    expected = sum(tensor.nbytes for tensor in draft_tensors().values())
    assert draft_bytes(make_subject(tmp_path, draft=draft)) == expected
    fresh = draft_bytes(make_subject(tmp_path, draft="fresh", model=target))
    assert fresh == expected + 8 * 320
    assert draft_bytes(make_subject(tmp_path)) is None
