"""Train in float32, so that small numbers can be compared."""

import pytest
import torch

from vllm_tide.train import step


@pytest.fixture(autouse=True, scope="module")
def in_float32():
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(step, "COMPUTE_DTYPE", torch.float32)
        yield
