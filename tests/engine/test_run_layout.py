"""Parts of a run of staging memory do not touch, and hold what `pack_rows` packs."""

from __future__ import annotations

import pytest
import torch

from vllm_tide.engine.device_stage import RunLayout
from vllm_tide.kernels.pack_rows import pack_rows


@pytest.mark.parametrize("num_aux", [2, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("hidden", "logits"), [(True, 3), (False, 2), (True, 0)])
def test_parts_do_not_touch(num_aux, dtype, hidden, logits):
    layout = RunLayout(5, logits, num_aux, 6, dtype, hidden, 4)
    run = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    parts = [layout.features(run)]
    if hidden:
        parts.append(layout.hidden_states(run))
    else:
        assert layout.hidden_states(run) is None
    if logits:
        parts += layout.top(run)
        assert parts[-3].shape == parts[-2].shape == (logits, 4)
    else:
        assert layout.top(run) is None
    assert parts[0].shape == (5, 6 * num_aux) and parts[0].dtype == dtype
    for i, part in enumerate(parts):
        part.fill_(i + 1)
    for i, part in enumerate(parts):
        assert bool((part == i + 1).all())
        assert part.data_ptr() % 16 == 0 and part.is_contiguous()


def test_the_features_are_those_that_are_packed():
    layout = RunLayout(4, 2, 3, 8, torch.bfloat16, True, 4)
    run = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    layers = [torch.randn(4, 8).bfloat16() for _ in range(3)]
    pack_rows(layers, torch.arange(4, dtype=torch.int32), layout.features(run))
    assert torch.equal(layout.features(run), torch.cat(layers, dim=1))
    assert not layout.hidden_states(run).any()
