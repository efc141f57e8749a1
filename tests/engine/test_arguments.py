"""A draft that does not fit is refused before a model loads, in one line."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import toys

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toys.make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def target(target_dir):
    from vllm.config import ModelConfig

    return ModelConfig(model=str(target_dir), dtype="float32", max_model_len=256)


def refusal(config, target) -> str:
    from vllm_tide.config import ConfigError
    from vllm_tide.engine.arguments import check_speculative_config

    with pytest.raises(ConfigError) as refused:
        check_speculative_config(config, target)
    return str(refused.value)


@pytest.mark.parametrize(
    ("changes", "dropped"),
    [
        ({}, True),
        ({"disable_eagle_block_drop": False}, False),
        ({"tide": {"preset": "observe"}}, None),
    ],
)
def test_the_last_cached_block_is_used_unless_configured_otherwise(
    changes, dropped, target, target_dir, tmp_path
):
    from vllm_tide.engine.arguments import check_speculative_config

    draft = toys.make_draft(tmp_path / "draft", target_dir)
    config = {
        "method": "eagle3",
        "model": str(draft),
        "num_speculative_tokens": 3,
        "tide": {},
        **changes,
    }
    check_speculative_config(config, target)
    assert config.get("disable_eagle_block_drop") is dropped


def test_an_unwritable_run_directory_ends_the_start(target, tmp_path):
    (tmp_path / "file").write_text("")
    run_dir = str(tmp_path / "file" / "run")
    config = {"model": "x/y", "num_speculative_tokens": 3, "tide": {"run_dir": run_dir}}
    text = refusal(config, target)
    assert text.startswith(f"tide.run_dir: cannot use run directory {run_dir}: Not a d")


def test_a_refused_start_leaves_no_run_directory(target, target_dir, tmp_path):
    draft = toys.make_draft(tmp_path / "draft", target_dir, hidden_size=128)
    config = {"model": str(draft), "num_speculative_tokens": 3}
    refusal(config | {"tide": {"run_dir": str(tmp_path / "run")}}, target)
    assert not (tmp_path / "run").exists()


CASES = [
    (
        {"hidden_size": 128},
        "its hidden_size is 128, but the target's hidden size is 64",
    ),
    ({"vocab_size": 512}, "its vocab_size is 512, but the target's vocabulary has 320"),
    ({"draft_vocab_size": 999}, "its draft_vocab_size is 999, but the target's"),
    (
        {"eagle_aux_hidden_state_layer_ids": [1, 2, 9]},
        "is [1, 2, 9], but the target has 4 layers; the ids must be distinct",
    ),
    (
        {"eagle_aux_hidden_state_layer_ids": [1, 1, 2]},
        "is [1, 1, 2], but the target has 4 layers; the ids must be distinct",
    ),
    (
        {"eagle_aux_hidden_state_layer_ids": "2"},
        "is '2', but the target has 4 layers",
    ),
    # Sizes that vLLM's loader would accept.
    ({"intermediate_size": 10**12}, "intermediate_size is 1000000000000; it must be"),
    ({"head_dim": 10**11}, "head_dim is 100000000000; it must be"),
    ({"head_dim": "x"}, "head_dim is 'x'; it must be"),
    ({"num_key_value_heads": [2]}, "num_key_value_heads is [2]; it must be"),
    ({"rms_norm_eps": "x"}, "could not convert string to float"),
    ({"transformer_layer_config": [1]}, "a value has the wrong type"),
    (
        {"intermediate_size": 129},
        "mlp.down_proj.weight has shape (64, 128), the config requires (64, 129)",
    ),
    ({"draft_vocab_size": 300}, "lm_head.weight has shape (320, 64), the config re"),
    # Long ones are not printed whole.
    ({"eagle_aux_hidden_state_layer_ids": [0] * 10**6}, "but the target has 4 layers"),
    ({"hidden_size": "x" * 10**6}, "but the target's hidden size is 64"),
]


@pytest.mark.parametrize(("change", "sentence"), CASES)
def test_a_draft_that_does_not_fit_is_refused(
    change, sentence, target, target_dir, tmp_path
):
    draft = toys.make_draft(tmp_path / "draft", target_dir, **change)
    config = {"method": "eagle3", "model": str(draft), "tide": {}}
    message = refusal(config, target)
    assert message.startswith("model: ")
    assert sentence in message
    assert len(message) < 600 and "\n" not in message


def test_a_draft_of_another_method_is_left_to_vllm(target, target_dir, tmp_path):
    from vllm_tide.engine.arguments import check_speculative_config

    change = {"attention_bias": True, "intermediate_size": 129}
    draft = toys.make_draft(tmp_path / "draft", target_dir, **change)
    config = {"method": "eagle3", "model": str(draft), "tide": {}}
    check_speculative_config(config, target)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"draft_sample_method": "probabilistic"},
            "tide.test_time.memory: its tokens have no draft probability, ",
        ),
        ({"parallel_drafting": True}, "parallel_drafting: tide."),
        ({"disable_padded_drafter_batch": True}, "disable_padded_drafter_batch: tide."),
        ({"draft_sample_method": "greedy"}, None),
    ],
)
def test_drafts_that_exclude_a_memory_are_refused(
    change, message, target, target_dir, tmp_path
):
    from vllm_tide.engine.arguments import check_speculative_config

    draft = toys.make_draft(tmp_path / "draft", target_dir)
    section = {"test_time": {"memory": "ngram"}, "control": {"policy": "static"}}
    config = {"method": "eagle3", "model": str(draft), "tide": section, **change}
    if message is None:
        check_speculative_config(config, target)
    else:
        assert refusal(config, target).startswith(message)


def test_missing_and_unreadable_drafts(target, tmp_path):
    assert refusal({"tide": {}}, target).startswith("model: missing;")
    absent = str(tmp_path / "absent")
    assert "no draft at" in refusal({"model": absent, "tide": {}}, target)
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{")
    assert "cannot be read" in refusal({"model": str(broken), "tide": {}}, target)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"method": "ngram"},
            "method: tide trains EAGLE-3 and DFlash drafts; set it to 'eagle3' or "
            "'dflash', not 'ngram'.",
        ),
        (
            {"rejection_sample_method": "synthetic"},
            "rejection_sample_method: 'synthetic' does not compare drafts",
        ),
        ({"rejection_sample_method": "fly"}, "rejection_sample_method: "),
        ({"draft_lm_head_quantization": "fp8"}, "draft_lm_head_quantization: "),
    ],
)
def test_unsupported_options_are_refused(change, message, target):
    assert refusal({"model": "x", "tide": {}, **change}, target).startswith(message)


def serve(target_dir: Path, *options: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    vllm = Path(sys.executable).with_name("vllm")
    command = [str(vllm), "serve", str(target_dir), "--max-model-len", "256", *options]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=280)


def parsed(monkeypatch, *argv: str) -> Any:
    """Return what `vllm serve` makes of a command line."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    monkeypatch.setattr(sys, "argv", ["vllm", *argv])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    return parser.parse_args(list(argv)).speculative_config


@pytest.mark.parametrize("option", ["--speculative-config", "-sc"])
def test_dotted_keys_change_a_file_and_stand_alone(option, monkeypatch, tmp_path):
    file = tmp_path / "tide.json"
    section = {"control": {"policy": "adaspec", "min_gain": 0.1}}
    file.write_text(json.dumps({"num_speculative_tokens": 3, "tide": section}))
    assert parsed(
        monkeypatch,
        *(option, str(file)),
        *(f"{option}.num_speculative_tokens", "5"),
        *(f"{option}.tide.control.policy", "static"),
    ) == {
        "num_speculative_tokens": 5,
        "tide": {"control": {"policy": "static", "min_gain": 0.1}},
    }
    alone = parsed(monkeypatch, f"{option}.tide.control.policy", "static")
    assert alone == {"tide": {"control": {"policy": "static"}}}
    assert parsed(monkeypatch, option, '{"tide": {}}') == {"tide": {}}


def test_vllms_yaml_file_is_read_and_changed(monkeypatch, tmp_path):
    file = tmp_path / "serve.yaml"
    file.write_text("speculative-config:\n  model: fresh\n  tide: {preset: learn}\n")
    given = {"model": "fresh", "tide": {"preset": "learn"}}
    assert parsed(monkeypatch, "--config", str(file)) == given
    dotted = ("--speculative-config.num_speculative_tokens", "4")
    assert parsed(monkeypatch, "--config", str(file), *dotted) == {
        **given,
        "num_speculative_tokens": 4,
    }
    # The file itself, for both.
    assert parsed(monkeypatch, "--speculative-config", str(file)) == given


def test_all_mistakes_are_in_one_message(monkeypatch, tmp_path, capsys):
    file = tmp_path / "tide.json"
    file.write_text('{"method": "ngram", "tide": {"captur": {}}}')
    with pytest.raises(SystemExit) as ended:
        parsed(monkeypatch, "--speculative-config", str(file))
    stderr = capsys.readouterr().err
    assert ended.value.code == 2
    for key in ("method: tide trains", "tide.captur: unknown"):
        assert key in stderr
    with pytest.raises(SystemExit):
        parsed(monkeypatch, "--speculative-config", str(tmp_path / "nope.json"))
    assert "/nope.json' cannot be read (No such file" in capsys.readouterr().err


def test_vllms_own_validation_errors_are_one_line(monkeypatch, capsys):
    from pydantic import ValidationError
    from vllm.config import SpeculativeConfig

    parsed(monkeypatch, "--speculative-config", '{"tide": {}}')
    with pytest.raises(ValidationError) as refused:
        SpeculativeConfig(num_speculative_tokens=-3)
    sys.excepthook(ValidationError, refused.value, None)
    err = capsys.readouterr().err
    assert err.startswith("error: --speculative-config: num_speculative_tokens: Input")
    assert err.count("\n") == 1


@pytest.mark.slow
def test_vllm_serve_ends_with_a_message_and_no_traceback(target_dir, tmp_path):
    draft = toys.make_draft(tmp_path / "draft", target_dir, hidden_size=128)
    section = {"method": "eagle3", "model": str(draft), "num_speculative_tokens": 3}
    done = serve(target_dir, "--speculative-config", json.dumps(section | {"tide": {}}))
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: --speculative-config: model: draft")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("extra", "control", "start"),
    [
        (
            {"num_speculative_tokens_per_batch_size": [[1, 4, 3]]},
            {},
            "num_speculative_tokens_per_batch_size: tide.control chooses the length",
        ),
        ({"disable_padded_drafter_batch": True}, {}, "disable_padded_drafter_batch: "),
        ({"parallel_drafting": True}, {}, "parallel_drafting: tide.control may stop"),
    ],
)
def test_control_options_that_cannot_work_are_refused(
    extra, control, start, target, target_dir, tmp_path
):
    draft = toys.make_draft(tmp_path / "draft", target_dir)
    tide = {"control": {"policy": "adaspec", **control}}
    config = {"method": "eagle3", "model": str(draft), "tide": tide, **extra}
    assert refusal(config, target).startswith(start)


def test_a_fresh_draft_without_a_tide_section_is_refused():
    from vllm_tide.engine.arguments import speculative_config_argument

    with pytest.raises(argparse.ArgumentTypeError, match="'fresh' needs a tide sec"):
        speculative_config_argument('{"method": "eagle3", "model": "fresh"}')
