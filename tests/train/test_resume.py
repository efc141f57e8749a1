"""A run that goes on from a checkpoint is the run that never stopped."""

from __future__ import annotations

import errno
import random
from collections import deque
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

from tests.train.toys import VOCAB, ToyTarget
from vllm_tide.config import TrainConfig
from vllm_tide.draft import DraftError
from vllm_tide.train import checkpoint
from vllm_tide.train.checkpoint import TrainState
from vllm_tide.train.data_cursor import DataCursor
from vllm_tide.train.distributed import OneRank
from vllm_tide.train.packing import take_batch
from vllm_tide.train.reservoir import SampleBuffer
from vllm_tide.train.sample import Sample

TOY = ToyTarget()
KNOBS = TrainConfig(
    compute_dtype="float32",
    batch_tokens=128,
    max_sample_tokens=64,
    learning_rate=5e-3,
    buffer_tokens=4096,
    holdout_share=0.1,
)
STEPS, STOP = 30, 13  # several passes; the stop is in the middle of one


class Run:
    """The training loop of a cycle, with a checkpoint in the middle."""

    def __init__(self, seed: int = 0, count: int = 12) -> None:
        self.draft = TOY.draft(seed)
        self.stepper = OneRank(self.draft, TOY.rows, KNOBS)
        self.buffer = SampleBuffer(KNOBS, clock=lambda: 1e9)
        self.queue: deque[Sample] = deque()
        self.done = 0
        rng = random.Random(1)
        for _ in range(count):
            first, key = rng.randrange(VOCAB), rng.getrandbits(64)
            self.buffer.add(TOY.document(first, rng.randrange(10, 40), 3, key))

    def train(self, last: int) -> list[float]:
        losses = []
        while self.done < last:
            if not self.queue:
                self.queue = self.buffer.shuffled()
            samples = take_batch(self.queue, KNOBS.batch_tokens)
            # dropout would draw from torch's generator: resume must restore it
            scale = float(torch.rand(()))
            result = self.stepper.run(samples, KNOBS.batch_tokens, scale)
            assert result is not None
            losses.append(result.loss)
            self.done += 1
        return losses

    def save(self, folder: Path) -> Path:
        state = TrainState(
            steps=self.done,
            cycle_step=self.done,
            cycle_total=STEPS,
            data=DataCursor.of(self.buffer, self.queue).to_json(),
            extra={"schedule": "collecting"},
        )
        return self.stepper.save(folder, state)

    def load(self, path: Path) -> TrainState:
        state = self.stepper.load(path)
        queue = DataCursor.from_json(state.data).resume(self.buffer)
        assert queue is not None
        self.queue, self.done = queue, state.cycle_step
        state.restore_random()
        return state


def weights(run: Run) -> torch.Tensor:
    return torch.cat([t.detach().flatten() for t in run.draft.named_tensors().values()])


def test_the_curve_after_resume_is_the_same_to_the_last_bit(tmp_path):
    torch.manual_seed(7)
    whole = Run()
    losses = whole.train(STOP)
    path = whole.save(tmp_path)
    losses += whole.train(STEPS)

    torch.manual_seed(99)
    again = Run(seed=3)  # another draft: all of it comes from the checkpoint
    again.buffer.shuffled()  # another order
    state = again.load(path)
    assert state.extra == {"schedule": "collecting"}
    assert (state.cycle_step, state.cycle_total) == (STOP, STEPS)
    assert again.train(STEPS) == losses[STOP:]
    assert torch.equal(weights(again), weights(whole))


def test_a_checkpoint_before_the_first_step_has_no_moments(tmp_path):
    fresh = Run()
    path = fresh.save(tmp_path)
    again = Run(seed=3)
    again.train(2)
    again.stepper.load(path)
    assert torch.equal(weights(again), weights(fresh))
    assert not again.stepper.step.optimizer.state


def test_another_buffer_begins_a_new_pass():
    run = Run()
    run.queue = run.buffer.shuffled()
    cursor = DataCursor.of(run.buffer, run.queue)
    assert cursor.resume(Run(count=11).buffer) is None
    assert len(cursor.resume(Run().buffer) or ()) == len(run.queue)


def test_no_captured_token_or_feature_is_in_a_checkpoint(tmp_path):
    run = Run()
    run.train(2)
    path = run.save(tmp_path)
    rows = [s.features.numpy().tobytes()[:32] for s in run.buffer.train]
    rows += [s.tokens.numpy().tobytes() for s in run.buffer.train]
    for file in path.iterdir():
        raw = file.read_bytes()
        assert not any(row in raw for row in rows)


def test_only_the_newest_checkpoints_stay_and_torn_ones_are_removed(tmp_path):
    run = Run(count=4)
    (tmp_path / ".writing-1").mkdir()
    (tmp_path / "checkpoint-00000009").mkdir()  # no state.json: never finished
    paths = [run.save(tmp_path) for _ in range(4)]
    assert checkpoint.latest(tmp_path) == paths[-1]
    assert [p.exists() for p in paths] == [False, False, True, True]
    assert not list(tmp_path.glob(".writing-*"))
    assert paths[-1].stat().st_mode & 0o777 == 0o700
    assert checkpoint.latest(tmp_path / "absent") is None


def test_a_full_disk_stops_no_training(tmp_path, monkeypatch):
    def write_data(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    run = Run(count=4)
    first = run.save(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(HuggingFaceStorageWriter, "write_data", write_data)
        with pytest.raises(OSError, match="could not write: .*No space left"):
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
