"""Model Runner V2 without a GPU: Triton's interpreter runs upstream's own kernels.

Call `prepare` before vLLM or Triton is imported. Needs no change of vLLM: its CPU
worker has a V2 runner and only wants to see a Triton backend named `cpu`.
"""

import os
from types import SimpleNamespace


def prepare(asynchronous: bool) -> None:
    """Make this process run Model Runner V2 on its CPU.

    Args:
        asynchronous: Keep asynchronous scheduling, which the CPU platform switches
            off because it has nothing to overlap. The order of calls is a GPU's.
    """
    os.environ |= {
        "TRITON_INTERPRET": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        # An engine is seen before its interpreted kernels have run once.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    from triton.backends import backends

    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: False))
    if asynchronous:
        _keep_asynchronous_scheduling()


def _keep_asynchronous_scheduling() -> None:
    from vllm.platforms.cpu import CpuPlatform

    inner = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls, vllm_config):
        inner(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
