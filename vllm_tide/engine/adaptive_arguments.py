"""What vLLM's adaptive verification cannot be combined with, a sentence for each.

vLLM refuses most of it by itself, before it asks us about the whole configuration, and
ends in a traceback. So what shows early is refused here, in our words, and what vLLM
said of the rest is found in its error.
"""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from vllm_tide.config import ConfigError, ControlConfig, parse_tide

KNOB = "enable_adaptive_verification"


def check_adaptive(control: ControlConfig, target: Any) -> None:
    """Check what adaptive verification needs of the engine and of `tide.control`.

    Args:
        control: `tide.control`.
        target: vLLM's `ModelConfig` of the target.

    Raises:
        ConfigError: One sentence naming the knobs.
    """
    from vllm import envs
    from vllm.platforms import current_platform

    if envs.VLLM_USE_V2_MODEL_RUNNER is False:
        raise ConfigError(
            f"{KNOB}: Model Runner V1 has none; unset VLLM_USE_V2_MODEL_RUNNER, or set "
            "it to false."
        )
    if current_platform.is_cpu():
        raise ConfigError(
            f"{KNOB}: it needs CUDA graphs, which a CPU has not; set it to false: "
            "tide.control.verify cuts each request's drafts there."
        )
    if target.enforce_eager:
        raise ConfigError(
            f"{KNOB}: it needs CUDA graphs, which --enforce-eager switches off; leave "
            "that out, or set it to false."
        )
    if control.slo_tpot_ms is not None and control.policy in ("static", "threshold"):
        raise ConfigError(
            f"tide.control.slo_tpot_ms: {control.policy!r} predicts no times, so "
            f"{KNOB} cannot keep a limit; set tide.control.policy to 'adaspec', or "
            "leave the limit out."
        )


def settle_adaptive(section: dict[str, Any], asked: bool | None) -> dict[str, Any]:
    """Note in a `tide` section whether adaptive verification may be switched on.

    It may where `tide.control.verify` is not given (`switch_adaptive_on`), as only the
    dictionary that a configuration is made from shows what an operator left out.

    Args:
        section: The `tide` section, with control.
        asked: The knob of adaptive verification, None where it is not given.
    """
    control = dict(section.get("control", {}))
    if asked is None and control.get("verify"):
        del control["verify"]  # which is the default
    elif asked is not None:
        control.setdefault("verify", _is_cpu())
    return {**section, "control": control}


def _cuts(backend: Any) -> bool:
    return bool(backend.supports_device_cpu_query_lens_mismatch())


def _is_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def switch_adaptive_on(vllm_config: Any, log: Any) -> None:
    """Switch adaptive verification on, unless the operator or vLLM is against it.

    Only on Model Runner V2 and a GPU. An attention backend that cannot do it shows
    later: `WorkerTideV2.make_verification`.

    Args:
        vllm_config: vLLM's `VllmConfig`; its `speculative_config` is changed.
        log: Where one sentence goes if it stays off.
    """
    speculative = vllm_config.speculative_config
    control = parse_tide(speculative.tide).control
    given = "verify" in speculative.tide.get("control", {})
    if control.policy in ("static", "threshold") or given:
        return
    if speculative.enable_adaptive_verification:
        return
    speculative.enable_adaptive_verification = True
    try:
        # What vLLM asked of it when the configuration was made.
        vllm_config._verify_aux_output_compatibility()
        vllm_config._verify_sampling_replay_config()
        vllm_config._validate_adaptive_verification()
        attention = vllm_config.attention_config
        for backend in (attention.backend, *attention.backend_per_kind.values()):
            if backend and not _cuts(backend.get_class()):
                raise ValueError(f"--attention-backend {backend.name} cannot do it.")
    except ValueError as error:
        speculative.enable_adaptive_verification = False
        log.warning(
            "tide: %s stays off, which cuts each request's drafts: %s", KNOB, error
        )


def refusal_of_vllm(error: BaseException) -> str | None:
    """What vLLM's configuration said against adaptive verification.

    Args:
        error: Any.

    Returns:
        Its own sentence behind the knob's name; None if the error is another one.
    """
    if not isinstance(error, ValidationError):
        return None
    for found in error.errors(include_url=False, include_input=False):
        said = str(found["msg"]).removeprefix("Value error, ")
        words = said.lower()
        if "adaptive" in words and "verification" in words:
            return f"{KNOB}: {said}"
    return None
