"""Imports point one way, and light packages stay light."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "vllm_tide"

# A package may import those of a lower layer, and itself.
LAYERS = {
    "config": 0,
    "patching": 0,
    "dashboards": 0,
    "examples": 0,
    "metrics": 1,
    "_shm": 0,
    "tracing": 0,
    "transport": 1,
    "speculative": 1,
    "compare": 1,
    "control": 2,
    "kernels": 1,
    "capture": 2,
    "draft": 2,
    "train": 3,
    "deploy": 4,
    "sidecar": 5,
    "memory": 3,
    "plan": 3,
    "engine": 4,
    "doctor": 5,
    "top": 5,
    "cli": 6,
    "__main__": 7,
}
NO_TORCH = (
    *("config", "dashboards", "transport", "patching", "metrics", "compare"),
    *("control", "memory", "capture"),
)


@cache
def sources() -> dict[Path, ast.Module]:
    """Every module of the package, parsed once."""
    files = PACKAGE.rglob("*.py")
    return {file: ast.parse(file.read_text(encoding="utf-8")) for file in files}


@cache
def imports() -> list[tuple[str, str, str]]:
    result = []
    for file, tree in sources().items():
        here = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for node in ast.walk(tree):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module]
                if node.module == "vllm_tide":
                    names = [f"vllm_tide.{alias.name}" for alias in node.names]
            result += [(str(file), here, name) for name in names]
    return result


def test_layers_import_downwards_only():
    wrong = []
    for file, here, name in imports():
        if not name.startswith("vllm_tide.") or here == "__init__":
            continue
        there = name.split(".")[1]
        fine = there == here or LAYERS[there] < LAYERS[here]
        if not fine:
            wrong.append((file, name))
    assert wrong == []


def test_only_engine_imports_vllm():
    wrong = [
        (file, name)
        for file, here, name in imports()
        if name.split(".")[0] == "vllm" and here != "engine"
    ]
    assert wrong == []


# Distributions with another name than their module; kernels' compilers come with
# Torch's builds.
DISTRIBUTIONS = {"yaml": "pyyaml", "opentelemetry": "opentelemetry-api"}
WITH_TORCH = {"torch", "triton", "xformers"}


def required(lines: list[str]) -> set[str]:
    """Return names of requirements without an extra."""
    plain = [line for line in lines if "extra ==" not in line]
    matches = [re.match(r"[\w.-]+", line) for line in plain]
    return {re.sub(r"[-_.]+", "-", name[0]).lower() for name in matches if name}


@pytest.mark.vllm
def test_every_import_is_declared_or_vllms():
    from vllm_tide.doctor.install import vllm_distribution

    vllm = vllm_distribution()
    assert vllm is not None
    whole = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text("utf-8"))
    ours = required(whole["project"]["dependencies"])
    optional = required(whole["project"]["optional-dependencies"]["report"])
    theirs = required(metadata.requires(vllm.name) or [])
    known = ours | optional | theirs | WITH_TORCH | {"vllm", "vllm-tide"}
    names = {
        name.split(".")[0]
        for _, _, name in imports()
        if name.split(".")[0] not in sys.stdlib_module_names
    }
    imported = {DISTRIBUTIONS.get(n, n).replace("_", "-").lower(): n for n in names}
    assert imported.keys() - known == set()
    # These run without vLLM: in `doctor`, `top`, `status` and `config`.
    assert {"packaging", "prometheus-client", "pyyaml", "pydantic"} <= ours


def test_light_packages_import_no_torch():
    wrong = [
        (file, name)
        for file, here, name in imports()
        if here in NO_TORCH and name.split(".")[0] == "torch"
    ]
    assert wrong == []


# Functions that turn foreign bytes into code: (owner, function), "" for builtins.
UNSAFE_CALLS = {
    ("", "eval"),
    ("", "exec"),
    ("", "__import__"),
    ("torch", "load"),
    ("np", "load"),
    ("numpy", "load"),
    ("yaml", "load"),
    ("yaml", "unsafe_load"),
    ("yaml", "full_load"),
    ("joblib", "load"),
    ("os", "system"),
}
UNSAFE_MODULES = {
    "pickle",
    "_pickle",
    "dill",
    "cloudpickle",
    "marshal",
    "shelve",
    "joblib",
}


def only_weights(node: ast.AST) -> bool:
    """Return whether a call has a literal `weights_only=True`: it builds tensors only.

    vLLM loads a draft that is stored as `.bin` in the same way.
    """
    return isinstance(node, ast.Call) and any(
        keyword.arg == "weights_only"
        and isinstance(keyword.value, ast.Constant)
        and keyword.value.value is True
        for keyword in node.keywords
    )


def unsafe(tree: ast.AST) -> list[str]:
    result = []
    safe = [node.func for node in ast.walk(tree) if only_weights(node)]
    for node in ast.walk(tree):
        if node in safe and ast.unparse(node) == "torch.load":
            continue
        if isinstance(node, ast.Name) and ("", node.id) in UNSAFE_CALLS:
            result.append(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if (node.value.id, node.attr) in UNSAFE_CALLS:
                result.append(f"{node.value.id}.{node.attr}")
        elif isinstance(node, ast.ImportFrom):
            names = {(node.module, alias.name) for alias in node.names}
            result += [f"{a}.{b}" for a, b in names & UNSAFE_CALLS]
        elif isinstance(node, ast.keyword) and node.arg in ("allow_pickle", "shell"):
            result.append(str(node.arg))
    return result


def test_no_foreign_bytes_become_code():
    wrong = [
        (str(file), name) for file, tree in sources().items() for name in unsafe(tree)
    ]
    wrong += [
        (file, name)
        for file, _, name in imports()
        if name.split(".")[0] in UNSAFE_MODULES
    ]
    assert wrong == []


@pytest.mark.parametrize(
    "line",
    [
        "eval(text)",
        "call = exec",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "torch.load(path, weights_only=flag)",
        "np.load(path, weights_only=True)",
        "from torch import load",
        "yaml.load(text)",
        "np.load(path, allow_pickle=True)",
        "subprocess.run(text, shell=True)",
    ],
)
def test_the_lint_detects_violations(line):
    assert unsafe(ast.parse(line))


def test_the_lint_accepts_a_load_of_tensors():
    assert not unsafe(ast.parse("torch.load(path, mmap=True, weights_only=True)"))
