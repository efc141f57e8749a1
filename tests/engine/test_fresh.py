"""`"model": "fresh"`: a draft is built, served, and may change its vocabulary."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import toys
from tests.engine.offline_engine import OfflineEngine
from tests.engine.records import drafted
from tests.engine.shared_engine import Served
from vllm_tide.config import parse_tide
from vllm_tide.draft import VocabMap, load_draft
from vllm_tide.draft.checkpoint import export_tensors
from vllm_tide.draft.fresh import is_fresh
from vllm_tide.draft.prune import choose_vocab, reprune
from vllm_tide.draft.target import TargetRows

pytestmark = pytest.mark.vllm
SIZE = 128
PROMPTS = [list(b"hello world"), list(b"def main(argv):"), list(b"abc abc abc")]


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toys.make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def target(target_dir):
    from vllm.config import ModelConfig

    return ModelConfig(model=str(target_dir), dtype="float32", max_model_len=256)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "vllm_tide" / "fresh"


def checked(config: dict[str, Any], target: Any) -> dict[str, Any]:
    from vllm_tide.engine.arguments import check_speculative_config

    check_speculative_config(config, target)
    return config


def test_fresh_becomes_a_directory_and_a_policy(target, cache):
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("vllm.tide")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    mine = {"model": "fresh", "num_speculative_tokens": 3, "tide": {}}
    try:
        config = checked(dict(mine), target)
    finally:
        logger.removeHandler(handler)
    folder = Path(config["model"])
    assert folder.parent == cache and is_fresh(folder)
    assert config["method"] == "eagle3"
    assert parse_tide(config["tide"]).control.policy == "adaspec"
    assert mine["tide"] == {}  # what the operator wrote is not touched
    assert any("adaspec" in line and str(folder) in line for line in heard)
    # Called again, as vLLM does: nothing changes.
    assert checked(dict(config), target) == config


def test_the_operators_policy_is_unchanged(target):
    tide = {
        "control": {"policy": "static", "min_gain": 0.1},
        "fresh": {"draft_vocab_size": 80},
    }
    config = checked({"model": "fresh", "tide": tide}, target)
    assert config["tide"] == tide
    tide = {"control": {"min_gain": 0.1}}
    config = checked({"model": "fresh", "tide": tide}, target)
    assert parse_tide(config["tide"]).control.policy == "adaspec"


def test_a_draft_that_cannot_be_built_gives_one_line(target, cache):
    from vllm_tide.config import ConfigError

    tide = {"fresh": {"draft_vocab_size": 100000}}
    with pytest.raises(ConfigError, match=r"model: no fresh draft .*draft_vocab_size"):
        checked({"model": "fresh", "tide": tide}, target)
    with pytest.raises(ConfigError, match="set it to 'eagle3'"):
        checked({"model": "fresh", "method": "ngram", "tide": {}}, target)
    # A policy that was asked for is refused where control cannot be.
    tide = {"control": {"policy": "adaspec"}}
    with pytest.raises(ConfigError, match="parallel_drafting"):
        checked({"model": "fresh", "parallel_drafting": True, "tide": tide}, target)


def case(target_dir: Path, model: str, run_dir: Path) -> dict[str, Any]:
    return {
        "target": str(target_dir),
        "speculative_config": {
            "method": "eagle3",
            "model": model,
            "num_speculative_tokens": 3,
            "tide": {
                "run_dir": str(run_dir),
                "train": {"autostart": False},  # the test publishes
                "capture": {"ring_mib": 16},
                "control": {"policy": "static"},
                "fresh": {"draft_vocab_size": SIZE},
            },
        },
    }


def token_ids(steps: list[list[int]]) -> set[int]:
    return {token for tokens in steps for token in tokens}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_swap_may_change_the_draft_vocabulary(target_dir, tmp_path):
    rows = TargetRows.load(target_dir)
    with OfflineEngine(case(target_dir, "fresh", tmp_path)) as engine:
        served = Served(engine, tmp_path)
        manifest = served.manifest
        draft = load_draft(manifest.draft_path, rows, manifest.shared)
        old = draft.vocab
        assert old.target_ids.numel() == SIZE == manifest.draft_vocab_size
        assert "lm_head.weight" not in manifest.shared
        before = served(PROMPTS, max_tokens=16)
        assert token_ids(drafted(before["records"])) <= set(old.target_ids.tolist())
        counts = torch.zeros(toys.VOCAB)
        counts[100:300] = torch.arange(200)
        new = VocabMap.from_target_ids(choose_vocab(counts, SIZE), toys.VOCAB)
        tensors = export_tensors(reprune(draft, new, rows), stored_names=True)
        del tensors["t2d"]
        # Ids outside the target's vocabulary would break a step: refused.
        broken = {**tensors, "d2t": torch.full_like(tensors["d2t"], toys.VOCAB)}
        assert served.publish(broken) != ""
        assert served.publish(tensors) == ""
        after = served(PROMPTS, max_tokens=16)
        assert after["faults"] == {} and after["tokens"] == before["tokens"]
        swapped = token_ids(drafted(after["records"]))
        assert swapped <= set(new.target_ids.tolist())
        assert not swapped <= set(old.target_ids.tolist())
        served.close()
