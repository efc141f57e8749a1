"""Adaptive verification and Model Runner V2: what is refused, what is chosen."""

from __future__ import annotations

import copy
import logging
from functools import partial
from types import SimpleNamespace as Config
from typing import Any

import pytest

from tests import toys
from tests.engine.test_arguments import refusal, target, target_dir
from vllm_tide.config import ConfigError, TideConfig, parse_tide

pytestmark = pytest.mark.vllm

__all__ = ["target", "target_dir"]

ADAPTIVE = {"enable_adaptive_verification": True}
ADASPEC = {"control": {"policy": "adaspec"}}


@pytest.fixture
def gpu(monkeypatch):
    """Simulate a GPU on any machine."""
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)


@pytest.fixture(scope="module")
def draft(tmp_path_factory, target_dir) -> str:
    folder = tmp_path_factory.mktemp("draft")
    return str(toys.make_draft(folder, target_dir))


@pytest.fixture
def heard():
    """Warnings of the start."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("vllm.tide")
    logger.addHandler(handler)
    yield records
    logger.removeHandler(handler)


def test_a_limit_with_adaptive_verification_needs_predicted_times(gpu, target, draft):
    from vllm_tide.engine.arguments import check_speculative_config

    config = {"model": draft, "tide": {}, **ADAPTIVE}
    check_speculative_config(dict(config), target)
    limited = {"control": {"policy": "threshold", "slo_tpot_ms": 40}}
    assert refusal(config | {"tide": limited}, target).startswith(
        "tide.control.slo_tpot_ms: 'threshold' predicts no step times"
    )
    limited["control"]["policy"] = "adaspec"
    check_speculative_config(config | {"tide": limited}, target)


def engine_on(device: str = "cuda", requests: int = 8, **speculative: Any) -> Any:
    """Return vLLM's configuration of an engine, as far as TIDE reads it."""
    from vllm.config import VllmConfig

    engine = Config(
        device_config=Config(device_type=device),
        parallel_config=Config(
            pipeline_parallel_size=1,
            nnodes_within_dp=1,
            data_parallel_size=1,
            enable_batch_sharded_sampling=None,
        ),
        lora_config=None,
        kv_transfer_config=None,
        weight_transfer_config=None,
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
                "tide": {},
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


REFUSED = [
    (
        "speculative_config",
        {"tide": {"control": {"policy": "threshold", "verify": False}}, **ADAPTIVE},
        "tide.control.verify: false verifies every drafted token",
    ),
    (
        "speculative_config",
        {"use_local_argmax_reduction": True},
        "use_local_argmax_reduction: tide",
    ),
    (
        "speculative_config",
        {"draft_sample_method": "probabilistic"},
        "draft_sample_method: with 'probabilistic' the probability of the",
    ),
    ("", {"kv_transfer_config": object()}, "--kv-transfer-config: "),
    ("", {"weight_transfer_config": object()}, "--weight-transfer-config: "),
    ("model_config", {"enable_sleep_mode": True}, "--enable-sleep-mode: level 2"),
    ("parallel_config", {"nnodes_within_dp": 2}, "--nnodes: "),
    ("", {"use_v2_model_runner": False}, "--async-scheduling: tide needs synchronous"),
    (
        "device_config",
        {"device_type": "tpu"},
        "tide: device 'tpu' is not supported, only 'cpu' and 'cuda' (ROCm too); remove",
    ),
]


@pytest.mark.parametrize(("part", "change", "start"), REFUSED)
def test_unsupported_features_are_refused(part, change, start, tmp_path, monkeypatch):
    from vllm_tide.engine.arguments import check_engine_config

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = engine_on("cpu")
    check_engine_config(config)
    config = engine_on("cpu")
    vars(getattr(config, part) if part else config).update(change)
    with pytest.raises(ConfigError) as refused:
        check_engine_config(config)
    assert str(refused.value).startswith(start)


@pytest.mark.parametrize(
    "change",
    [
        ADAPTIVE,
        {"tide": ADASPEC, **ADAPTIVE},
        {"tide": {"test_time": {"memory": "ngram"}}},
        {"tide": {"control": {"policy": "threshold"}}},
    ],
)
def test_supported_features_are_not_refused(change, tmp_path, monkeypatch):
    from vllm_tide.engine.arguments import check_engine_config

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    check_engine_config(engine_on("cpu", **change))


def test_a_trainer_on_a_gpu_needs_a_gpu_build_of_torch(tmp_path, monkeypatch):
    from vllm_tide.engine.arguments import check_engine_config

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("torch.version.cuda", None)
    monkeypatch.setattr("torch.version.hip", None)
    on_gpu = {"train": {"device": "cuda:0"}}
    with pytest.raises(ConfigError, match="^tide.train.device: 'cuda:0', but torch is"):
        check_engine_config(engine_on("cpu", tide=on_gpu))
    # Here no trainer is started: it runs on another host, or by hand.
    elsewhere = on_gpu | {"spool": {"url": str(tmp_path / "spool")}}
    check_engine_config(engine_on("cpu", tide=elsewhere))
    by_hand = {"train": {"device": "cuda:0", "autostart": False}}
    check_engine_config(engine_on("cpu", tide=by_hand))
    monkeypatch.setattr("torch.version.cuda", "13.0")
    check_engine_config(engine_on("cpu", tide=on_gpu))


def test_a_mixture_of_experts_on_several_ranks_disables_control(heard):
    from vllm_tide.engine.arguments import check_engine_config

    config = engine_on("cpu", tide=ADASPEC)
    config.parallel_config.data_parallel_size = 2
    config.use_v2_model_runner = False
    config.scheduler_config.async_scheduling = False
    speculative = config.speculative_config
    with pytest.raises(ConfigError, match="--data-parallel-size: tide.control"):
        check_engine_config(config)
    speculative.enable_adaptive_verification = True
    message = "^enable_adaptive_verification: with a mixture of experts"
    with pytest.raises(ConfigError, match=message):
        check_engine_config(config)
    speculative.enable_adaptive_verification = False
    speculative.tide = {"test_time": {"memory": "ngram"}}
    with pytest.raises(ConfigError, match="mixture of experts .* set it to 'off'"):
        check_engine_config(config)
    speculative.tide = {"control": {"min_gain": 0.1}}
    check_engine_config(config)
    (warning,) = heard
    assert "--data-parallel-size" in warning.getMessage()
    control = parse_tide(speculative.tide).control
    assert (control.policy, control.min_gain) == ("static", 0.1)


@pytest.mark.parametrize(
    ("section", "v2", "sampling", "memory"),
    [
        ({}, False, "greedy", "ngram"),
        ({"test_time": {"stride": 8}}, False, "greedy", "ngram"),
        ({}, False, "probabilistic", "off"),
        ({}, True, "greedy", "off"),
        ({"control": {"policy": "static"}}, False, "greedy", "off"),
        ({"preset": "observe"}, False, "greedy", "off"),
        ({"test_time": {"adapt": "shared"}}, False, "greedy", "off"),
        ({"test_time": {"memory": "off"}}, False, "greedy", "off"),
    ],
)
def test_the_memory_is_on_by_default_on_model_runner_v1(section, v2, sampling, memory):
    from vllm_tide.engine.arguments import check_engine_config

    config = engine_on("cpu", tide=section, draft_sample_method=sampling)
    config.use_v2_model_runner = v2
    config.scheduler_config.async_scheduling = False
    check_engine_config(config)
    settled = parse_tide(config.speculative_config.tide).test_time
    assert settled.memory == memory
    assert settled.stride == section.get("test_time", {}).get("stride")


def resolved(speculative: dict[str, Any], target, **change: Any) -> Any:
    """Return the configuration of every process on a GPU, from what a user wrote."""
    from vllm_tide.engine.arguments import check_engine_config, check_speculative_config

    written = copy.deepcopy(speculative)
    check_speculative_config(written, target)
    check_speculative_config(written, target)  # vLLM calls it twice
    engine = engine_on(**{k: written[k] for k in written if k != "model"})
    vars(engine).update(change)
    check_engine_config(engine)
    return engine


def test_defaults_on_a_gpu_enable_everything(gpu, target, draft, heard):
    engine = resolved({"model": draft, "tide": {}}, target)
    tide = parse_tide(engine.speculative_config.tide)
    memory_off = TideConfig.model_validate({"test_time": {"memory": "off"}})
    assert tide == memory_off and tide.control.policy == "adaspec"
    assert tide.train.autostart and tide.capture.enabled and tide.deploy.canary
    assert engine.speculative_config.enable_adaptive_verification is True
    assert heard == []


@pytest.mark.parametrize(
    ("section", "more", "on"),
    [
        ({"control": {"verify": True}}, {}, True),
        ({"control": {"policy": "threshold"}}, {}, False),
        ({"preset": "learn"}, {}, False),
        ({"control": {"verify": False}}, {}, False),
        ({}, {"enable_adaptive_verification": False}, False),
    ],
)
def test_the_operators_adaptive_verification_setting_is_unchanged(
    section, more, on, gpu, target, draft
):
    engine = resolved({"model": draft, "tide": section, **more}, target)
    assert engine.speculative_config.enable_adaptive_verification is on


class Chosen:
    """An attention backend that plans from the host's lengths."""

    name = "FLASHY"

    @classmethod
    def get_class(cls) -> type[Chosen]:
        return cls

    @staticmethod
    def supports_device_cpu_query_lens_mismatch() -> bool:
        return False


NO_FULL_GRAPHS = Config(cudagraph_mode=Config(has_full_cudagraphs=lambda: False))


@pytest.mark.parametrize(
    ("part", "value", "why"),
    [
        ("compilation_config", NO_FULL_GRAPHS, "requires full CUDA graphs"),
        ("aux_output_config", Config(enabled=True), "enable-return-routed-experts"),
        (
            "attention_config",
            Config(backend=None, backend_per_kind={"full": Chosen}),
            "--attention-backend FLASHY lacks support.",
        ),
    ],
)
def test_refused_adaptive_verification_is_disabled_with_one_warning(
    part, value, why, gpu, target, draft, heard
):
    engine = resolved({"model": draft, "tide": {}}, target, **{part: value})
    assert engine.speculative_config.enable_adaptive_verification is False
    assert parse_tide(engine.speculative_config.tide).control.policy == "adaspec"
    (warning,) = heard
    assert warning.levelname == "WARNING" and why in warning.getMessage()


@pytest.mark.parametrize(
    "extra",
    [
        {"num_speculative_tokens_per_batch_size": [[1, 4, 3]]},
        {"disable_padded_drafter_batch": True},
        {"parallel_drafting": True},
    ],
)
def test_unrequested_control_is_disabled_with_one_warning(extra, target, draft, heard):
    from vllm_tide.engine.arguments import check_speculative_config

    section = {"control": {"min_gain": 0.1}}
    config = {"model": draft, "tide": section, **extra}
    check_speculative_config(config, target)
    # In the dictionary: so scheduler, workers and trainer read the same.
    tide = parse_tide(config["tide"])
    assert tide.control.policy == "static" and tide.train.autostart
    (warning,) = heard
    assert next(iter(extra)) in warning.getMessage()
    check_speculative_config(config, target)
    assert len(heard) == 1


@pytest.mark.parametrize(
    ("requests", "table"), [(8, [(1, 7, 3), (8, 8, 2)]), (1, [(1, 1, 3)])]
)
def test_on_a_gpu_graphs_are_captured_for_every_length_of_control(requests, table):
    from vllm_tide.engine.arguments import check_engine_config

    config = engine_on("cuda", requests, tide={"control": {"policy": "threshold"}})
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


def test_ranks_of_a_dense_model_have_graphs_of_every_length(heard):
    """vLLM makes each of them a separate engine."""
    from vllm_tide.engine.arguments import check_engine_config

    config = engine_on()
    config.model_config.is_moe = False
    config.parallel_config.data_parallel_size = 2
    check_engine_config(config)
    table = config.speculative_config.num_speculative_tokens_per_batch_size
    assert table == [(1, 7, 3), (8, 8, 2)]
