"""Model Runner V2 without a GPU: Triton's interpreter runs upstream's own kernels.

Call `prepare` before vLLM or Triton is imported. Needs no change of vLLM: its CPU
worker has a V2 runner and requires only a Triton backend named `cpu`.
"""

import os
from types import SimpleNamespace


def prepare(asynchronous: bool) -> None:
    """Make this process run Model Runner V2 on its CPU.

    Args:
        asynchronous: Keep asynchronous scheduling, which the CPU platform switches
            off because it has nothing to overlap. The order of calls is a GPU's.
    """
    interpret()
    if asynchronous:
        _keep_asynchronous_scheduling()
    _overwrite_what_the_target_returned()


def interpret() -> None:
    """Set what must be set before vLLM is imported."""
    os.environ |= {
        "TRITON_INTERPRET": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        # An engine must be visible before its interpreted kernels have run once.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    from triton.backends import backends

    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: False))


def verify_adaptively(
    draft_curve: list[list[float]], target_curve: list[list[float]]
) -> None:
    """Let adaptive verification run in eager steps, which upstream and we refuse.

    Call it after `prepare`. All of it but the graphs is a GPU's.

    Args:
        draft_curve: [requests, ms] pairs that capturing graphs would have measured.
        target_curve: [tokens, ms] pairs, the same.
    """
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu import model_runner
    from vllm.v1.worker.gpu.spec_decode import adaptive_verification as upstream

    from vllm_tide.engine import verification

    VllmConfig._validate_adaptive_verification = lambda self: None
    upstream.get_varlen_cudagraph_unsupported_backend = lambda *args, **kwargs: None
    upstream._assign_draft_token_budget_compiled = upstream._assign_draft_token_budget
    model_runner.resolve_adaptive_cudagraph_mode = lambda mode, **kwargs: mode
    # Cut from the start: the estimator would first be fitted after hundreds of steps.
    verification._WARMUP_STEPS = 0
    inner = verification.StepCostVerification.__init__

    def __init__(self, *args, **kwargs):
        inner(self, *args, **kwargs)
        self.set_cost_curves(
            [tuple(pair) for pair in draft_curve],
            [tuple(pair) for pair in target_curve],
        )

    verification.StepCostVerification.__init__ = __init__


def _overwrite_what_the_target_returned() -> None:
    """Simulate draft graphs of a GPU: their memory pool is the target's too."""
    from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator
    from vllm.v1.worker.gpu.spec_decode.target_dependent_ar import speculator

    def overwriting(inner):
        def propose(self, *args, **kwargs):
            drafted = inner(self, *args, **kwargs)
            for part in (args[3], *args[4]) if args else ():  # a dummy run names them
                part.fill_(7.0)
            return drafted

        return propose

    for kind in (speculator.TargetDependentARSpeculator, DFlashSpeculator):
        kind.propose = overwriting(kind.propose)


def _keep_asynchronous_scheduling() -> None:
    from vllm.platforms.cpu import CpuPlatform

    inner = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls, vllm_config):
        inner(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
