"""The product's own checks of draft and target, from headers alone."""

import pytest

from tests.doctor.samples import (
    HIDDEN,
    TARGET,
    draft_tensors,
    make_subject,
    write_draft,
    write_model,
)
from vllm_tide.doctor import fit
from vllm_tide.doctor.checkpoints import CheckpointError, stored_tensors
from vllm_tide.doctor.draft_size import draft_bytes
from vllm_tide.doctor.finding import Status


@pytest.fixture
def target(tmp_path):
    return write_model(tmp_path / "target", TARGET)


def examined(tmp_path, section=None, **models):
    (found,) = fit.check(make_subject(tmp_path, section, **models))
    return found


def test_a_draft_that_fits_is_ok(tmp_path, target):
    found = examined(tmp_path, draft=write_draft(tmp_path / "d"), model=target)
    assert found.status is Status.OK, found
    assert "layers [1, 2, 3]" in found.sentence


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"hidden_size": 128}, "its hidden_size is 128, but the target's hidden size"),
        ({"vocab_size": 321}, "its vocab_size is 321"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 9]}, "each id must lie in 0..4"),
        ({"hidden_act": "gelu"}, "The trainer cannot take the draft"),
        ({"intermediate_size": 64}, "has shape (64, 128)"),
    ],
)
def test_a_draft_that_does_not_fit_fails(tmp_path, target, change, part):
    draft = write_draft(tmp_path / "d", **change)
    found = examined(tmp_path, draft=draft, model=target)
    assert found.status is Status.FAILED
    assert part in found.sentence


def test_a_missing_tensor_fails(tmp_path, target):
    tensors = draft_tensors()
    del tensors["fc.weight"]
    draft = write_draft(tmp_path / "d", tensors)
    found = examined(tmp_path, draft=draft, model=target)
    assert found.status is Status.FAILED
    assert "missing fc.weight" in found.sentence


def test_a_file_cut_short_fails(tmp_path, target):
    draft = write_draft(tmp_path / "d")
    file = draft / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    found = examined(tmp_path, draft=draft, model=target)
    assert found.status is Status.FAILED
    assert "runs past the end" in found.sentence


def test_a_draft_that_is_not_there_is_the_configuration_s_failure(tmp_path, target):
    found = examined(tmp_path, draft=tmp_path / "gone", model=target)
    assert found.status is Status.SKIPPED
    assert examined(tmp_path, model=target).status is Status.SKIPPED


def test_another_method_fails(tmp_path, target):
    subject = make_subject(tmp_path, draft=write_draft(tmp_path / "d"), model=target)
    subject.speculative["method"] = "mtp"
    (found,) = fit.check(subject)
    assert found.status is Status.FAILED
    assert "tide trains EAGLE-3 drafts" in found.sentence


def test_without_a_target_it_is_skipped(tmp_path):
    found = examined(tmp_path, draft=write_draft(tmp_path / "d"))
    assert found.status is Status.SKIPPED


def test_a_target_elsewhere_is_skipped_and_not_fetched(tmp_path):
    found = examined(tmp_path, draft=write_draft(tmp_path / "d"), model="no/such")
    assert found.status is Status.SKIPPED


def test_a_fresh_head_is_judged_and_not_built(tmp_path, target, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found = examined(tmp_path, draft="fresh", model=target)
    assert found.status is Status.OK
    section = {"fresh": {"draft_vocab_size": 1000}}
    found = examined(tmp_path, section, draft="fresh", model=target)
    assert found.status is Status.FAILED
    assert "tide.fresh.draft_vocab_size" in found.sentence
    assert not (tmp_path / "cache").exists()


def test_the_draft_s_size_is_that_of_its_tensors(tmp_path, target):
    draft = write_draft(tmp_path / "d")
    expected = sum(tensor.nbytes for tensor in draft_tensors().values())
    assert draft_bytes(make_subject(tmp_path, draft=draft)) == expected
    fresh = draft_bytes(make_subject(tmp_path, draft="fresh", model=target))
    assert fresh == expected + 8 * 320
    assert draft_bytes(make_subject(tmp_path)) is None


def test_headers_are_read_without_the_weights(tmp_path):
    found = stored_tensors(write_draft(tmp_path / "d"))
    assert found["fc.weight"].shape == (HIDDEN, 3 * HIDDEN)
    assert found["fc.weight"].num_bytes == 2 * 3 * HIDDEN**2


@pytest.mark.parametrize("content", [b"", b"\xff" * 64, b"\x02" + b"\0" * 7 + b"[]"])
def test_what_is_no_safetensors_file_is_refused(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match="no whole safetensors file"):
        stored_tensors(tmp_path)
