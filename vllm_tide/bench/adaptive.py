"""Whether an engine can verify adaptively, said before one is started.

vLLM would say it too: after each arm's server has loaded, in a traceback.
"""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

_REFUSAL = "arm {arm!r} needs vLLM's adaptive verification, which {why}"


def why_not(
    arm: str, venv: Path, model_runner: str | None, *, compiled: bool
) -> str | None:
    """Return one sentence if an arm with adaptive verification cannot be served.

    Args:
        arm: Its name.
        venv: Where its vLLM is installed.
        model_runner: ``VLLM_USE_V2_MODEL_RUNNER``; None if it is not set.
        compiled: Whether servers start without ``--enforce-eager``.
    """
    if model_runner == "0":
        why = "Model Runner V1 has not; unset VLLM_USE_V2_MODEL_RUNNER"
    elif _is_for_cpu(venv):
        why = "needs CUDA graphs, and so a GPU; --venv holds vLLM for CPU"
    elif not compiled:
        why = "needs CUDA graphs; add --compile"
    else:
        return None
    return _REFUSAL.format(arm=arm, why=why)


def _is_for_cpu(venv: Path) -> bool:
    """Tell by name and version, as vLLM itself does."""
    places = [str(path) for path in venv.glob("lib/python*/site-packages")]
    found = metadata.distributions(path=places)
    names = [f"{dist.metadata['Name']} {dist.version}" for dist in found]
    return any(name.startswith("vllm") and "cpu" in name for name in names)
