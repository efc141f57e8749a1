"""The content of a checkpoint; a damaged or torn one is never read."""

from __future__ import annotations

import errno
import random
from collections import deque
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

from tests.train.toys import ToyTarget, documents_of, weights_of
from vllm_tide.config import TrainConfig
from vllm_tide.draft import DraftError
from vllm_tide.train import checkpoint
from vllm_tide.train.checkpoint import TrainState
from vllm_tide.train.distributed import OneRank
from vllm_tide.train.judgement import Evidence
from vllm_tide.train.packing import take_batch
from vllm_tide.train.step import BETAS
from vllm_tide.train.trainer import Trainer

TOY = ToyTarget()
KNOBS = TrainConfig(
    batch_tokens=128,
    learning_rate=5e-3,
    buffer_tokens=4096,
    holdout_share=0.1,
    steps_per_cycle=4,
)
STEPS, STOP = 30, 13


class Run:
    """Steps over fixed batches, which may stop after any of them."""

    def __init__(self, seed: int = 0, count: int = 12) -> None:
        self.draft = TOY.draft(seed)
        self.stepper = OneRank(self.draft, TOY.rows, KNOBS)
        self.done = 0
        self.batches, queue = [], deque(documents_of(random.Random(1), count))
        while queue:
            self.batches.append(take_batch(queue, KNOBS.batch_tokens))

    def train(self, last: int) -> list[float]:
        losses = []
        for index in range(self.done, last):
            samples = self.batches[index % len(self.batches)]
            result = self.stepper.run(samples)
            assert result is not None
            losses.append(result.loss)
        self.done = last
        return losses

    def save(self, folder: Path) -> Path:
        state = TrainState(steps=self.done, extra={"schedule": "collecting"})
        return self.stepper.save(folder, state)


def weights(run: Run) -> torch.Tensor:
    return weights_of(run.draft)


def test_the_curve_after_a_load_is_identical_to_the_last_bit(tmp_path):
    whole = Run()
    losses = whole.train(STOP)
    path = whole.save(tmp_path)
    losses += whole.train(STEPS)

    again = Run(seed=3)  # another draft: all of it comes from the checkpoint
    state = again.stepper.load(path)
    assert (state.steps, state.extra) == (STOP, {"schedule": "collecting"})
    again.done = state.steps
    assert again.train(STEPS) == losses[STOP:]
    assert torch.equal(weights(again), weights(whole))


def test_each_weight_moves_as_torch_moves_it():
    ours = OneRank(TOY.draft(draft_vocab_size=64), TOY.rows, KNOBS)
    named = ours.step.draft.named_tensors()
    twin = {name: value.detach().clone() for name, value in named.items()}
    trained = {n: twin[n] for n, v in named.items() if v.requires_grad}
    adamw = torch.optim.AdamW(
        trained.values(), betas=BETAS, weight_decay=0.0, fused=True
    )
    for scale in (1.0, 0.5, 0.25):
        assert ours.run(documents_of(random.Random(1), 4), scale) is not None
        for name, value in trained.items():
            value.grad = named[name].grad.clone()
        adamw.param_groups[0]["lr"] = KNOBS.learning_rate * scale
        adamw.step()
        for name, value in named.items():
            assert torch.equal(value, twin[name]), name
    assert checkpoint.optimizer_steps(ours.step) == 3
    ours.step.reset()
    assert not ours.step.optimizer.state


def test_incomplete_moments_are_left_out(tmp_path):
    first, again = Run(count=4), Run(seed=3, count=4)
    first.train(1), again.train(1)
    matrix = next(p for p in reversed(first.stepper.step.parameters) if p.ndim == 2)
    del first.stepper.step.optimizer.state[matrix]
    assert again.stepper.load(first.save(tmp_path)).steps == 1
    assert not again.stepper.step.optimizer.state
    assert torch.equal(weights(again), weights(first))


def test_a_resumed_trainer_begins_a_new_cycle_with_its_counters(tmp_path):
    """From a checkpoint in the middle of a cycle too: a finished step counts."""
    trainer = Trainer(TOY.draft(), TOY.rows, KNOBS)
    trainer.add_samples(documents_of(random.Random(1), 60))
    trainer.train_cycle()
    trainer.rate = 0.5
    trainer.evidence.add([0.25, 0.5])
    paths, steps = [], trainer.steps

    def save_after_a_step() -> bool:
        if trainer.steps == steps + 1:
            paths.append(trainer.save(tmp_path, 7))
            taken.append((trainer.train_tokens, replace(trainer.evidence)))
        return True

    taken: list[tuple[int, Evidence]] = []
    trainer.train_cycle(save_after_a_step)
    again = Trainer(TOY.draft(3), TOY.rows, KNOBS)
    assert again.load(paths[0]).published_version == 7
    assert (again.steps, again.cycles, again.rate) == (steps + 1, 1, 0.5)
    assert (again.train_tokens, again.evidence) == taken[0]
    assert again.evidence != Evidence()
    again.add_samples(documents_of(random.Random(1), 60))
    again.evidence = Evidence(running=30.0)  # enough before: no cycle without steps
    assert again.train_cycle().steps == KNOBS.steps_per_cycle
    assert (again.steps, again.cycles) == (steps + 1 + KNOBS.steps_per_cycle, 2)


def test_no_captured_token_or_feature_is_in_a_checkpoint(tmp_path):
    trainer = Trainer(TOY.draft(), TOY.rows, KNOBS)
    trainer.add_samples(documents_of(random.Random(1), 12))
    trainer.train_cycle()
    path = trainer.save(tmp_path, 0)
    documents = [*trainer.buffer.train, *trainer.buffer.holdout]
    rows = [s.features.numpy().tobytes()[:32] for s in documents]
    rows += [s.tokens.numpy().tobytes() for s in documents]
    for file in path.iterdir():
        raw = file.read_bytes()
        assert not any(row in raw for row in rows)


def test_only_the_newest_checkpoints_stay_and_torn_ones_are_removed(tmp_path):
    run = Run(count=4)
    (tmp_path / ".writing-1").mkdir()
    (tmp_path / "checkpoint-00000009").mkdir()  # no state.json: unfinished
    paths = [run.save(tmp_path) for _ in range(4)]
    assert checkpoint.latest(tmp_path) == paths[-1]
    assert [p.exists() for p in paths] == [False, False, True, True]
    assert not list(tmp_path.glob(".writing-*"))
    assert paths[-1].stat().st_mode & 0o777 == 0o700
    assert checkpoint.latest(tmp_path / "absent") is None


def test_a_full_disk_does_not_stop_training(tmp_path, monkeypatch):
    def write_data(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    run = Run(count=4)
    first = run.save(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(HuggingFaceStorageWriter, "write_data", write_data)
        with pytest.raises(OSError, match="cannot write: .*No space left"):
            run.save(tmp_path)
    assert checkpoint.latest(tmp_path) == first
    run.train(1)
    assert run.save(tmp_path) == checkpoint.latest(tmp_path) != first


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "state"])
def test_a_damaged_checkpoint_is_refused_and_changes_nothing(tmp_path, damage):
    run = Run(count=4)
    run.train(1)
    path = run.save(tmp_path)
    before, shard = weights(run), next(path.glob("*.safetensors"))
    raw = bytearray(shard.read_bytes())
    match damage:
        case "flip":
            raw[-5] ^= 1
            shard.write_bytes(raw)
        case "cut":
            shard.write_bytes(raw[:-4])
        case "remove":
            shard.unlink()
        case "state":
            (path / checkpoint.STATE_FILE).write_text("{")
    with pytest.raises(DraftError, match=path.name):
        run.stepper.load(path)
    assert torch.equal(weights(run), before)
    assert run.stepper.step.optimizer.state


def test_a_checkpoint_of_another_draft_is_refused(tmp_path):
    path = Run(count=4).save(tmp_path)
    other = TOY.draft(norm_before_residual=True)
    with pytest.raises(DraftError, match=r"tide\.train\.state_dir"):
        OneRank(other, TOY.rows, KNOBS).load(path)
