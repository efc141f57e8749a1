"""What the installed vLLM and torch were built for, without importing either."""

from __future__ import annotations

import ast
import os
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path

from vllm_tide.patching import DISTRIBUTIONS


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """torch's own `version.py`; `cuda` and `hip` are None where it is built without."""

    version: str
    cuda: str | None
    hip: str | None

    @property
    def words(self) -> str:
        """The build in words."""
        if self.cuda:
            return f"CUDA {self.cuda}"
        return f"ROCm (HIP {self.hip})" if self.hip else "CPU"


def torch_build() -> TorchBuild | None:
    """The installed torch's build; None without torch."""
    spec = util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    return read_torch_build(Path(spec.origin).parent / "version.py")


def read_torch_build(path: Path) -> TorchBuild | None:
    """Read torch's `version.py`; None if it is none."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, UnicodeDecodeError):
        return None
    values: dict[str, object] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign):
            targets, value = node.targets, node.value
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            targets, value = [node.target], node.value
        else:
            continue
        for target in targets:
            with suppress(ValueError):
                if isinstance(target, ast.Name):
                    values[target.id] = ast.literal_eval(value)
    version, cuda, hip = (values.get(name) for name in ("__version__", "cuda", "hip"))
    if not isinstance(version, str):
        return None
    return TorchBuild(
        version,
        cuda if isinstance(cuda, str) else None,
        hip if isinstance(hip, str) else None,
    )


def vllm_distribution() -> metadata.Distribution | None:
    """The installed vLLM, under either of its names."""
    for name in DISTRIBUTIONS:
        with suppress(metadata.PackageNotFoundError):
            return metadata.distribution(name)
    return None


def vllm_device(torch: TorchBuild | None) -> str:
    """Where vLLM will run: "cpu", "cuda" or "rocm"; empty if that cannot be told.

    As vLLM decides: an explicit target, then its own name and version, then the GPU
    that torch is built for.
    """
    if os.environ.get("VLLM_TARGET_DEVICE") == "cpu":
        return "cpu"
    found = vllm_distribution()
    if found is None:
        return ""
    if "cpu" in f"{found.metadata['Name']} {found.version}":
        return "cpu"
    if torch is None:
        return ""
    return "cuda" if torch.cuda else "rocm" if torch.hip else ""
