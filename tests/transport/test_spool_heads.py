"""Drafts, identities and models in a spool."""

from dataclasses import replace

import pytest

from tests.transport.samples import make_spec
from tests.transport.spool_toys import ROWS, head_tensors
from vllm_tide.draft.target import TargetRows
from vllm_tide.transport import TransportError, WeightsRefused, publication
from vllm_tide.transport.identity import difference, identity_of
from vllm_tide.transport.spool import DraftConflict, EngineFolder
from vllm_tide.transport.spool_models import local_models

SPEC = make_spec()


# Drafts


def test_a_draft_comes_back_to_the_bit_and_the_last_few_are_kept(store):
    folder = EngineFolder(store, "e1")
    assert folder.latest_draft() == 0
    foreign = ["x.safetensors", "y.safetensors", "z.safetensors"]
    for name in foreign:
        store.write(folder.path("heads", name), b"")
    for version in range(1, 6):
        blob = publication.encode(head_tensors(version), version, 1, {"a": 1})
        folder.write_draft(blob)
        assert folder.latest_draft() == version
        assert folder.read_draft() == blob
        got = publication.decode(folder.read_draft())
        assert (got.version, got.parent_version, got.meta) == (version, 1, {"a": 1})
        want = head_tensors(version)["fc.weight"][2]
        assert got.tensors["fc.weight"].data.tobytes() == want.tobytes()
    assert sorted(store.sizes(folder.path("heads"))) == sorted(
        ["latest.json", *foreign] + [f"{v:012d}.safetensors" for v in (3, 4, 5)]
    )
    with pytest.raises(DraftConflict, match="not newer"):
        folder.write_draft(blob)


@pytest.mark.parametrize("harm", ["cut", "flip", "manifest", "gone"])
def test_a_damaged_draft_is_refused(store, harm):
    folder = EngineFolder(store, "e1")
    folder.write_draft(publication.encode(head_tensors(1), 1, 0, {}))
    at = folder.path("heads", "000000000001.safetensors")
    body = bytearray(store.read(at))
    reason = "sha256"
    if harm == "cut":
        store.write(at, body[:-1])
        reason = "truncated"
    elif harm == "flip":
        body[-1] ^= 1
        store.write(at, body)
    elif harm == "manifest":
        entry = folder.read_json("heads/latest.json")
        folder.write_json("heads/latest.json", {**entry, "sha256": "00"}, durable=True)
    else:
        store.remove(folder.path("heads", "latest.json"))
        reason = "empty"
    with pytest.raises(WeightsRefused) as caught:
        publication.decode(folder.read_draft())
    assert caught.value.reason == reason


def test_a_draft_that_another_version_stored_is_refused_in_a_sentence(store):
    """Before, a manifest of each draft held its digests; its number still counts."""
    folder = EngineFolder(store, "e1")
    folder.write_json("heads/latest.json", {"version": 7}, durable=True)
    with pytest.raises(WeightsRefused, match="run the same vllm_tide on both sides"):
        folder.read_draft()
    assert folder.latest_draft() == 7
    folder.write_draft(publication.encode(head_tensors(8), 8, 0, {}))
    assert folder.read_draft().version == 8


# Identity and models


def test_engines_with_the_same_models_fit_and_others_do_not(engines):
    first = engines("a", seed=0)
    assert difference("b", engines("b", seed=0).identity, "a", first.identity) == ""
    other = engines("c", seed=1)
    sentence = difference("c", other.identity, "a", first.identity)
    assert "another target" in sentence
    assert "--engine c" in sentence
    for changes, says in (
        ({"aux_layer_ids": (1, 2, 6)}, "other layers"),
        ({"feature_dtype": "float32"}, "features of another type"),
        ({"shared": ["lm_head.weight"]}, "shares other"),
        ({"teacher": "topk"}, "tide.capture.teacher"),
    ):
        changed = replace(first.manifest, **changes)
        assert says in difference("d", identity_of(changed), "a", first.identity)


def test_a_trainer_elsewhere_gets_the_rows_and_the_draft(store, engines, tmp_path):
    engine = engines("a")
    relay = engine.relay(store)
    relay.close()
    folder = engine.folder(store)
    entry = folder.read_engine()
    assert entry.identity.items() > engine.identity.items()
    assert entry.spec == engine.spec
    assert entry.manifest == engine.manifest
    here, draft = local_models(folder, entry, tmp_path / "cache")
    assert str(here) == engine.manifest.target_path  # the same target is here
    assert (draft / "model.safetensors").read_bytes() == (
        (tmp_path / "a/models/draft/model.safetensors").read_bytes()
    )
    away = replace(entry.manifest, target_path="/nowhere")
    target, _ = local_models(folder, replace(entry, manifest=away), tmp_path / "cache")
    assert target.parent == tmp_path / "cache"
    want, got = TargetRows.load(engine.manifest.target_path), TargetRows.load(target)
    assert got.embed_tokens.equal(want.embed_tokens)
    assert got.lm_head.equal(want.lm_head)
    assert got.lm_head.shape == (ROWS, 8)
    whole = (tmp_path / "a/models/target/model.safetensors").stat().st_size
    assert (target / "model.safetensors").stat().st_size < whole


def test_a_damaged_model_file_is_refused(store, engines, tmp_path):
    engine = engines("a")
    engine.relay(store).close()
    folder = engine.folder(store)
    at = folder.path("draft", "model.safetensors")
    store.write(at, store.read(at)[:-1])
    with pytest.raises(TransportError, match="damaged"):
        local_models(folder, folder.read_engine(), tmp_path / "cache")
    assert [p for p in (tmp_path / "cache").glob("*") if p.is_dir()] == []


@pytest.mark.parametrize("left", [b"", b"\x00" * 200, None])
def test_what_a_crash_left_of_a_model_here_is_fetched_anew(
    store, engines, tmp_path, left
):
    engine = engines("a")
    engine.relay(store).close()
    folder, entry = engine.folder(store), engine.folder(store).read_engine()
    away = replace(entry, manifest=replace(entry.manifest, target_path="/nowhere"))
    first = local_models(folder, away, tmp_path / "cache")
    files = [path / "model.safetensors" for path in first]
    want = [(path.read_bytes(), path.stat().st_ino) for path in files]
    assert local_models(folder, away, tmp_path / "cache") == first
    assert [(path.read_bytes(), path.stat().st_ino) for path in files] == want
    for path in files:
        path.unlink() if left is None else path.write_bytes(left)
    assert local_models(folder, away, tmp_path / "cache") == first
    assert [path.read_bytes() for path in files] == [data for data, _ in want]
