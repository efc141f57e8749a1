"""A multimodal target: text is captured and learnt, pictures are not; equal outputs.

Needs torchvision, as vLLM's multimodal models do; vLLM's build for CPUs lacks it.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import toys
from tests.engine.offline_engine import OfflineEngine

pytest.importorskip("torchvision")
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

PICTURE = toys.VOCAB - 2  # token of a picture
SIZE = 56
# Names in published checkpoints, which differ from those of transformers 5.
RENAMED = (
    ("model.language_model.", "language_model.model."),
    ("model.multi_modal_projector.", "multi_modal_projector."),
    ("model.vision_tower.", "vision_tower."),
    ("vision_tower.", "vision_tower.vision_model."),
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llava."""
    import transformers as hf

    folder = tmp_path_factory.mktemp("llava")
    toys.make_target(folder)  # its tokenizer and the configuration of its text
    text = hf.LlamaConfig.from_pretrained(folder)
    vision = hf.CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=SIZE,
        patch_size=14,
    )
    config = hf.LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=PICTURE
    )
    torch.manual_seed(0)
    model = hf.LlavaForConditionalGeneration(config)
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(parameter, std=0.12)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer = hf.AutoTokenizer.from_pretrained(folder)
    picture = f"<unused{PICTURE}>"
    tokenizer.add_special_tokens({"additional_special_tokens": [picture]})
    square = {"height": SIZE, "width": SIZE}
    hf.LlavaProcessor(
        image_processor=hf.CLIPImageProcessor(size=square, crop_size=square),
        tokenizer=tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token=picture,
    ).save_pretrained(folder)
    path, named = folder / "model.safetensors", {}
    for stored, tensor in load_file(path).items():
        name = stored
        for old, new in RENAMED:
            if name.startswith(old) and not name.startswith(new):
                name = new + name.removeprefix(old)
        named[name] = tensor
    save_file(named, path, {"format": "pt"})
    return folder


def test_text_is_learnt_and_pictures_change_nothing(target, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    texts = [[*b"hello world ", 65 + i, *b" abc abc"] for i in range(16)]
    seen = [[*b"what is ", PICTURE, 65 + i] for i in range(16)]
    prompts = [prompt for pair in zip(texts, seen, strict=True) for prompt in pair]
    images = [None if i % 2 == 0 else i % 3 for i in range(len(prompts))]
    work = {"prompts": prompts, "images": images, "params": {"max_tokens": 40}}
    case = {"target": str(target), "dtype": "bfloat16", "speculative_config": None}
    with OfflineEngine(case) as engine:
        plain = engine.work(**work)["tokens"]
    assert len(set(map(tuple, plain))) > 16
    run_dir = tmp_path / "run"
    train = {"min_new_tokens": 100, "batch_tokens": 256, "holdout_share": 0.3}
    tide = {
        "run_dir": str(run_dir),
        "capture": {"ring_mib": 16},
        "train": {"autostart": False, "nice": 0, "steps_per_cycle": 4, **train},
    }
    speculative = {"model": "fresh", "num_speculative_tokens": 3, "tide": tide}
    with OfflineEngine(case | {"speculative_config": speculative}) as engine:
        report = engine.work(**work)
        assert report["tokens"] == plain
        assert report["faults"] == {}
        metrics = report["metrics"].items()
        assert sum(n for name, n in metrics if "accepted_tokens" in name) > 0
        assert report["dropped"] == {"unsupported_input": 16}
        # All but the last token of a request, and rejected drafts.
        assert report["rows"] >= sum(len(text) + 39 for text in texts)
        command = [sys.executable, "-m", "vllm_tide", "train", "--once"]
        command += ["--run-dir", str(run_dir)]
        subprocess.run(command, check=True, timeout=400, capture_output=True)
    (path,) = run_dir.glob("trainer-*.json")
    status = json.loads(path.read_text())
    assert status["steps"] >= 1
    assert math.isfinite(status["loss"])
