"""What vLLM's adaptive verification cannot be combined with, a sentence for each.

vLLM refuses most of it by itself, before it asks us about the whole configuration, and
ends in a traceback. So what shows early is refused here, in our words, and what vLLM
said of the rest is found in its error.
"""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from vllm_tide.config import ConfigError, ControlConfig

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
