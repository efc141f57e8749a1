"""Engines that come and go leave little behind; none of them loads a model."""

import asyncio
import random
from types import SimpleNamespace

import pytest

from tests.faults import starts
from tests.faults.scene import NotRecovered
from tests.transport.test_rendezvous import make_manifest


def storm(tmp_path):
    scene = SimpleNamespace(
        places=SimpleNamespace(work=tmp_path),
        manifest=make_manifest,
        struck=lambda: None,
    )
    asyncio.run(starts.restart_storm(scene, random.Random(1)))


@pytest.mark.timeout(600)
def test_a_storm_of_starts_leaves_little(tmp_path, monkeypatch):
    monkeypatch.setattr(starts, "ENGINES", 20)
    storm(tmp_path)
    monkeypatch.setattr(starts, "reclaim_orphans", lambda run: [])
    monkeypatch.setattr(starts, "KEPT", 1)
    with pytest.raises(NotRecovered, match="20 engines left"):
        storm(tmp_path)
