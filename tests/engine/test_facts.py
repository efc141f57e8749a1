"""Properties of the served models, and of the GPUs of all ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm_tide.engine import facts, worker_v2

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize(
    ("size", "expected"), [(1, ["GPU-b"]), (2, ["GPU-a", "GPU-b"])]
)
def test_the_gpus_of_all_ranks_are_reported(
    size: int, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    group = SimpleNamespace(world_size=size, cpu_group=None)
    monkeypatch.setattr("vllm.distributed.get_tp_group", lambda: group)
    monkeypatch.setattr(facts, "gpu_uuid", lambda _: "GPU-b")

    def gather(into: list[Any], own: str, group: Any) -> None:
        into[:] = [own, "GPU-a"]

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    assert facts._gpus_of_ranks(torch.device("cpu")) == expected


@pytest.mark.parametrize(
    ("device", "asynchronous", "adaptive", "trims"),
    [
        ("cpu", False, False, True),
        ("cpu", True, False, False),
        ("cpu", False, True, False),
        ("cuda", False, False, False),
    ],
)
def test_drafts_are_cut_on_the_host_only_where_a_step_has_landed(
    device: str,
    asynchronous: bool,
    adaptive: bool,
    trims: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm_tide.config import TideConfig

    monkeypatch.setattr(worker_v2, "EventTimer", lambda _: None)
    tide = object.__new__(worker_v2.WorkerTideV2)
    tide._config = TideConfig.model_validate({})
    tide._async, tide._adaptive, tide._leader = asynchronous, adaptive, False
    tide.max_steps = 1
    tide._runner = SimpleNamespace(
        max_num_reqs=2,
        max_model_len=64,
        num_speculative_steps=3,
        device=torch.device(device),
    )
    tide._open_control(None)
    assert tide.control is not None and tide.control.trims is trims
    assert tide.control.cut_on_device is adaptive


def test_a_reload_of_the_targets_weights_is_refused() -> None:
    from vllm.v1.worker.gpu_worker import Worker

    worker = object.__new__(Worker)
    worker.tide = object.__new__(worker_v2.WorkerTideV2)
    with pytest.raises(RuntimeError, match="tide: reload_weights is not supported"):
        worker.reload_weights()
