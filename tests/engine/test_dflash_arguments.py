"""What `--speculative-config` accepts of a DFlash draft, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.test_arguments import refusal
from tests.toys import make_draft, make_target
from vllm_tide.config import FreshConfig
from vllm_tide.draft.fresh import fresh_directory

pytestmark = pytest.mark.vllm
DEPTH = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def target(folder: Path) -> Any:
    pytest.importorskip("vllm")
    from vllm.config import ModelConfig

    return ModelConfig(str(folder), dtype="float32", max_model_len=256)


@pytest.fixture
def given(folder: Path, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Return a configuration, after changes of the draft's own `config.json`."""

    def make(**changes: Any) -> dict[str, Any]:
        draft = fresh_directory(
            folder, FreshConfig(), torch.float32, tmp_path, "dflash", DEPTH
        )
        path = draft / "config.json"
        raw = json.loads(path.read_text())
        nested = {**raw["dflash_config"], **changes.pop("dflash_config", {})}
        path.write_text(json.dumps({**raw, **changes, "dflash_config": nested}))
        tide = {"run_dir": str(tmp_path / "run")}
        return {"model": str(draft), "num_speculative_tokens": DEPTH, "tide": tide}

    return make


def test_the_method_is_the_drafts(given, target) -> None:
    from vllm_tide.engine.arguments import check_speculative_config

    config = given()
    check_speculative_config(config, target)
    assert config["method"] == "dflash"


def test_a_fresh_draft_is_of_the_given_method(target, tmp_path, monkeypatch) -> None:
    from vllm_tide.engine.arguments import check_speculative_config

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tide = {"run_dir": str(tmp_path / "run")}
    config = {"model": "fresh", "method": "dflash", "num_speculative_tokens": 7}
    config["tide"] = tide
    check_speculative_config(config, target)
    raw = json.loads((Path(config["model"]) / "config.json").read_text())
    assert config["method"] == "dflash" and raw["block_size"] == 8


@pytest.mark.parametrize(
    ("changes", "more", "message"),
    [
        ({}, {"method": "eagle3"}, "method: 'eagle3', but the draft '"),
        ({}, {"num_speculative_tokens": 5}, "num_speculative_tokens: 5, but the draft"),
        ({"dflash_config": {"causal": True}}, {}, "causal=True is not supported"),
        ({"quantization_config": {}}, {}, "quantization_config={} is not supported"),
        ({"architectures": ["DFlash2DraftModel"]}, {}, "'DFlash2DraftModel' is not"),
        (
            {"max_position_embeddings": 128},
            {},
            "has 128 positions, and",
        ),
        ({"dflash_config": {"target_layer_ids": [0, 1, 9]}}, {}, "reads layer 10, but"),
        ({"block_size": 0}, {}, "block_size is 0"),
        ({"num_hidden_layers": 2}, {}, "missing layers.1."),
        ({"dflash_config": {"target_layer_ids": [-3, 1, 2]}}, {}, "must be a list of"),
    ],
)
def test_what_is_not_supported_is_refused(
    changes: dict[str, Any],
    more: dict[str, Any],
    message: str,
    given: Any,
    target: Any,
) -> None:
    assert message in refusal({**given(**changes), **more}, target)


def test_a_mask_embedding_and_another_kind_are_refused(
    given, target, folder, tmp_path
) -> None:
    config = given()
    (Path(config["model"]) / "mask_embedding.pt").touch()
    assert "has a mask_embedding.pt" in refusal(config, target)
    eagle = make_draft(tmp_path / "eagle", folder)
    other = {**config, "model": str(eagle), "method": "dflash"}
    assert "is of the kind 'eagle3'" in refusal(other, target)
