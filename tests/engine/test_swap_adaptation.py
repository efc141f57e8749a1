"""Fast drafts: changes of a base are made whole, and what was learnt of it is kept."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
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
from tests.engine.test_swap import on_wire
from tests.train.toys import VOCAB, ToyTarget, config
from tests.transport.samples import make_spec
from vllm_tide.capture.guard import Guard
from vllm_tide.config import SpoolConfig, TideConfig
from vllm_tide.draft import (
    Eagle3Draft,
    VocabMap,
    delta,
    export_tensors,
    load_draft,
    save_draft,
)
from vllm_tide.engine import swapper as module
from vllm_tide.engine import trainer_process
from vllm_tide.engine.scheduler import SchedulerTide
from vllm_tide.engine.trainer_process import TrainerProcess
from vllm_tide.engine.worker import WorkerTide
from vllm_tide.engine.worker_v2 import WorkerTideV2
from vllm_tide.transport.ring import RingWriter
from vllm_tide.transport.shm import SHM_DIR
from vllm_tide.transport.weights import WeightsSegment, WeightsWriter

ROWS = 96


def draft(seed: int = 0) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {
        "fc.weight": torch.randn(ROWS, ROWS, generator=random).bfloat16(),
        "norm.weight": torch.ones(ROWS, dtype=torch.bfloat16),
    }


def changed(base: dict[str, torch.Tensor], by: float) -> dict[str, torch.Tensor]:
    """What is published of `base`, with `by` more in each place of its matrix."""
    held = {name: tensor.float() for name, tensor in base.items()}
    fast = held | {"fc.weight": held["fc.weight"] + by}
    told = delta.factors(held, fast, rank=2)
    assert set(told) == {"fc.weight.u", "fc.weight.v"}
    return told


class Swaps:
    """A real swapper between a real segment and a model that takes everything.

    Attributes:
        served: What was loaded into the model last.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.base, self.served = draft(), draft()
        self.fails: list[bool] = []
        monkeypatch.setattr(module, "install", self._install)
        monkeypatch.setattr(module, "verify_installed", lambda *_: None)
        # A tensor that is the target's, as checkpoints may hold one: never published.
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
        told = on_wire(tensors)
        self.writer.publish(
            told, version=version, parent_version=version - 1, meta=meta
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


def test_trainer_and_engine_give_a_stored_draft_one_name(tmp_path):
    kept = VocabMap.from_target_ids(torch.arange(3, 43), VOCAB)
    toy = ToyTarget()
    made = Eagle3Draft.initialise(
        config(draft_vocab_size=40), toy.embed, toy.head, kept
    )
    save_draft(made, tmp_path, torch.bfloat16)
    trained = export_tensors(load_draft(tmp_path, toy.rows), stored_names=True)
    assert "d2t" in trained
    stored = module.checkpoint_tensors(tmp_path)
    assert delta.fingerprint(trained) == delta.fingerprint(stored)


def test_changes_are_of_the_base_not_of_what_is_served(swaps):
    made, base = swaps.made, swaps.base
    held = made.stager.base
    assert not vars(held).keys() & {"tensors", "fingerprint"}  # off costs no reading
    for version, by in enumerate((0.5, 2.0), 1):
        assert swaps.stage_fast(by, base, 0) == version
        assert made.stager.staged_fast
        made.install_ordered(version)
        assert swaps.state() == (version, 0, {})
        want = delta.apply(base, changed(base, by))
        assert swaps.serves(want) and want["fc.weight"].dtype == torch.bfloat16
        assert abs((want["fc.weight"] - base["fc.weight"]).mean().item() - by) < 0.01
    # The base again: nothing is changed of it.
    mark = {"base": delta.fingerprint(base)}
    made.install_ordered(swaps.stage({}, adaptation={"base": 0}, delta=mark))
    assert swaps.state() == (3, 0, {}) and swaps.serves(base)
    assert made.stager.base is held


def test_a_new_base_takes_the_place_of_the_old_one(swaps):
    made, other = swaps.made, draft(1)
    made.install_ordered(swaps.stage_fast(0.5, swaps.base, 0))
    made.install_ordered(swaps.stage(other))
    assert swaps.state() == (2, 2, {}) and swaps.serves(other)
    assert not made.stager.staged_fast
    made.install_ordered(swaps.stage_fast(0.5, other, 2))
    assert swaps.state() == (3, 2, {})
    fast = swaps.served
    assert swaps.serves(delta.apply(other, changed(other, 0.5)))
    # Of the old one: refused, and what is served is served on.
    swaps.stage_fast(0.5, swaps.base, 0)
    assert made.ready_version() == 0
    assert swaps.state() == (3, 2, {"base": 1}) and swaps.served is fast
    made.report()
    feedback = swaps.writer.feedback()
    assert (feedback.installed_version, feedback.refused_version) == (3, 4)
    assert feedback.refused_reason == "base"


def test_a_fast_draft_of_whole_tensors_needs_no_base(swaps):
    made = swaps.made
    made.install_ordered(swaps.stage(draft(1), adaptation={"base": 0}))
    assert swaps.state() == (1, 0, {}) and swaps.serves(draft(1))
    # It is no base: changes are of the one that it stands on.
    made.install_ordered(swaps.stage_fast(0.5, swaps.base, 0))
    assert swaps.state() == (2, 0, {})
    swaps.stage_fast(0.5, draft(1), 0)
    assert swaps.state() == (2, 0, {"base": 1})


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"fc.weight.u": torch.ones(ROWS, 3)}, "change"),
        ({"norm.weight": torch.full((ROWS,), torch.inf)}, "change"),
        ({"norm.weight": torch.full((ROWS,), 1e6)}, "norm"),
        ({"lm_head.weight": torch.ones(3, 3)}, "change"),
    ],
)
def test_a_change_that_cannot_be_served_is_refused(swaps, wrong, reason):
    mark = {"base": delta.fingerprint(swaps.base)}
    told = changed(swaps.base, 0.5) | wrong
    swaps.stage(told, adaptation={"base": 0}, delta=mark)
    assert swaps.state() == (0, 0, {reason: 1}) and swaps.made.ready_version() == 0


def test_a_fast_draft_that_fails_leaves_the_last_good_one_and_its_base(swaps):
    made = swaps.made
    made.install_ordered(swaps.stage(draft(1)))
    swaps.fails = [True]
    made.install_ordered(swaps.stage_fast(0.5, draft(1), 1))
    assert swaps.state() == (1, 1, {"install": 1}) and swaps.serves(draft(1))
    made.install_ordered(swaps.stage_fast(0.5, draft(1), 1))
    assert swaps.state() == (3, 1, {"install": 1})


def test_the_log_tells_of_bases(swaps, caplog):
    caplog.set_level(logging.DEBUG, "vllm.tide")
    swaps.made.install_ordered(swaps.stage(draft(1)))
    swaps.made.install_ordered(swaps.stage_fast(0.5, draft(1), 1))
    told = [(r.levelname, r.message[:25]) for r in caplog.records]
    assert told == [
        ("INFO", "vllm_tide: draft 1 is liv"),
        ("DEBUG", "vllm_tide: draft 2 is liv"),
    ]


def worker(kind: type[Any], swaps: Swaps) -> Any:
    """A worker's part of TIDE with a swapper and control, nothing else."""
    tide = object.__new__(kind)
    tide.swapper, tide.control, tide.capture = swaps.made, begun(), None
    tide._guard, tide._draft_since, tide._verification = Guard("capture"), 0.0, None
    return tide


def test_calibration_is_kept_by_fast_drafts_and_not_by_others(swaps):
    tide = worker(WorkerTide, swaps)
    policy = tide.control.policy = adaspec(8, "gpt-oss-120b")
    world(8, "gpt-oss-120b", EASY).run(policy, 200)

    def evidence() -> float:
        return float(policy.calibration._counts[0].sum())

    learnt, level = evidence(), policy.offsets.value.copy()
    assert learnt > 100 and np.any(level != 0)
    for by in (0.5, 0.6):
        before = tide._draft_since
        tide._install_ordered({"install": swaps.stage_fast(by, swaps.base, 0)})
        assert tide._draft_since > before  # it is another draft all the same
    assert swaps.state()[:2] == (2, 0)
    assert evidence() == learnt and np.array_equal(policy.offsets.value, level)
    tide._install_ordered({"install": swaps.stage(draft(1))})
    assert evidence() < 0.5 * learnt and not np.any(policy.offsets.value)
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


def test_cached_prefixes_are_old_by_bases_alone():
    """Looking at all blocks takes long, and a fast draft comes every few seconds."""
    held = idle_scheduler()
    tide = SchedulerTide(3, held, TideConfig())
    block = SimpleNamespace(block_id=0, block_hash="hash")
    held.kv_cache_manager.block_pool.blocks.append(block)
    new = SimpleNamespace(num_computed_tokens=9, block_ids=[[0]])
    tide.observe({"staged": 1, "staged_fast": True})
    assert tide.control() == {"install": 1}
    assert tide._prefix(new, 10) == "most"
    tide.observe({"staged": 2, "staged_fast": False})
    assert tide.control() == {"install": 2}
    assert tide._prefix(new, 10) == "most_old"


STUBBORN = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: print("asked", flush=True))
print("ready", flush=True)
while True:
    time.sleep(60)
"""


def test_a_worker_that_stops_leaves_no_text_behind_while_it_waits(
    tmp_path, monkeypatch
):
    """vLLM kills one that takes longer than its trainer may."""
    monkeypatch.setattr(trainer_process, "_STOP_SECONDS", 600)
    tide = object.__new__(WorkerTide)
    tide._leader, tide._run_dir, tide._engine_id = True, tmp_path, "e1"
    tide.capture = tide.swapper = None
    ring = tide._ring = RingWriter.create(make_spec(), 1 << 16)
    segment = tide._segment = WeightsSegment.create(1 << 16)
    manifest = tmp_path / "engine-e1.json"
    manifest.write_text("{}")
    left = [manifest, *(Path(SHM_DIR, part.name) for part in (ring, segment))]
    assert all(path.exists() for path in left)
    tide._trainer = trainer = TrainerProcess("e1", tmp_path, "group", SpoolConfig())
    child = trainer.process = subprocess.Popen(
        [sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        closing = threading.Thread(target=tide.close)
        closing.start()
        assert child.stdout.readline() == "asked\n"
        until = time.monotonic() + 60
        while any(path.exists() for path in left):
            assert time.monotonic() < until, left
            time.sleep(0.01)
        assert closing.is_alive() and child.poll() is None
    finally:
        child.kill()
    closing.join(timeout=60)
    assert not closing.is_alive() and tide._trainer is None
    # Asked once: a second signal would end a trainer that is saving.
    assert child.stdout.read() == ""
    ring.close()
