"""Trains in float32, so that small numbers can be compared; spools in small shards."""

import pytest
import torch

from tests.transport.spool_toys import small_shards
from vllm_tide.train import step

__all__ = ["small_shards"]


@pytest.fixture(autouse=True, scope="module")
def in_float32():
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(step, "COMPUTE_DTYPE", torch.float32)
        yield
