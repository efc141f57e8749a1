"""Adaptive verification and Model Runner V2: what is refused, what is chosen."""

from __future__ import annotations

import copy
import logging
from functools import partial
from typing import Any

import pytest

from tests import toys
from tests.engine.test_arguments import refusal, target, target_dir
from vllm_tide.config import TideConfig, parse_tide

pytestmark = pytest.mark.vllm

__all__ = ["target", "target_dir"]

NO_OPTION = dict.fromkeys(
    ("lora_config", "kv_transfer_config", "weight_transfer_config")
)


ADAPTIVE = {"enable_adaptive_verification": True}


@pytest.fixture
def gpu(monkeypatch):
    """As on a GPU, whatever this is."""
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)


def adaptive(tmp_path, target_dir, **control):
    draft = tmp_path / "draft"
    if not draft.exists():
        toys.make_draft(draft, target_dir)
    return {"model": str(draft), "tide": {"control": control}, **ADAPTIVE}


@pytest.mark.parametrize("policy", ["static", "threshold"])
def test_a_limit_that_adaptive_verification_cannot_keep_is_refused(
    gpu, policy, target, target_dir, tmp_path
):
    from vllm_tide.engine.arguments import check_speculative_config

    limited = adaptive(tmp_path, target_dir, policy=policy, slo_tpot_ms=40)
    assert refusal(dict(limited), target).startswith(
        f"tide.control.slo_tpot_ms: {policy!r} predicts no times"
    )
    limited["enable_adaptive_verification"] = False
    check_speculative_config(dict(limited), target)
    timed = adaptive(tmp_path, target_dir, policy="adaspec", slo_tpot_ms=40)
    check_speculative_config(timed, target)


@pytest.mark.parametrize(
    ("change", "start"),
    [
        ({"enable_adaptive_verification": True}, None),
        (
            {
                "enable_adaptive_verification": True,
                "tide": {"control": {"policy": "threshold", "verify": False}},
            },
            "tide.control.verify: false keeps every drafted token",
        ),
        ({"use_local_argmax_reduction": True}, "use_local_argmax_reduction: tide"),
        ({"tide": {"control": {"policy": "adaspec"}}}, None),
        ({"tide": {"control": {"policy": "adaspec"}}, **ADAPTIVE}, None),
        ({"tide": {"control": {"policy": "tide_gate"}}}, None),
        (
            {"draft_sample_method": "probabilistic"},
            "draft_sample_method: with 'probabilistic' tide does not see",
        ),
        ({"tide": {"test_time": {"memory": "ngram"}}}, None),
        ({"tide": {"control": {"policy": "threshold"}}}, None),
        ({"tide": {"control": {"policy": "adaspec", "profile": "x"}}}, None),
        ({}, None),
    ],
)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_tide_cannot_do_with_model_runner_v2_is_refused(
    change, start, asynchronous, tmp_path, monkeypatch
):
    from types import SimpleNamespace as Config

    from vllm_tide.config import ConfigError
    from vllm_tide.engine.arguments import check_engine_config

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    off = {
        "enable_adaptive_verification": False,
        "use_local_argmax_reduction": False,
        "draft_sample_method": "greedy",
    }
    config = Config(
        device_config=Config(device_type="cpu"),
        model_config=Config(is_moe=False, enable_sleep_mode=False),
        parallel_config=Config(
            pipeline_parallel_size=1,
            nnodes_within_dp=1,
            data_parallel_size=1,
            enable_batch_sharded_sampling=None,
        ),
        **NO_OPTION,
        use_v2_model_runner=True,
        scheduler_config=Config(async_scheduling=asynchronous),
        speculative_config=Config(**{"tide": {}, **off, **change}),
    )
    if start is None:
        check_engine_config(config)
        config.use_v2_model_runner = False
        if not asynchronous:
            return
        start = "--async-scheduling: tide needs synchronous scheduling with Model"
    with pytest.raises(ConfigError) as refused:
        check_engine_config(config)
    assert str(refused.value).startswith(start)


@pytest.mark.parametrize(
    ("part", "name", "value", "said"),
    [
        ("", "kv_transfer_config", object(), "--kv-transfer-config: "),
        ("", "weight_transfer_config", object(), "--weight-transfer-config: "),
        ("model_config", "enable_sleep_mode", True, "--enable-sleep-mode: level 2"),
        ("parallel_config", "nnodes_within_dp", 2, "--nnodes: "),
    ],
)
def test_what_would_change_or_part_the_models_is_refused(part, name, value, said):
    from vllm_tide.config import ConfigError
    from vllm_tide.engine.arguments import check_engine_config

    config = on_a_gpu()
    setattr(getattr(config, part) if part else config, name, value)
    with pytest.raises(ConfigError) as refused:
        check_engine_config(config)
    assert str(refused.value).startswith(said)
    assert str(refused.value).count(".") == 1


def test_a_mixture_of_experts_on_several_ranks_has_no_control(heard):
    from types import SimpleNamespace as Config

    from vllm_tide.config import ConfigError
    from vllm_tide.engine.arguments import check_engine_config

    config = Config(
        device_config=Config(device_type="cpu"),
        model_config=Config(is_moe=True, enable_sleep_mode=False),
        parallel_config=Config(
            pipeline_parallel_size=1, nnodes_within_dp=1, data_parallel_size=2
        ),
        **NO_OPTION,
        use_v2_model_runner=False,
        scheduler_config=Config(async_scheduling=False),
        speculative_config=Config(
            tide={"control": {"policy": "adaspec"}}, enable_adaptive_verification=False
        ),
    )
    with pytest.raises(ConfigError, match="--data-parallel-size: tide.control"):
        check_engine_config(config)
    config.speculative_config.enable_adaptive_verification = True
    with pytest.raises(ConfigError, match="^enable_adaptive_verification: a rank"):
        check_engine_config(config)
    config.speculative_config.enable_adaptive_verification = False
    config.speculative_config.tide = {"test_time": {"memory": "ngram"}}
    with pytest.raises(ConfigError, match="mixture of experts .* set it to 'off'"):
        check_engine_config(config)
    config.speculative_config.tide = {"control": {"min_gain": 0.1}}
    check_engine_config(config)
    (said,) = heard
    assert "--data-parallel-size" in said.getMessage()
    control = parse_tide(config.speculative_config.tide).control
    assert (control.policy, control.min_gain) == ("static", 0.1)


def on_a_gpu(requests=8, **speculative):
    from types import SimpleNamespace as Config

    from vllm.config import VllmConfig

    engine = Config(
        device_config=Config(device_type="cuda"),
        parallel_config=Config(
            pipeline_parallel_size=1,
            nnodes_within_dp=1,
            data_parallel_size=1,
            enable_batch_sharded_sampling=None,
        ),
        **NO_OPTION,
        use_v2_model_runner=True,
        aux_output_config=Config(enabled=False),
        model_config=Config(
            return_sampling_mask=False,
            is_moe=True,
            runner_type="generate",
            enable_sleep_mode=False,
        ),
        cache_config=Config(enable_prefix_caching=True),
        attention_config=Config(backend=None, backend_per_kind={}),
        compilation_config=Config(
            cudagraph_mode=Config(has_full_cudagraphs=lambda: True)
        ),
        scheduler_config=Config(async_scheduling=True, max_num_seqs=requests),
        speculative_config=Config(
            **{
                "enable_adaptive_verification": False,
                "use_local_argmax_reduction": False,
                "draft_sample_method": "greedy",
                "num_speculative_tokens": 3,
                "num_speculative_tokens_per_batch_size": None,
                **speculative,
            }
        ),
    )
    for check in (
        "_verify_aux_output_compatibility",
        "_verify_sampling_replay_config",
        "_validate_adaptive_verification",
    ):
        setattr(engine, check, partial(getattr(VllmConfig, check), engine))
    return engine


def resolved(speculative: dict[str, Any], target, requests=8, **change) -> Any:
    """The configuration on a GPU as every process has it, from what a user wrote."""
    from vllm_tide.engine.arguments import check_engine_config, check_speculative_config

    written = copy.deepcopy(speculative)
    check_speculative_config(written, target)
    check_speculative_config(written, target)  # vLLM asks twice
    engine = on_a_gpu(requests, **{k: written[k] for k in written if k != "model"})
    vars(engine).update(change)
    check_engine_config(engine)
    return engine


@pytest.fixture
def heard():
    """What was said at the start."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("vllm.tide")
    logger.addHandler(handler)
    yield records
    logger.removeHandler(handler)


class Chosen:
    """An attention backend that plans from the lengths that the host knows."""

    name = "FLASHY"

    @classmethod
    def get_class(cls) -> type[Chosen]:
        return cls

    @staticmethod
    def supports_device_cpu_query_lens_mismatch() -> bool:
        return False


def control_of(engine) -> Any:
    return parse_tide(engine.speculative_config.tide).control


def test_nothing_set_is_the_whole_product_on_a_gpu(
    gpu, target, target_dir, tmp_path, heard
):
    given = {"model": str(toys.make_draft(tmp_path / "draft", target_dir)), "tide": {}}
    engine = resolved(given, target)
    tide = parse_tide(engine.speculative_config.tide)
    assert tide == TideConfig() and tide.control.policy == "adaspec"
    assert tide.train.autostart and tide.capture.enabled and tide.deploy.canary
    assert engine.speculative_config.enable_adaptive_verification is True
    assert heard == []


@pytest.mark.parametrize(
    ("section", "more", "on"),
    [
        ({"control": {"verify": True}}, {}, True),
        ({"control": {"policy": "tide_gate"}}, {}, True),
        ({"control": {"policy": "threshold"}}, {}, False),
        ({"preset": "control"}, {}, True),
        ({"preset": "learn"}, {}, False),
        ({"control": {"verify": False}}, {}, False),
        ({}, {"enable_adaptive_verification": False}, False),
        ({"control": {"verify": True}}, {"enable_adaptive_verification": False}, False),
    ],
)
def test_what_the_operator_says_of_adaptive_verification_stays(
    section, more, on, gpu, target, target_dir, tmp_path
):
    draft = toys.make_draft(tmp_path / "draft", target_dir)
    engine = resolved({"model": str(draft), "tide": section, **more}, target)
    assert engine.speculative_config.enable_adaptive_verification is on


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"compilation_config": "eager"}, "requires full CUDA graphs"),
        ({"aux_output_config": "routed"}, "enable-return-routed-experts"),
        ({"model_config": "replay"}, "sampling distribution replay"),
        ({"attention_config": "chosen"}, "--attention-backend FLASHY cannot do it."),
    ],
)
def test_where_vllm_refuses_adaptive_verification_it_stays_off_in_one_sentence(
    change, why, gpu, target, target_dir, tmp_path, heard
):
    from types import SimpleNamespace as Config

    made = {
        "eager": Config(cudagraph_mode=Config(has_full_cudagraphs=lambda: False)),
        "routed": Config(enabled=True),
        "chosen": Config(backend=None, backend_per_kind={"full": Chosen}),
        "replay": Config(
            is_moe=True,
            runner_type="generate",
            return_sampling_mask=True,
            enable_sleep_mode=False,
        ),
    }
    draft = toys.make_draft(tmp_path / "draft", target_dir)
    given = {"model": str(draft), "tide": {}}
    engine = resolved(given, target, **{k: made[v] for k, v in change.items()})
    assert engine.speculative_config.enable_adaptive_verification is False
    assert control_of(engine).policy == "adaspec"
    (said,) = heard
    assert said.levelname == "WARNING" and why in said.getMessage()


LEFT_OUT = [
    {"num_speculative_tokens_per_batch_size": [[1, 4, 3]]},
    {"disable_padded_drafter_batch": True},
    {"parallel_drafting": True},
]


@pytest.mark.parametrize("extra", LEFT_OUT)
@pytest.mark.parametrize("section", [{}, {"control": {"min_gain": 0.1}}])
def test_control_that_nobody_asked_for_is_left_out_in_one_sentence(
    extra, section, target, target_dir, tmp_path, heard
):
    from vllm_tide.engine.arguments import check_speculative_config

    draft = toys.make_draft(tmp_path / "draft", target_dir)
    config = {"model": str(draft), "tide": section, **extra}
    check_speculative_config(config, target)
    # In the dictionary: so scheduler, workers and trainer read the same.
    tide = parse_tide(config["tide"])
    assert tide.control.policy == "static" and tide.train.autostart
    (said,) = heard
    assert next(iter(extra)) in said.getMessage()
    check_speculative_config(config, target)
    assert len(heard) == 1


@pytest.mark.parametrize(
    ("requests", "table"),
    [
        (8, [(1, 7, 3), (8, 8, 2)]),
        (2, [(1, 1, 3), (2, 2, 2)]),
        (1, [(1, 1, 3)]),
    ],
)
def test_on_a_gpu_graphs_are_captured_for_every_length_of_control(requests, table):
    from vllm_tide.config import ConfigError
    from vllm_tide.engine.arguments import check_engine_config

    config = on_a_gpu(requests, tide={"control": {"policy": "threshold"}})
    speculative = config.speculative_config
    check_engine_config(config)
    assert speculative.num_speculative_tokens_per_batch_size == table
    speculative.num_speculative_tokens_per_batch_size = None
    speculative.tide = {"preset": "learn"}
    check_engine_config(config)
    assert speculative.num_speculative_tokens_per_batch_size is None
    config.use_v2_model_runner = False
    with pytest.raises(ConfigError, match="VLLM_USE_V2_MODEL_RUNNER"):
        check_engine_config(config)
