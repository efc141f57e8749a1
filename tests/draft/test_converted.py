"""A draft stored as `pytorch_model.bin` is converted to equal safetensors, once."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests import toys
from vllm_tide.draft import DraftError
from vllm_tide.draft.config import bin_files
from vllm_tide.draft.converted import converted_directory


def as_bin(folder, files=1, **overrides):
    """Store a draft as the EAGLE authors do; return its tensors."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    tensors["t2d"] = torch.ones(toys.VOCAB, dtype=torch.bool)
    tensors["d2t"] = torch.zeros(toys.VOCAB, dtype=torch.int64)
    names = sorted(tensors)
    for i in range(files):
        part = {name: tensors[name] for name in names[i::files]}
        torch.save(part, folder / f"pytorch_model-{i}.bin")
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["LlamaForCausalLM"]} | overrides
    (folder / "config.json").write_text(json.dumps(config))
    return tensors


@pytest.fixture
def target(tmp_path):
    return toys.make_target(tmp_path / "target")


@pytest.fixture
def draft(tmp_path, target):
    return toys.make_draft(tmp_path / "drafts" / "mine", target)


@pytest.mark.parametrize("files", [1, 3])
def test_a_conversion_is_equal_and_cached(files, draft, tmp_path):
    assert bin_files(draft) == []
    tensors = as_bin(draft, files)
    assert len(bin_files(draft)) == files
    out = converted_directory(draft, tmp_path / "cache")
    assert out.name == "mine"
    converted = load_file(out / "model.safetensors")
    assert converted.keys() == tensors.keys()
    assert all(torch.equal(converted[name], tensors[name]) for name in tensors)
    assert (out / "config.json").stat().st_mode & 0o077 == 0
    before = (out / "model.safetensors").stat().st_mtime_ns
    assert converted_directory(draft, tmp_path / "cache") == out
    assert (out / "model.safetensors").stat().st_mtime_ns == before
    os.utime(bin_files(draft)[0], ns=(1, 1))  # another file of the same name
    assert converted_directory(draft, tmp_path / "cache") != out


def test_shared_memory_of_tensors_is_no_obstacle(draft, tmp_path):
    tensors = as_bin(draft)
    tensors["t2d"] = tensors["lm_head.weight"][0]
    torch.save(tensors, draft / "pytorch_model-0.bin")
    out = converted_directory(draft, tmp_path / "cache")
    stored = load_file(out / "model.safetensors")
    assert torch.equal(stored["t2d"], tensors["t2d"])


class Attack:
    def __reduce__(self):
        return os.system, ("touch attacked",)


NO_TENSORS = "is missing, damaged, or no file of tensors"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", NO_TENSORS),
        (b"PK\3\4 cut", NO_TENSORS),
        ({"a": Attack()}, NO_TENSORS),
        ([1], "its content is no dense tensor"),
        ({"state_dict": {}}, "state_dict is no dense tensor"),
        ({"a": torch.eye(2).to_sparse()}, "a is no dense tensor"),
        (None, NO_TENSORS),
    ],
)
def test_a_damaged_or_hostile_file_is_refused(
    content, message, draft, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    as_bin(draft)
    path = draft / "pytorch_model-0.bin"
    if content is None:
        path.unlink()
        path.symlink_to("nowhere")
    elif isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    with pytest.raises(DraftError, match=f"pytorch_model-0.bin:? {message}"):
        converted_directory(draft, tmp_path / "cache")
    assert not (tmp_path / "attacked").exists()
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("damage", ["cut", "removed", "no configuration"])
def test_a_damaged_copy_is_written_again(damage, draft, tmp_path):
    tensors = as_bin(draft)
    out = converted_directory(draft, tmp_path / "cache")
    path = out / "model.safetensors"
    if damage == "cut":
        os.truncate(path, 5000)
    elif damage == "removed":
        path.unlink()
    else:
        (out / "config.json").unlink()
    assert converted_directory(draft, tmp_path / "cache") == out
    assert load_file(path).keys() == tensors.keys()
    assert (out / "config.json").exists()


def test_an_unwritable_cache_is_named(draft, tmp_path):
    as_bin(draft)
    (tmp_path / "file").write_text("")
    with pytest.raises(DraftError, match="set XDG_CACHE_HOME to a writable directory"):
        converted_directory(draft, tmp_path / "file")


@pytest.fixture
def model_config(target):
    from vllm.config import ModelConfig

    return ModelConfig(model=str(target), dtype="float32", max_model_len=256)


def checked(draft, model_config, monkeypatch, tmp_path):
    from vllm_tide.engine.arguments import check_speculative_config

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = {"model": str(draft), "num_speculative_tokens": 3, "tide": {}}
    check_speculative_config(config, model_config)
    return config


@pytest.mark.vllm
def test_a_server_uses_the_conversion(draft, model_config, monkeypatch, tmp_path):
    tensors = as_bin(draft)
    config = checked(draft, model_config, monkeypatch, tmp_path)
    assert config["method"] == "eagle3"
    assert config["model"].startswith(str(tmp_path / "cache"))
    shutil.rmtree(draft)  # is not needed any more
    from vllm_tide.draft import TargetRows, load_draft

    rows = TargetRows.load(model_config.model)
    trained = load_draft(config["model"], rows, frozenset())
    assert torch.equal(
        trained.named_tensors()["fc.weight"].bfloat16(), tensors["fc.weight"]
    )


@pytest.mark.vllm
def test_an_error_names_the_operators_draft(draft, model_config, monkeypatch, tmp_path):
    from vllm_tide.config import ConfigError

    as_bin(draft, intermediate_size=129)
    with pytest.raises(ConfigError, match=f"{draft}' cannot.*the config requires"):
        checked(draft, model_config, monkeypatch, tmp_path)
    as_bin(toys.make_draft(draft, Path(model_config.model)), files=3)
    (draft / "pytorch_model-1.bin").unlink()
    with pytest.raises(ConfigError, match=f"{draft}' cannot be used: missing"):
        checked(draft, model_config, monkeypatch, tmp_path)
    assert not (tmp_path / "cache").exists()


@pytest.mark.vllm
def test_a_directory_without_configuration_is_no_draft(
    model_config, monkeypatch, tmp_path
):
    from vllm_tide.config import ConfigError

    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="neither a directory with config.json nor"):
        checked(tmp_path / "empty", model_config, monkeypatch, tmp_path)


@pytest.mark.vllm
def test_the_target_is_no_draft(target, model_config, monkeypatch, tmp_path):
    from vllm_tide.config import ConfigError

    with pytest.raises(ConfigError, match="is no EAGLE-3 draft: it has no fc.weight"):
        checked(target, model_config, monkeypatch, tmp_path)


@pytest.mark.vllm
def test_a_quantised_draft_is_left_to_vllm(draft, model_config, monkeypatch, tmp_path):
    from safetensors.torch import save_file

    tensors = load_file(draft / "model.safetensors")
    tensors["fc.weight_packed"] = tensors.pop("fc.weight")
    save_file(tensors, draft / "model.safetensors")
    config = json.loads((draft / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "compressed-tensors"}
    (draft / "config.json").write_text(json.dumps(config))
    assert checked(draft, model_config, monkeypatch, tmp_path)["model"] == str(draft)
