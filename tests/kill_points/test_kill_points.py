"""Each operation of each protocol killed once, and failed once in each way.

Nightly all points; in the default tier a few of each protocol, always the same ones.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest

from tests.kill_points import memory, run_dir, spool, train
from tests.kill_points.points import Point, Protocol, points_of, violation
from tests.transport.spool_toys import small_shards
from vllm_tide.transport.shm import SHM_DIR

__all__ = ["small_shards"]

PROTOCOLS = [
    *(*run_dir.PROTOCOLS, *memory.PROTOCOLS),
    *(*spool.PROTOCOLS, *train.PROTOCOLS),
]
LEAST = 1000
SAMPLE = 2


@pytest.fixture
def folder():
    # In memory: a killed process loses nothing that it gave to the system.
    made = Path(tempfile.mkdtemp(prefix="kill_points_", dir=SHM_DIR))
    yield made / "world"
    shutil.rmtree(made)


def violations(kind: type[Protocol], folder: Path, points: list[Point]) -> list[str]:
    return [text for point in points if (text := violation(kind, folder, point))]


@pytest.mark.slow
@pytest.mark.parametrize("kind", PROTOCOLS, ids=lambda kind: kind.__name__)
def test_some_points_of_each_protocol(kind, folder):
    points = points_of(kind, folder)
    step = max(1, len(points) // SAMPLE)
    assert violations(kind, folder, points[step // 2 :: step]) == []


@pytest.mark.nightly
@pytest.mark.timeout(1800)  # some protocols have hundreds of points that load Torch
@pytest.mark.parametrize("kind", PROTOCOLS, ids=lambda kind: kind.__name__)
def test_every_point_of_each_protocol(kind, folder):
    assert violations(kind, folder, points_of(kind, folder)) == []


@pytest.mark.nightly
def test_there_are_a_thousand_points(folder):
    numbers = {kind.__name__: len(points_of(kind, folder)) for kind in PROTOCOLS}
    assert sum(numbers.values()) >= LEAST, numbers
