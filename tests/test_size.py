"""A guide to the size of the package: lines, files, classes and constants.

A number may fall in any commit. It may rise if the commit's body gives the
reason. `python tests/test_size.py` prints today's numbers.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "vllm_tide"
# Lines of each package; "." are the modules of vllm_tide itself.
LINES = {
    ".": 2_266,
    "capture": 1_203,
    "cli": 1_700,
    "control": 2_030,
    "dashboards": 69,
    "deploy": 2_545,
    "doctor": 975,
    "draft": 3_687,
    "engine": 6_861,
    "examples": 1,
    "kernels": 1_490,
    "memory": 292,
    "plan": 552,
    "sidecar": 857,
    "top": 780,
    "train": 4_397,
    "transport": 5_478,
}
MAX_FILE_LINES = 550
MAX_ATTRIBUTES = 20
# Classes with more attributes than MAX_ATTRIBUTES.
EXCEPTIONS = {
    "capture.step.Step": 32,
    "config.TrainConfig": 22,
    "deploy.deployment.Deployment": 22,
    "deploy.fast_draft.FastDraft": 23,
    "engine.control_v1.ControlV1": 32,
    "engine.control_v2.ControlV2": 26,
    "engine.worker.WorkerTide": 27,
    "sidecar.loop.Sidecar": 24,
    "sidecar.report.TrainerStatus": 36,
    "train.trainer.Trainer": 34,
    "transport.record.Record": 21,
    "transport.rendezvous.EngineManifest": 22,
}
KNOBS = 51
CONTROL_CONSTANTS = 41


def package_of(path: Path) -> str:
    """Return the first folder below the package, or "." for its direct modules."""
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else "."


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def num_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def lines_per_package() -> Counter[str]:
    lines: Counter[str] = Counter()
    for path in sources():
        lines[package_of(path)] += num_lines(path)
    return lines


def attributes(node: ast.ClassDef) -> set[str]:
    """Return the names that methods assign on `self`, and the annotated fields."""
    names = {
        item.target.id
        for item in node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }
    for item in ast.walk(node):
        if (
            isinstance(item, ast.Attribute)
            and isinstance(item.ctx, ast.Store)
            and isinstance(item.value, ast.Name)
            and item.value.id == "self"
        ):
            names.add(item.attr)
    return names


def attributes_per_class() -> dict[str, int]:
    """Return the number of attributes of each class that has more than allowed."""
    counts = {}
    for path in sources():
        module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.ClassDef):
                number = len(attributes(node))
                if number > MAX_ATTRIBUTES:
                    counts[f"{module}.{node.name}"] = number
    return counts


def is_number(node: ast.expr | None) -> bool:
    return any(
        isinstance(item, ast.Constant)
        and isinstance(item.value, int | float)
        and not isinstance(item.value, bool)
        for item in (ast.walk(node) if node is not None else ())
    )


def constants(package: Path) -> list[str]:
    """Return the names of the numeric module-level constants of a package."""
    names = []
    for path in sorted(package.rglob("*.py")):
        for node in ast.parse(path.read_bytes()).body:
            if isinstance(node, ast.Assign) and is_number(node.value):
                targets = node.targets
            elif isinstance(node, ast.AnnAssign) and is_number(node.value):
                targets = [node.target]
            else:
                continue
            for target in targets:
                items = target.elts if isinstance(target, ast.Tuple) else [target]
                names += [item.id for item in items if isinstance(item, ast.Name)]
    return [name for name in names if name.isupper() or name.lstrip("_").isupper()]


def num_knobs(model: Any) -> int:
    """Return the number of settings of a configuration, with those of its sections."""
    return sum(
        num_knobs(field.annotation) if hasattr(field.annotation, "model_fields") else 1
        for field in model.model_fields.values()
    )


@pytest.mark.parametrize("package", LINES)
def test_a_package_has_at_most_as_many_lines(package):
    assert lines_per_package()[package] <= LINES[package]


def test_every_package_has_a_number():
    assert set(lines_per_package()) == set(LINES)


def test_a_file_has_at_most_550_lines():
    assert {str(p): n for p in sources() if (n := num_lines(p)) > MAX_FILE_LINES} == {}


def test_a_class_has_at_most_twenty_attributes():
    grown = {
        name: number
        for name, number in attributes_per_class().items()
        if number > EXCEPTIONS.get(name, MAX_ATTRIBUTES)
    }
    assert grown == {}


def test_the_number_of_knobs():
    from vllm_tide.config import TideConfig

    assert num_knobs(TideConfig) <= KNOBS


def test_the_number_of_constants_in_control():
    assert len(constants(PACKAGE / "control")) <= CONTROL_CONSTANTS


def main() -> None:
    """Print today's numbers in the form of this module."""
    sys.path.insert(0, str(ROOT))
    from vllm_tide.config import TideConfig

    lines = lines_per_package()
    print("LINES = {")
    for package in sorted(lines):
        print(f'    "{package}": {lines[package]:_},')
    print("}\nEXCEPTIONS = {")
    for name, number in sorted(attributes_per_class().items()):
        print(f'    "{name}": {number},')
    print(f"}}\nKNOBS = {num_knobs(TideConfig)}")
    print(f"CONTROL_CONSTANTS = {len(constants(PACKAGE / 'control'))}")
    print(f"# {sum(lines.values()):_} lines in {len(sources())} files")


if __name__ == "__main__":
    main()
