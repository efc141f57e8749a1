"""An inflated model costs more and computes the same function."""

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import inflate_model  # noqa: E402

TINY = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
}


def save_tiny(folder: Path, kind: str = "Llama") -> Path:
    torch.manual_seed(3)
    config = getattr(transformers, f"{kind}Config")(**TINY, tie_word_embeddings=True)
    getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "width", "extra"),
    [("Llama", 61, 3), ("Qwen3", 100, 0), ("Qwen3", None, 2)],
)
def test_logits_are_equal(tmp_path, kind, width, extra):
    source = save_tiny(tmp_path / "source", kind)
    inflate_model.inflate(source, tmp_path / "out", width, extra)
    logits = inflate_model.logits_of_both(source, tmp_path / "out", 16)
    relative, flips = inflate_model.compare(*logits)
    assert relative <= 1e-4 and flips == 0


def run_script(monkeypatch, source, destination):
    arguments = ["inflate_model.py", str(source), str(destination)]
    monkeypatch.setattr("sys.argv", [*arguments, "--intermediate-size", "64"])
    return inflate_model.main()


def test_another_function_is_refused_with_advice(tmp_path, monkeypatch, capsys):
    source = save_tiny(tmp_path / "source")
    assert run_script(monkeypatch, source, tmp_path / "out") == 0
    other = inflate_model.pad_mlp

    def wrong(tensors, size):
        padded = other(tensors, size)
        name = "model.layers.1.mlp.down_proj.weight"
        padded[name][:, -1] += 0.05
        return padded

    monkeypatch.setattr(inflate_model, "pad_mlp", wrong)
    assert run_script(monkeypatch, source, tmp_path / "out") == 1
    captured = capsys.readouterr()
    assert "NOT EQUAL" in captured.out
    assert "run again with ATEN_CPU_CAPABILITY=avx2" in captured.err.splitlines()[-1]


def test_another_most_likely_token_is_rounding_only_where_two_are_close():
    before = torch.tensor([[1.0, 1.0 - 1e-6, 0.0], [1.0, 0.9, 0.0]])
    after = torch.tensor([[1.0 - 1e-6, 1.0, 0.0], [1.0, 0.9, 0.0]])
    assert inflate_model.compare(before, after)[1] == 0
    after = torch.tensor([[1.0, 1.0 - 1e-6, 0.0], [0.94, 0.96, 0.0]])
    relative, flips = inflate_model.compare(before, after)
    assert relative == pytest.approx(0.06, rel=1e-4) and flips == 1
    # In proportion to the logits: an Intel CPU is 8e-5 apart at logits of 10.
    for size in 1.0, 1e3:
        before = size * torch.tensor([[10.0, -3.0, 0.0]])
        assert inflate_model.compare(before, before * (1 + 1e-5))[0] < 1e-4


def test_the_report_counts_the_written_sizes(tmp_path):
    source = save_tiny(tmp_path / "source")
    report = inflate_model.inflate(source, tmp_path / "out", 64, 2)
    tensors = inflate_model.read_tensors(tmp_path / "out")
    assert report["parameters"][1] == sum(t.numel() for t in tensors.values())
    # Extra layers cost KV cache, wider MLPs do not.
    assert report["kv_bytes_per_token_16bit"] == [2 * 3 * 16 * 2, 2 * 5 * 16 * 2]
    assert json.loads((tmp_path / "out" / "inflated.json").read_text()) == report
    assert (tmp_path / "out" / "tokenizer.json").exists()
    mlp = "model.layers.1.mlp"
    assert tensors[f"{mlp}.gate_proj.weight"].shape == (64, 32)
    assert tensors[f"{mlp}.gate_proj.weight"][24:].abs().min() > 0
    assert not tensors[f"{mlp}.down_proj.weight"][:, 24:].any()
    for width, extra in (8, 0), (None, -1):  # no larger model
        with pytest.raises(ValueError, match="--"):
            inflate_model.inflate(source, tmp_path / "out", width, extra)
    with pytest.raises(ValueError, match="overwritten"):
        inflate_model.inflate(source, source, 64, 0)
