"""Fast drafts: steps over a base, which keep its estimates."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.control.test_adaspec import EASY, adaspec, world
from tests.engine.idle_scheduler import idle_scheduler
from tests.engine.test_control_v2 import begun
from vllm_tide.capture.guard import Guard
from vllm_tide.config import TideConfig
from vllm_tide.draft.tensor_bytes import to_bytes
from vllm_tide.engine import swapper as module
from vllm_tide.engine.scheduler import SchedulerTide
from vllm_tide.engine.worker import WorkerTide
from vllm_tide.engine.worker_v2 import WorkerTideV2
from vllm_tide.transport.draft_weights import DraftWeights
from vllm_tide.transport.versions import (
    first_version,
    next_step,
    number_of,
    version_name,
)
from vllm_tide.transport.weights import WeightsSegment, WeightsWriter

ROWS = 96


def draft(seed: int = 0) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {
        "fc.weight": torch.randn(ROWS, ROWS, generator=random).bfloat16(),
        "norm.weight": torch.ones(ROWS, dtype=torch.bfloat16),
    }


def changed(base: dict[str, torch.Tensor], by: float) -> dict[str, torch.Tensor]:
    """Return `base` with `by` more in each entry of its matrix."""
    return base | {"fc.weight": base["fc.weight"] + by}


class Swaps:
    """A real swapper between a real segment and a model that accepts everything.

    Attributes:
        served: What was loaded into the model last.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.base, self.served = draft(), draft()
        self.fails: list[bool] = []
        monkeypatch.setattr(module, "install", self._install)
        monkeypatch.setattr(module, "verify_installed", lambda *_: None)
        monkeypatch.setattr(module, "overflow_check", lambda *_: None)
        # The target's tensor, as checkpoints may contain one: never published.
        monkeypatch.setattr(module, "shared_with_target", lambda *_: {"lm_head.weight"})
        more = {"lm_head.weight": torch.ones(3, 3), "t2d": torch.ones(3)}
        save_file(self.base | more, folder / "model.safetensors")
        self.segment = WeightsSegment.create(1 << 18)
        self.writer = WeightsWriter.attach(self.segment.name)
        model = SimpleNamespace(get_vocab_size=lambda: 64)
        self.made = module.Swapper(
            torch.nn.Linear(1, 1),
            torch.nn.Linear(1, 1),
            SimpleNamespace(model_config=model),
            folder,
            self.segment,
        )

    def _install(self, _draft: Any, _config: Any, tensors: Any, _shared: Any) -> None:
        if self.fails and self.fails.pop():
            raise RuntimeError("half loaded")
        self.served = dict(tensors)

    def stage(self, tensors: dict[str, torch.Tensor], *, fast: bool = False) -> int:
        latest = self.writer.latest_version
        version = next_step(latest, fast=True) if fast else None
        version = version or first_version(number_of(latest) + 1)
        self.writer.publish(DraftWeights.encode(to_bytes(tensors), version))
        self.made.stager.check_now()
        return version

    def state(self) -> tuple[str, dict[str, int]]:
        return version_name(self.made.version), dict(self.made.stager.refused)

    def serves(self, tensors: dict[str, torch.Tensor]) -> bool:
        same = [torch.equal(self.served[name], t) for name, t in tensors.items()]
        return self.served.keys() == tensors.keys() and all(same)

    def close(self) -> None:
        self.writer.close()
        self.segment.close()


@pytest.fixture
def swaps(tmp_path, monkeypatch):
    made = Swaps(tmp_path, monkeypatch)
    yield made
    made.close()


def test_fast_drafts_are_steps_over_their_base(swaps):
    made, other = swaps.made, draft(1)
    fast = changed(swaps.base, 0.5)
    made.install_ordered(swaps.stage(fast, fast=True))
    assert swaps.state() == ("0.1", {}) and swaps.serves(fast) and made.number == 0
    made.install_ordered(swaps.stage(other))
    assert swaps.state() == ("1", {}) and swaps.serves(other)
    made.install_ordered(swaps.stage(changed(other, 0.5), fast=True))
    assert swaps.state() == ("1.1", {}) and made.number == 1
    # A bad one is refused, and serving is unaffected.
    wrong = other | {"norm.weight": torch.full((ROWS,), torch.inf)}
    refused = swaps.stage(wrong, fast=True)
    assert made.ready_version() == 0
    assert swaps.state() == ("1.1", {"not_finite": 1})
    assert swaps.serves(changed(other, 0.5))
    made.report()
    feedback = swaps.writer.feedback()
    assert feedback.installed_version == made.version
    assert (feedback.refused_version, feedback.refused_reason) == (
        refused,
        "not_finite",
    )


def test_a_failing_fast_draft_leaves_the_last_good_one_and_its_base(swaps):
    made = swaps.made
    made.install_ordered(swaps.stage(draft(1)))
    swaps.fails = [True]
    made.install_ordered(swaps.stage(changed(draft(1), 0.5), fast=True))
    assert swaps.state() == ("1", {"install": 1}) and swaps.serves(draft(1))
    made.install_ordered(swaps.stage(changed(draft(1), 0.5), fast=True))
    assert swaps.state() == ("1.3", {"install": 1})


def worker(kind: type[Any], swaps: Swaps) -> Any:
    """The worker's part of TIDE with a swapper and control alone."""
    tide = object.__new__(kind)
    tide.swapper, tide.control, tide.capture = swaps.made, begun(), None
    tide._guard, tide._draft_since, tide._verification = Guard("capture"), 0.0, None
    return tide


def test_fast_drafts_keep_the_estimates_and_other_drafts_do_not(swaps):
    tide = worker(WorkerTide, swaps)
    policy = tide.control.policy = adaspec(8, "gpt-oss-120b")
    world(8, "gpt-oss-120b", EASY).run(policy, 200)

    def evidence() -> float:
        return float(policy.acceptance._counts[:, 0].sum())

    learnt, level = evidence(), policy.acceptance.requests.value.copy()
    assert learnt > 100 and np.any(level != 0)
    for by in (0.5, 0.6):
        before = tide._draft_since
        tide._install_ordered(
            {"install": swaps.stage(changed(swaps.base, by), fast=True)}
        )
        assert tide._draft_since > before  # though it is another draft
    assert swaps.state()[0] == "0.3"
    assert evidence() == learnt and np.array_equal(
        policy.acceptance.requests.value, level
    )
    tide._install_ordered({"install": swaps.stage(draft(1))})
    assert evidence() < 0.5 * learnt and not np.any(policy.acceptance.requests.value)
    learnt = evidence()
    fast = swaps.stage(changed(draft(1), 0.5), fast=True)
    tide._install_ordered({"install": fast})
    assert swaps.state()[0] == "1.1" and evidence() == learnt


def test_adaptive_verification_keys_on_the_base(swaps):
    tide = worker(WorkerTideV2, swaps)
    seen: list[int] = []
    tide._verification = SimpleNamespace(
        begin_step=lambda step, base: seen.append(base)
    )
    tide._steps, tide._log = Guard("steps"), SimpleNamespace(begin=lambda ended: False)
    tide.control = None
    for fast in (False, True):
        order = {"install": swaps.stage(draft(1), fast=fast)}
        tide.begin_step(
            SimpleNamespace(
                num_scheduled_tokens={},
                tide=order,
                finished_req_ids=(),
                scheduled_new_reqs=[],
            )
        )
    assert seen == [1, 1] and swaps.state()[0] == "1.1"


def test_cached_prefixes_become_old_by_bases_alone():
    """A scan of all blocks takes long, and a fast draft comes every few seconds."""
    scheduler = idle_scheduler()
    tide = SchedulerTide(3, scheduler, TideConfig())
    block = SimpleNamespace(block_id=0, block_hash="hash")
    scheduler.kv_cache_manager.block_pool.blocks.append(block)
    new = SimpleNamespace(num_computed_tokens=9, block_ids=[[0]])
    for step in (1, 2):  # a fast draft, and its base again
        tide.observe({"staged": step})
        assert tide.control() == {"install": step}
        assert tide._prefix(new, 10) == "most"
    base = first_version(1)
    tide.observe({"staged": base})
    assert tide.control() == {"install": base}
    assert tide._prefix(new, 10) == "most_old"
