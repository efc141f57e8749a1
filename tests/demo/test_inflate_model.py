"""An inflated model costs more and computes the same function."""

import importlib.util
import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SCRIPT = Path(__file__).parents[2] / "scripts" / "inflate_model.py"
spec = importlib.util.spec_from_file_location("inflate_model", SCRIPT)
assert spec is not None and spec.loader is not None
inflate_model = importlib.util.module_from_spec(spec)
spec.loader.exec_module(inflate_model)

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


@pytest.mark.parametrize("kind", ["Llama", "Qwen3"])
@pytest.mark.parametrize(("width", "extra"), [(100, 0), (None, 2), (61, 3)])
def test_logits_are_equal(tmp_path, kind, width, extra):
    source = save_tiny(tmp_path / "source", kind)
    inflate_model.inflate(source, tmp_path / "out", width, extra)
    assert inflate_model.max_logit_difference(source, tmp_path / "out", 16) <= 1e-5


def test_aux_layer_ids_keep_their_meaning(tmp_path):
    source = save_tiny(tmp_path / "source")
    inflate_model.inflate(source, tmp_path / "out", 64, 2)
    ids = torch.arange(12)[None]
    before, after = (
        model(ids, output_hidden_states=True).hidden_states
        for model in inflate_model._models(source, tmp_path / "out")
    )
    # hidden_states[i] is the stream entering layer i; the last one is normed.
    for layer in range(TINY["num_hidden_layers"]):
        torch.testing.assert_close(before[layer], after[layer], atol=1e-6, rtol=0)


def test_padded_width_multiplies_ordinary_numbers_and_zero_columns(tmp_path):
    source = save_tiny(tmp_path / "source")
    inflate_model.inflate(source, tmp_path / "out", 64, 0)
    mlp = "model.layers.1.mlp"
    tensors = inflate_model.read_tensors(tmp_path / "out")
    assert tensors[f"{mlp}.gate_proj.weight"].shape == (64, 32)
    assert tensors[f"{mlp}.gate_proj.weight"][24:].abs().min() > 0
    assert not tensors[f"{mlp}.down_proj.weight"][:, 24:].any()


def test_report_counts_what_was_written(tmp_path):
    source = save_tiny(tmp_path / "source")
    report = inflate_model.inflate(source, tmp_path / "out", 64, 2)
    tensors = inflate_model.read_tensors(tmp_path / "out")
    assert report["parameters"][1] == sum(t.numel() for t in tensors.values())
    # Extra layers cost KV cache, wider MLPs do not.
    assert report["kv_bytes_per_token_16bit"] == [2 * 3 * 16 * 2, 2 * 5 * 16 * 2]
    assert json.loads((tmp_path / "out" / "inflated.json").read_text()) == report
    assert (tmp_path / "out" / "tokenizer.json").exists()


@pytest.mark.parametrize(("width", "extra"), [(8, 0), (None, -1)])
def test_smaller_model_is_refused(tmp_path, width, extra):
    source = save_tiny(tmp_path / "source")
    with pytest.raises(ValueError, match="--"):
        inflate_model.inflate(source, tmp_path / "out", width, extra)


def test_source_is_never_overwritten(tmp_path):
    source = save_tiny(tmp_path / "source")
    with pytest.raises(ValueError, match="overwritten"):
        inflate_model.inflate(source, source, 64, 0)
