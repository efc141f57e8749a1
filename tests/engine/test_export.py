"""Unpatched vLLM loads the output of `vllm-tide export`, in either form."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import toys
from tests.engine.forked import run_forked
from tests.patches.pristine import make_pristine
from vllm_tide.cli import export
from vllm_tide.draft import (
    Eagle3Draft,
    TargetRows,
    VocabMap,
    export_tensors,
    load_draft,
    save_draft,
)
from vllm_tide.draft.config import Rope, read_config
from vllm_tide.draft.eagle3_config import Eagle3Config
from vllm_tide.transport.draft_weights import DraftWeights
from vllm_tide.transport.rendezvous import EngineManifest, write_manifest
from vllm_tide.transport.versions import first_version
from vllm_tide.transport.weights import WeightsSegment, WeightsWriter

pytestmark = pytest.mark.vllm
SCRIPT = Path(__file__).with_name("offline_export.py")


def make_draft(target: Path, folder: Path) -> Eagle3Draft:
    """Return a pruned draft with scaled rotation: everything that a form could lose."""
    rows = TargetRows.load(target)
    shape = Eagle3Config(
        hidden_size=toys.HIDDEN,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=toys.VOCAB,
        draft_vocab_size=200,
        aux_layer_ids=(1, 3),
        target_hidden_size=toys.HIDDEN,
        rope=Rope(5e4, "llama3", 8.0, 1.0, 4.0, 32),
        norm_output=True,
        max_position_embeddings=256,
    )
    vocab_map = VocabMap.from_target_ids(torch.arange(60, 260), toys.VOCAB)
    draft = Eagle3Draft.initialise(shape, rows.embed_tokens, rows.lm_head, vocab_map)
    save_draft(draft, folder, torch.float32)
    return draft


def run_export(*argv: object) -> int:
    import argparse

    parser = argparse.ArgumentParser()
    export.add_arguments(parser)
    return export.run(parser.parse_args(list(map(str, argv))))


def cached(target: Path, folder: Path) -> Path:
    """Place a model where the hub's cache would have it as `org/toy`."""
    model = folder / "hub" / "models--org--toy"
    (model / "snapshots").mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("0123")
    return shutil.copytree(target, model / "snapshots" / "0123")


def load(
    case: dict[str, Any], pythonpath: Path | None, hub: Path | None = None
) -> dict[str, Any]:
    if pythonpath is None:  # patched, as this process is
        done = run_forked([str(SCRIPT), json.dumps(case)])
    else:
        hubs = {} if hub is None else {"HF_HUB_CACHE": str(hub)}
        done = subprocess.run(
            [sys.executable, str(SCRIPT), json.dumps(case)],
            env={**os.environ, **hubs, "PYTHONPATH": str(pythonpath)},
            capture_output=True,
            text=True,
            timeout=280,
        )
    lines = [x for x in done.stdout.splitlines() if x.startswith("REPORT ")]
    assert lines, done.stderr[-3000:]
    return json.loads(lines[-1].removeprefix("REPORT "))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_unpatched_vllm_serves_an_exported_draft_as_the_original(tmp_path):
    target = toys.make_target(tmp_path / "target")
    draft = make_draft(target, tmp_path / "draft")
    spec, flat = tmp_path / "spec", tmp_path / "flat"
    # Named as on the hub; no request is made, since it is in the cache.
    argv = ("--from", tmp_path / "draft", "--target", cached(target, tmp_path))
    argv += ("--num-speculative-tokens", 4)
    assert run_export(spec, *argv) == 0
    assert run_export(flat, "--from", spec, "--format", "hf") == 0
    again = load_draft(flat, TargetRows.load(target))
    assert again.config == draft.config
    stored = export_tensors(again, torch.bfloat16)
    for name, tensor in export_tensors(draft, torch.bfloat16).items():
        assert torch.equal(stored[name], tensor), name
    pristine = make_pristine(tmp_path / "pristine")
    alone = load({"model": str(spec)}, pristine, tmp_path / "hub")
    assert alone["file"].startswith(str(pristine))
    assert alone["num_speculative_tokens"] == 4
    assert alone["draft"] == "Eagle3LlamaForCausalLM"
    speculative = {"method": "eagle3", "num_speculative_tokens": 4}
    speculative["model"] = str(tmp_path / "draft")
    first = load({"model": str(target), "speculative_config": speculative}, None)
    assert first["tokens"] == alone["tokens"]
    assert first["drafted"] == alone["drafted"]
    tokens = {token for step in alone["drafted"] for row in step for token in row}
    assert len(tokens) > 3 and min(tokens) >= 60 and max(tokens) < 260


class Engine:
    """Files of a running engine that others read."""

    def __init__(self, folder: Path) -> None:
        self.target = toys.make_target(folder / "target")
        self.draft = make_draft(self.target, folder / "draft")
        self.segment = WeightsSegment.create(8 << 20)
        self.run_dir = folder / "run"
        self.manifest = EngineManifest(
            engine_id="one",
            pid=os.getpid(),
            ring="",
            weights=self.segment.name,
            target_path=str(self.target),
            draft_path=str(folder / "draft"),
            target_dtype="float32",
            hidden_size=toys.HIDDEN,
            vocab_size=toys.VOCAB,
            draft_vocab_size=200,
            aux_layer_ids=(1, 3),
            teacher="hidden",
            teacher_topk=1,
            feature_dtype="float32",
            num_speculative_tokens=4,
            tide={},
            created_unix=0.0,
            shared=["embed_tokens.weight"],
        )
        write_manifest(self.run_dir, self.manifest)

    def say_installed(self, version: int) -> None:
        status = {"installed_version": version}
        (self.run_dir / "trainer-one.json").write_text(json.dumps(status))


@pytest.fixture
def engine(tmp_path):
    made = Engine(tmp_path)
    yield made
    made.segment.close()


def test_a_running_engines_draft_is_exported_with_its_measurements(
    engine, tmp_path, capsys
):
    from safetensors.torch import load_file

    from vllm_tide.deploy.deployment import INITIAL
    from vllm_tide.draft.tensor_bytes import to_bytes

    run: tuple[object, ...] = ("--run-dir", engine.run_dir)
    assert run_export(tmp_path / "plain", *run) == 0
    assert "(hf, from" in capsys.readouterr().out  # as the target has no hub name
    run += ("--format", "speculators")
    assert run_export(tmp_path / "start", *run) == 0
    assert "its initial draft" in capsys.readouterr().out
    assert run_export(tmp_path / "json", *run, "--json") == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["directory"], summary["version"]) == (str(tmp_path / "json"), 0)
    with torch.no_grad():
        engine.draft.tensor("fc.weight").mul_(2)
    tensors = export_tensors(engine.draft, torch.float32)
    t2d = tensors.pop("t2d")
    writer = WeightsWriter.attach(engine.manifest.weights)
    meta = {"holdout_acceptance_new": 1.5, "holdout_requests": 9, "other": 1}
    sent, base = to_bytes(tensors), first_version(3)
    writer.publish(DraftWeights.encode(sent, base, meta))
    engine.say_installed(2)
    assert run_export(tmp_path / "early", *run) == 1
    assert "version 2 is served" in capsys.readouterr().err
    engine.say_installed(3)
    assert run_export(tmp_path / "live", *run, "--engine", "one") == 0
    exported = load_file(tmp_path / "live" / "model.safetensors")
    assert torch.equal(exported["fc.weight"], tensors["fc.weight"])
    assert torch.equal(exported["t2d"], t2d)
    raw = read_config(tmp_path / "live")
    verifier = raw["speculators_config"]["verifier"]
    assert verifier == {"architectures": ["LlamaForCausalLM"]}
    card = (tmp_path / "live" / "README.md").read_text()
    assert "| 1.500 |" in card and "version 3" in card and "trained by" in card
    assert "trained by" not in (tmp_path / "start" / "README.md").read_text()
    named = (tmp_path / "named", *run, "--target", "org/name")
    assert run_export(*named) == 0
    verifier = read_config(tmp_path / "named")["speculators_config"]["verifier"]
    assert verifier == {
        "architectures": ["LlamaForCausalLM"],
        "name_or_path": "org/name",
    }
    # While a fast draft is served, no export; then its base, by the base's number.
    writer.publish(DraftWeights.encode(sent, base + 1))
    assert run_export(tmp_path / "fast", *run) == 2
    assert "over version 3 a fast draft is served" in capsys.readouterr().err
    writer.publish(DraftWeights.encode(sent, base + 2))
    assert run_export(tmp_path / "base", *run) == 0
    assert "version 3" in (tmp_path / "base" / "README.md").read_text()
    # A return to the checkpoint publishes it; it was not trained.
    back = {**INITIAL, "rollback_of": 3, "to": 0}
    writer.publish(DraftWeights.encode(sent, first_version(7), back))
    engine.say_installed(7)
    assert run_export(tmp_path / "back", *run) == 0
    assert "trained by" not in (tmp_path / "back" / "README.md").read_text()
    writer.close()


def test_a_failed_export_gives_one_line(engine, tmp_path, capsys):
    run = ("--run-dir", engine.run_dir)
    cases = [
        ((*run, "--engine", "two"), "no live engine 'two'"),
        (("--run-dir", tmp_path / "none"), "no live engine"),
        (("--from", tmp_path / "none"), "config.json"),
        (
            ("--from", engine.manifest.draft_path, "--format", "speculators"),
            "give --target",
        ),
        ((*run, "--num-speculative-tokens", 0), "at least 1"),
        ((*run, "--state-dir", tmp_path / "none"), "no directory"),
        ((*run, "--state-dir", tmp_path), "has no usable draft"),
        (("--state-dir", tmp_path, "--from", tmp_path), "--target: give the"),
    ]
    for argv, sentence in cases:
        status = 1 if "no live engine" in sentence else 2
        assert run_export(tmp_path / "out", *argv) == status
        stderr = capsys.readouterr().err
        assert stderr.startswith("error: ") and sentence in stderr
        assert not (tmp_path / "out").exists()


def test_a_stored_draft_is_exported_without_an_engine(engine, tmp_path, capsys):
    from safetensors.torch import load_file

    from vllm_tide.deploy.store import DraftStore, fingerprint_of

    draft_dir = engine.manifest.draft_path
    fingerprint = fingerprint_of(engine.target, draft_dir)
    store = DraftStore(tmp_path / "heads", fingerprint)
    with torch.no_grad():
        engine.draft.tensor("fc.weight").add_(1)
    tensors = export_tensors(engine.draft, torch.float32)
    del tensors["t2d"]
    figures = {"gain": 0.25, "holdout_acceptance_new": 1.75}
    store.put(tensors, 9, holdout=figures, served={"reason": "kept"})
    argv = ("--state-dir", tmp_path / "heads", "--from", draft_dir)
    argv += ("--target", engine.target)
    assert run_export(tmp_path / "out", *argv) == 0, capsys.readouterr().err
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(exported["fc.weight"], tensors["fc.weight"])
    assert "t2d" in exported
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| 1.750 |" in card and "| +0.2500 |" in card and "version 9" in card


def test_a_target_in_the_hubs_cache_is_named_as_on_the_hub(tmp_path):
    snapshot = tmp_path / "models--org--a-b" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text('{"architectures": ["X"]}')
    facts = export.target_facts(str(snapshot), 3)
    assert (facts.name_or_path, facts.architectures) == ("org/a-b", ("X",))
    assert export.target_facts("org/name", 3).name_or_path == "org/name"
    assert export.target_facts(str(tmp_path), 3).hub_name == ""
