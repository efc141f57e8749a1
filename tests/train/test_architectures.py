"""Tiny targets of families other than Llama: load, capture, train from day 0."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import toys
from tests.engine.offline_engine import OfflineEngine, only_manifest

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

SHAPE: dict[str, Any] = {
    "hidden_size": toys.HIDDEN,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": toys.VOCAB,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": toys.VOCAB - 1,
    "tie_word_embeddings": False,
}
FAMILIES = {
    "qwen3": ("Qwen3Config", {"tie_word_embeddings": True}),
    "gpt_oss": (
        "GptOssConfig",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 32},
    ),
}
PROMPTS = [list(b"hello world"), list(b"def main(argv):"), list(b"abc abc abc")]


def make_target(folder: Path, family: str) -> Path:
    """Return random weights, larger than usual so that the text varies."""
    import transformers

    name, extra = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, name)(**{**SHAPE, **extra})
    model = transformers.AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(parameter, std=0.12)
    model.to(torch.bfloat16).save_pretrained(folder)
    toys.make_tokenizer(folder)
    return folder


@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_fresh_draft_is_served_captured_and_trained(family, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    target = make_target(tmp_path / "target", family)
    run_dir = tmp_path / "run"
    train = {
        "autostart": False,  # the test runs it
        "nice": 0,
        # The held-out requests of the 12 are random: two are enough to begin.
        "min_new_tokens": 100,
        "steps_per_cycle": 4,
        "batch_tokens": 256,
        "holdout_share": 0.3,
    }
    case = {
        "target": str(target),
        "dtype": "bfloat16",
        "speculative_config": {
            "model": "fresh",
            "num_speculative_tokens": 2,
            "tide": {
                "run_dir": str(run_dir),
                "capture": {"ring_mib": 16},
                "control": {"policy": "static"},
                "train": train,
            },
        },
    }
    with OfflineEngine(case) as engine:
        manifest = only_manifest(run_dir)
        assert Path(manifest.draft_path).parent.parent.name == "vllm_tide"
        assert tuple(manifest.aux_layer_ids) == (1, 2, 3)
        assert "lm_head.weight" not in manifest.shared
        prompts = [
            [token + shift for token in p] for p in PROMPTS for shift in (0, 1, 2, 3)
        ]
        report = engine.work(prompts, params={"max_tokens": 40})
        assert report["faults"] == {}
        assert report["rows"] >= 300
        trainer = [sys.executable, "-m", "vllm_tide", "train", "--once"]
        done = subprocess.run(
            [*trainer, "--run-dir", str(run_dir)],
            capture_output=True,
            text=True,
            timeout=400,
        )
        assert done.returncode == 0, done.stderr[-3000:]
    (path,) = run_dir.glob("trainer-*.json")
    status = json.loads(path.read_text())
    assert status["cycles"] >= 1
    assert status["steps"] >= 1
    assert math.isfinite(status["loss"])
