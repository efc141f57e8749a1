"""The package's size may shrink. A limit below is raised only with a reason.

`python tests/test_size.py` prints the numbers.
"""

from __future__ import annotations

import ast
import sys
import tokenize
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
LIMITS = {
    "lines": 38_657,
    "code tokens": 228_554,
    "files": 163,
    "classes": 299,
    "knobs": 52,
    "lines of the longest file": 538,
}
NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def docstrings(tree: ast.Module) -> set[tuple[int, int]]:
    """Places of docstrings: strings that are statements, those of attributes too."""
    return {
        (node.lineno, node.col_offset)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    }


def code_tokens(path: Path) -> int:
    """Number of tokens that are neither layout, comment nor docstring."""
    left_out = docstrings(ast.parse(path.read_bytes()))
    with tokenize.open(path) as file:
        tokens = list(tokenize.generate_tokens(file.readline))
    return sum(
        token.type not in NOT_CODE
        and not (token.type == tokenize.STRING and token.start in left_out)
        for token in tokens
    )


def knobs(model: Any) -> int:
    """Number of settings of a configuration, those of its sections too."""
    return sum(
        knobs(field.annotation) if hasattr(field.annotation, "model_fields") else 1
        for field in model.model_fields.values()
    )


def measure() -> dict[str, int]:
    """What `LIMITS` limits."""
    from vllm_tide.config import TideConfig

    paths = sorted((ROOT / "vllm_tide").rglob("*.py"))
    lines = [len(path.read_text(encoding="utf-8").splitlines()) for path in paths]
    nodes = [node for p in paths for node in ast.walk(ast.parse(p.read_bytes()))]
    return {
        "lines": sum(lines),
        "code tokens": sum(code_tokens(path) for path in paths),
        "files": len(paths),
        "classes": sum(isinstance(node, ast.ClassDef) for node in nodes),
        "knobs": knobs(TideConfig),
        "lines of the longest file": max(lines),
    }


@pytest.fixture(scope="module")
def size() -> dict[str, int]:
    return measure()


@pytest.mark.parametrize("name", LIMITS)
def test_the_package_does_not_grow(size, name):
    assert size[name] <= LIMITS[name]


def test_comments_and_docstrings_are_no_code(tmp_path):
    path = tmp_path / "code.py"
    path.write_text('"""Says."""\n\n# Why.\nx = "é"  # so\n"""Of x."""\n')
    assert code_tokens(path) == 3


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    for name, number in measure().items():
        print(f"{name:26} {number:8,} of {LIMITS[name]:8,}")
