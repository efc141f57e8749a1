"""Last good drafts on disk."""

from __future__ import annotations

import os
import stat

import pytest
import torch

from tests import toys
from vllm_tide.deploy.store import (
    DraftRefused,
    DraftStore,
    fingerprint_of,
    store_fingerprint,
)
from vllm_tide.draft.config import DraftError
from vllm_tide.draft.fresh import MARK
from vllm_tide.transport.draft_weights import DraftWeights

OURS = store_fingerprint("target-a", {"hidden_size": 8})


def tensors(seed=0):
    random = torch.Generator().manual_seed(seed)
    return {
        "fc.weight": torch.randn(4, 6, generator=random),
        "norm.weight": torch.randn(5, generator=random).bfloat16(),
        "d2t": torch.arange(3),
    }


def store(tmp_path, **changes):
    return DraftStore(tmp_path / "heads", **{"fingerprint": OURS, **changes})


def damage(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_a_stored_draft_is_read_back_to_the_bit(tmp_path):
    ours = store(tmp_path)
    assert ours.newest() is None
    path = ours.put(
        tensors(), 7, holdout={"acceptance": 2.5}, served={"length": float("nan")}
    )
    head = store(tmp_path).newest()
    assert head.path == path
    assert head.version == 7
    assert head.holdout == {"acceptance": 2.5}
    assert head.served == {"length": None}
    assert set(head.tensors) == set(tensors())
    for name, value in tensors().items():
        assert head.tensors[name].dtype == value.dtype
        assert torch.equal(head.tensors[name], value)


def test_the_last_three_of_each_fingerprint_are_stored(tmp_path):
    ours, other = store(tmp_path), store(tmp_path, fingerprint="f" * 64)
    ours.put(tensors(), 1)
    for version in (7, 8, 9, 1, 2):  # a restarted server counts from 1
        other.put(tensors(version), version)
    assert ours.newest().version == 1
    assert [h.version for h in other.drafts()] == [2, 1, 9]
    assert len(list(ours.directory.iterdir())) == 4


def test_files_are_private(tmp_path):
    os.umask(os.umask(0))  # the default umask of the machine is irrelevant
    path = store(tmp_path).put(tensors(), 1)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize("how", ["flip", "cut", "empty"])
def test_damaged_drafts_are_skipped_with_the_reason(tmp_path, how):
    ours = store(tmp_path)
    ours.put(tensors(0), 1)
    path = ours.put(tensors(1), 2)
    if how == "flip":
        damage(path, path.stat().st_size // 2)
    else:
        path.write_bytes(path.read_bytes()[: -5 if how == "cut" else 0])
    assert ours.newest().version == 1
    (reason,) = ours.refused
    assert path.stem in reason and "damaged" in reason


@pytest.mark.parametrize("meta", [{}, {"fingerprint": OURS, "version": "x"}])
def test_foreign_content_is_refused(tmp_path, meta):
    ours = store(tmp_path)
    weights = DraftWeights.encode({}, 0, meta)
    name = f"head-{OURS[:16]}-00000001-{weights.sha256.hex()}.safetensors"
    (ours.directory / name).write_bytes(weights.data)
    assert ours.newest() is None
    assert "cannot be parsed" in ours.refused[0]


def test_a_draft_of_another_target_is_refused(tmp_path):
    other = store(tmp_path, fingerprint=OURS[:16] + "0" * 48)
    other.put(tensors(), 1)
    ours = store(tmp_path)
    assert ours.newest() is None
    assert "another target or draft" in ours.refused[0]


def test_a_file_that_others_may_write_and_a_link_are_refused(tmp_path):
    ours = store(tmp_path)
    path = ours.put(tensors(), 1)
    path.chmod(0o620)
    assert ours.newest() is None
    assert "another user" in ours.refused[0]
    path.chmod(0o600)
    assert ours.newest() is not None
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert ours.newest() is None


def test_not_finite_is_never_stored(tmp_path):
    ours = store(tmp_path)
    bad = tensors() | {"fc.weight": torch.full((4, 6), float("nan"))}
    with pytest.raises(DraftRefused, match="fc.weight is not finite"):
        ours.put(bad, 1)
    assert list(ours.directory.iterdir()) == []


def test_files_of_a_killed_writer_are_removed_in_time(tmp_path):
    ours = store(tmp_path)
    left, young = (ours.directory / f".tide-{name}.tmp" for name in "xy")
    for file in (left, young):
        file.write_bytes(b"x")
    os.utime(left, (0, 0))
    ours.put(tensors(), 2)
    assert not left.exists() and young.exists()


def test_foreign_files_are_left_alone(tmp_path):
    ours = store(tmp_path)
    names = ("ubuntu.iso.part", "thesis.tmp", ".draft.tmp", ".x.part", "tmpab12.tmp")
    theirs = [ours.directory / name for name in names]
    for file in theirs:
        file.write_bytes(b"x")
        os.utime(file, (0, 0))
    ours.put(tensors(), 1)
    assert [file for file in theirs if not file.exists()] == []


def test_a_bad_draft_can_be_dropped(tmp_path):
    ours = store(tmp_path)
    ours.put(tensors(0), 1)
    ours.put(tensors(1), 2)
    ours.drop(ours.newest())
    assert ours.newest().version == 1
    assert len(list(ours.directory.iterdir())) == 1


def test_fingerprint_depends_on_target_shape_and_initial_weights():
    base = store_fingerprint("a", {"hidden_size": 8, "transformers_version": "1"})
    assert base == store_fingerprint(
        "a", {"transformers_version": "2", "hidden_size": 8}
    )
    assert base != store_fingerprint("b", {"hidden_size": 8})
    assert base != store_fingerprint("a", {"hidden_size": 8}, "weights")
    assert base != store_fingerprint("a", {"hidden_size": 16})


def test_another_initial_draft_has_its_own_stored_drafts(tmp_path):
    target = toys.make_target(tmp_path / "target")
    first, same, other = (
        fingerprint_of(target, toys.make_draft(tmp_path / name, target, seed))
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert first == same != other
    fresh = (
        fingerprint_of(
            target, toys.make_draft(tmp_path / name, target, seed, **{MARK: {}})
        )
        for name, seed in (("d", 1), ("e", 2))
    )
    assert len(set(fresh)) == 1


def test_an_unusable_directory_names_the_knob(tmp_path):
    (tmp_path / "heads").write_text("a file")
    with pytest.raises(DraftError, match="tide.train.state_dir"):
        store(tmp_path)
