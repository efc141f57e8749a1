"""Will a server with a `tide` section start on the device that vLLM was built for?"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

from vllm_tide.config import ConfigError
from vllm_tide.doctor.builds import torch_build, vllm_device
from vllm_tide.doctor.finding import Finding, failed, ok, skipped
from vllm_tide.doctor.subject import Subject


def check(subject: Subject) -> Iterator[Finding]:
    """Ask the server's own check."""
    del subject
    device = vllm_device(torch_build())
    if not device:
        yield skipped("device", "vLLM's build is not known.")
    elif why := refusal("cpu" if device == "cpu" else "cuda"):
        yield failed("device", why, "See README, 'What works in this version'.")
    else:
        yield ok("device", f"{device} is supported.")


def refusal(device_type: str) -> str:
    """Why the server would refuse `tide` on a device; empty if it would not.

    Args:
        device_type: As vLLM's `DeviceConfig` names it: ROCm is "cuda" there.
    """
    from vllm_tide.engine.arguments import check_engine_config

    # Everything else as a plain `vllm serve` has it: V2 on a GPU, else V1 with
    # --no-async-scheduling.
    speculative = SimpleNamespace(
        enable_adaptive_verification=False,
        use_local_argmax_reduction=False,
        draft_sample_method="greedy",
        tide={"control": {"policy": "static"}},
    )
    plain = SimpleNamespace(
        device_config=SimpleNamespace(device_type=device_type),
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=1,
            nnodes_within_dp=1,
            data_parallel_size=1,
            enable_batch_sharded_sampling=False,
        ),
        model_config=SimpleNamespace(enable_sleep_mode=False),
        lora_config=None,
        kv_transfer_config=None,
        weight_transfer_config=None,
        speculative_config=speculative,
        use_v2_model_runner=device_type != "cpu",
        scheduler_config=SimpleNamespace(async_scheduling=False),
    )
    try:
        check_engine_config(plain)
    except ConfigError as error:
        return str(error)
    return ""
