"""The synthetic vLLM that the tests of the patch tool change."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.patches.world import World


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> World:
    made = World(tmp_path_factory.mktemp("world"))
    made.write_series(
        {"a.py": {5: "one\nand more\n"}, "b.py": {1: "first\n", 40: "last\n"}},
        {"a.py": {9: "two, on top of one\n"}},
    )
    return made


@pytest.fixture
def world(made_once: World, tmp_path: Path) -> World:
    return made_once.copied(tmp_path)
