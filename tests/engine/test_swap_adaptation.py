"""Fast drafts: low-rank changes of a base, which keep its estimates."""

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
from tests.engine.shared_engine import on_wire
from tests.engine.test_control_v2 import begun
from vllm_tide.capture.guard import Guard
from vllm_tide.config import TideConfig
from vllm_tide.draft import (
    delta,
)
from vllm_tide.engine import swapper as module
from vllm_tide.engine.scheduler import SchedulerTide
from vllm_tide.engine.worker import WorkerTide
from vllm_tide.engine.worker_v2 import WorkerTideV2
from vllm_tide.transport.weights import WeightsSegment, WeightsWriter

ROWS = 96


def draft(seed: int = 0) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {
        "fc.weight": torch.randn(ROWS, ROWS, generator=random).bfloat16(),
        "norm.weight": torch.ones(ROWS, dtype=torch.bfloat16),
    }


def changed(base: dict[str, torch.Tensor], by: float) -> dict[str, torch.Tensor]:
    """Return a publication of `base` with `by` more in each entry of its matrix."""
    masters = {name: tensor.float() for name, tensor in base.items()}
    fast = masters | {"fc.weight": masters["fc.weight"] + by}
    factors = delta.factors(masters, fast, rank=2)
    assert set(factors) == {"fc.weight.u", "fc.weight.v"}
    return factors


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

    def stage(self, tensors: dict[str, torch.Tensor], **meta: Any) -> int:
        version = self.writer.latest_version + 1
        received = on_wire(tensors)
        self.writer.publish(
            received, version=version, parent_version=version - 1, meta=meta
        )
        self.made.stager.check_now()
        return version

    def stage_fast(self, by: float, base: dict[str, torch.Tensor], over: int) -> int:
        meta = {
            "adaptation": {"base": over},
            "delta": {"base": delta.fingerprint(base)},
        }
        return self.stage(changed(base, by), **meta)

    def state(self) -> tuple[int, int, dict[str, int]]:
        return self.made.version, self.made.base, dict(self.made.stager.refused)

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


def test_a_new_base_replaces_the_old_one(swaps):
    made, other = swaps.made, draft(1)
    made.install_ordered(swaps.stage_fast(0.5, swaps.base, 0))
    made.install_ordered(swaps.stage(other))
    assert swaps.state() == (2, 2, {}) and swaps.serves(other)
    assert not made.stager.staged_fast
    made.install_ordered(swaps.stage_fast(0.5, other, 2))
    assert swaps.state() == (3, 2, {})
    fast = swaps.served
    assert swaps.serves(delta.apply(other, changed(other, 0.5)))
    # A change of the old base is refused, and serving is unaffected.
    swaps.stage_fast(0.5, swaps.base, 0)
    assert made.ready_version() == 0
    assert swaps.state() == (3, 2, {"base": 1}) and swaps.served is fast
    made.report()
    feedback = swaps.writer.feedback()
    assert (feedback.installed_version, feedback.refused_version) == (3, 4)
    assert feedback.refused_reason == "base"


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"fc.weight.u": torch.ones(ROWS, 3)}, "change"),
        ({"norm.weight": torch.full((ROWS,), torch.inf)}, "change"),
        ({"norm.weight": torch.full((ROWS,), 1e6)}, "norm"),
        ({"lm_head.weight": torch.ones(3, 3)}, "change"),
    ],
)
def test_an_invalid_change_is_refused(swaps, wrong, reason):
    mark = {"base": delta.fingerprint(swaps.base)}
    factors = changed(swaps.base, 0.5) | wrong
    swaps.stage(factors, adaptation={"base": 0}, delta=mark)
    assert swaps.state() == (0, 0, {reason: 1}) and swaps.made.ready_version() == 0


def test_a_failing_fast_draft_leaves_the_last_good_one_and_its_base(swaps):
    made = swaps.made
    made.install_ordered(swaps.stage(draft(1)))
    swaps.fails = [True]
    made.install_ordered(swaps.stage_fast(0.5, draft(1), 1))
    assert swaps.state() == (1, 1, {"install": 1}) and swaps.serves(draft(1))
    made.install_ordered(swaps.stage_fast(0.5, draft(1), 1))
    assert swaps.state() == (3, 1, {"install": 1})


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
        tide._install_ordered({"install": swaps.stage_fast(by, swaps.base, 0)})
        assert tide._draft_since > before  # though it is another draft
    assert swaps.state()[:2] == (2, 0)
    assert evidence() == learnt and np.array_equal(
        policy.acceptance.requests.value, level
    )
    tide._install_ordered({"install": swaps.stage(draft(1))})
    assert evidence() < 0.5 * learnt and not np.any(policy.acceptance.requests.value)
    learnt = evidence()
    tide._install_ordered({"install": swaps.stage_fast(0.5, draft(1), 3)})
    assert swaps.state()[:2] == (4, 3) and evidence() == learnt


def test_adaptive_verification_keys_on_the_base(swaps):
    tide = worker(WorkerTideV2, swaps)
    seen: list[int] = []
    tide._verification = SimpleNamespace(
        begin_step=lambda step, base: seen.append(base)
    )
    tide._steps, tide._log = Guard("steps"), SimpleNamespace(begin=lambda ended: False)
    tide.control = None
    for version in (swaps.stage(draft(1)), None):
        order = {"install": version or swaps.stage_fast(0.5, draft(1), 1)}
        tide.begin_step(
            SimpleNamespace(
                num_scheduled_tokens={},
                tide=order,
                finished_req_ids=(),
                scheduled_new_reqs=[],
            )
        )
    assert seen == [1, 1] and swaps.made.version == 2


def test_cached_prefixes_become_old_by_bases_alone():
    """A scan of all blocks takes long, and a fast draft comes every few seconds."""
    scheduler = idle_scheduler()
    tide = SchedulerTide(3, scheduler, TideConfig())
    block = SimpleNamespace(block_id=0, block_hash="hash")
    scheduler.kv_cache_manager.block_pool.blocks.append(block)
    new = SimpleNamespace(num_computed_tokens=9, block_ids=[[0]])
    tide.observe({"staged": 1, "staged_fast": True})
    assert tide.control() == {"install": 1}
    assert tide._prefix(new, 10) == "most"
    tide.observe({"staged": 2, "staged_fast": False})
    assert tide.control() == {"install": 2}
    assert tide._prefix(new, 10) == "most_old"
