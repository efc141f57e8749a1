"""One rank of a small training run, and the same run in this process.

    python -m tests.train.rank_child JSON     (RANK, WORLD_SIZE, MASTER_* as torchrun)

Every run trains on the same fixed batches, so runs with any number of ranks, and runs
that go on from a checkpoint, can be compared step by step.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.tensor import DTensor

from tests.train.toys import VOCAB, ToyTarget, config
from vllm_tide.config import TrainConfig
from vllm_tide.draft import VocabMap
from vllm_tide.draft.eagle3 import Eagle3Draft
from vllm_tide.draft.target import TargetRows
from vllm_tide.draft.tensor_bytes import to_bytes
from vllm_tide.train import step
from vllm_tide.train.checkpoint import TrainState
from vllm_tide.train.distributed import (
    LeadRank,
    OneRank,
    ShardedStep,
    Stepper,
    follow,
    send_heartbeat,
)
from vllm_tide.train.ranks import RankLost, Ranks, exit_rank
from vllm_tide.train.sample import Sample
from vllm_tide.transport.draft_weights import DraftWeights
from vllm_tide.transport.weights import WeightsWriter

step.COMPUTE_DTYPE = torch.float32
TOY = ToyTarget()
KNOBS = TrainConfig(
    learning_rate=5e-3,
    loss={"forward_kl": 1.0, "next_token": 0.1, "discard": 0.2},
)
STEPS = 10
LONELY, BAD = 3, 6  # a batch with one request; one with an infinite gradient
LOST = 3  # exit status of a leader after its ranks died


def draft(seed: int = 0, size: int = 37) -> Eagle3Draft:
    """Return a draft of 37 tokens and an MLP of 45: neither divides over two ranks."""
    shape = config(draft_vocab_size=size, intermediate_size=45)
    vocab_map = VocabMap.from_target_ids(torch.arange(size) + 20, VOCAB)
    return Eagle3Draft.initialise(shape, TOY.embed, TOY.head, vocab_map, seed=seed)


def build(setup: dict[str, Any]) -> tuple[Eagle3Draft, TargetRows, TrainConfig]:
    """The other ranks begin with another draft than the leader's."""
    return draft(seed=5), TOY.rows, TrainConfig.model_validate(setup["config"])


def documents(index: int) -> list[Sample]:
    """Return the documents of one step: sizes differ, some have rejected branches."""
    random = torch.Generator().manual_seed(index)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=random))

    out = []
    for i in range(1 if index == LONELY else 5):
        size = number(8, 60)
        sample = TOY.document(number(0, VOCAB), size, number(1, 5), 100 * index + i)
        tokens = torch.randint(0, VOCAB, (3,), generator=random)
        branch = TOY.branch(size - 3, tokens)
        out.append(replace(sample, branches=(branch,) if i % 2 else ()))
    if index == BAD:
        out[0].features[2] = float("nan")
    return out


def train(
    stepper: Stepper,
    first: int,
    last: int,
    after: Callable[[int], None] = lambda _: None,
) -> list[float | None]:
    """Return the losses of steps `first` to `last` - 1."""
    losses = []
    for index in range(first, last):
        result = stepper.run(documents(index), lr_scale=1.0 - 0.05 * index)
        losses.append(None if result is None else result.loss)
        after(index)
    return losses


def _sharded_share(step: ShardedStep) -> float:
    """Return the largest share of a weight, gradient or moment on this rank."""
    shares: list[float] = []
    for value in step.draft.named_tensors().values():
        moments = step.optimizer.state.get(value, {}).values()
        for tensor in (value, value.grad, *moments):
            if isinstance(tensor, Tensor) and tensor.ndim:
                assert isinstance(tensor, DTensor)
                shares.append(tensor.to_local().numel() / tensor.numel())
    return max(shares)


def _full_disk_once() -> None:
    whole = HuggingFaceStorageWriter.write_data

    def write_data(*args: Any) -> Any:
        HuggingFaceStorageWriter.write_data = whole
        raise OSError(errno.ENOSPC, "No space left on device")

    HuggingFaceStorageWriter.write_data = write_data


def _die_in_step(number: int) -> None:
    """Kill this rank between the forward and the backward pass of a step."""
    whole = ShardedStep.loss_of
    calls = []

    def loss_of(self: ShardedStep, batch: Any) -> Any:
        loss = whole(self, batch)
        calls.append(1)
        if len(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return loss

    ShardedStep.loss_of = loss_of  # type: ignore[method-assign]


def lead(ranks: Ranks, options: dict[str, Any]) -> None:
    """Train from `first` to `last`; checkpoint and publish after step `save`."""
    mine, state, first = draft(), None, options.get("first", 0)
    send_heartbeat(ranks)  # as before an engine exists
    stepper = LeadRank(
        ranks, mine, TOY.rows, KNOBS, {"config": KNOBS.model_dump(mode="json")}
    )
    if "load" in options:
        state = stepper.load(options["load"])
        first = state.steps

    def after(index: int) -> None:
        if index + 1 != options.get("save"):
            return
        version = 0
        if "segment" in options:
            version = 1
            writer = WeightsWriter.attach(options["segment"])
            stepper.gather()
            tensors = {n: t.detach() for n, t in mine.named_tensors().items()}
            writer.publish(DraftWeights.encode(to_bytes(tensors), 1))
        state = TrainState(
            steps=index + 1,
            published_version=version,
        )
        if "full_disk" in options:
            with contextlib.suppress(OSError):
                stepper.save(options["directory"], state)
                raise AssertionError("rank 1 could not write")
        stepper.save(options["directory"], state)

    try:
        losses = train(stepper, first, options["last"], after)
    except RankLost:
        stepper.close()  # must not wait for dead ranks
        raise
    stepper.idle()
    stepper.gather()
    out = Path(options["out"])
    save_file({n: t.detach() for n, t in mine.named_tensors().items()}, f"{out}.st")
    out.write_text(
        json.dumps(
            {
                "losses": losses,
                "share": _sharded_share(stepper.step),
                "state": None if state is None else state.steps,
            }
        )
    )
    if options.get("restore"):
        stepper.replace(draft(seed=1, size=20))  # another draft, another vocabulary
        assert not stepper.step.optimizer.state
        again = OneRank(draft(seed=1, size=20), TOY.rows, KNOBS)
        same = zip(train(stepper, 0, 2), train(again, 0, 2), strict=True)
        assert all(abs(x - y) < 1e-5 * y for x, y in same if x and y)
    stepper.close()


def main() -> int:
    """Run this rank and return its exit status."""
    torch.set_num_threads(1)
    options = json.loads(sys.argv[1])
    ranks = Ranks()
    try:
        if ranks.is_leader:
            lead(ranks, options)
        else:
            if "full_disk" in options:
                _full_disk_once()
            if "die_in" in options:
                _die_in_step(options["die_in"])
            follow(ranks, build)
    except RankLost as error:
        print(error, file=sys.stderr)
        return LOST
    return 0


if __name__ == "__main__":
    exit_rank(main())
