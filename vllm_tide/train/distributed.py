"""One draft trained by many ranks: torchrun, FSDP2, gloo on CPUs and NCCL on GPUs.

The leader (rank 0) is the only one that knows engines, buffers and the gate. It deals
the documents of every batch to the ranks and computes its own share; the others wait
in `follow` for its orders. Sums and counts of the loss are reduced before they are
divided, so the curve is that of one rank with the same batches.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vllm_tide.config import TrainConfig
from vllm_tide.draft.eagle3 import Eagle3Draft
from vllm_tide.draft.target import TargetRows
from vllm_tide.draft.vocab import VocabMap
from vllm_tide.train import checkpoint
from vllm_tide.train.checkpoint import TrainState
from vllm_tide.train.losses import LossSums
from vllm_tide.train.packing import PackedBatch, num_branch_rows, pack
from vllm_tide.train.ranks import (
    LEADER,
    RankLost,
    Ranks,
    broadcast_json,
    receive,
    send,
    watched,
)
from vllm_tide.train.sample import Sample, by_request
from vllm_tide.train.step import GRAD_CLIP, StepResult, TrainStep
from vllm_tide.transport.shm import TransportError


class _Loss(nn.Module):
    """The loss of a batch as a module, for FSDP's hooks around its forward."""

    def __init__(self, draft: Eagle3Draft) -> None:
        super().__init__()
        self.draft = draft

    def forward(self, compute: Callable[[], Any]) -> Any:
        return compute()


class ShardedStep(TrainStep):
    """A `TrainStep` whose draft is sharded over the ranks (FSDP2); all step together.

    `Eagle3Draft` reads its parameters directly, without the forward of submodules, so
    the whole loss is made one module and FSDP gathers around its forward. The weights
    stay gathered until the backward pass has used them: a draft has one layer, so
    gathering it twice would save nothing.
    """

    def __init__(
        self, draft: Eagle3Draft, target: TargetRows, config: TrainConfig, ranks: Ranks
    ) -> None:
        self._module = _Loss(draft)
        # One rank alone need not pay for importing FSDP.
        from torch.distributed.fsdp import fully_shard

        fully_shard(self._module, mesh=ranks.mesh, reshard_after_forward=False)
        if ranks.mesh.device_type == "cpu":  # gloo cannot average
            self._module.set_force_sum_reduction_for_comms(True)
        super().__init__(draft, target, config, reduce=_sum_over_ranks)

    def loss_of(self, batch: PackedBatch | None) -> tuple[Tensor, LossSums] | None:
        """Parameters are whole inside, and until after backward."""
        compute = super().loss_of
        found: tuple[Tensor, LossSums] | None = self._module(lambda: compute(batch))
        if found is None:  # no backward pass will come
            self._module.reshard()
        return found

    def clip_gradients(self) -> float:
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, GRAD_CLIP)
        return float(_whole(norm))

    def gathered(self) -> Iterator[tuple[str, Tensor]]:
        """Whole master weights, one after the other (every rank must go through)."""
        for name, value in self.draft.named_tensors().items():
            yield name, _whole(value.detach())


def _whole(value: Any) -> Any:
    """A tensor that may be a shard (DTensor), gathered."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def _sum_over_ranks(vector: Tensor) -> Tensor:
    out = vector.detach().clone()
    dist.all_reduce(out)
    return out


BEAT_S = 30.0  # the leader speaks at least this often while it has no work

# setup sent by the leader -> (draft of the right shape, target, knobs)
Build = Callable[[dict[str, Any]], tuple[Eagle3Draft, TargetRows, TrainConfig]]


class OneRank:
    """Steps of a trainer that is alone; `LeadRank` offers the same for many ranks."""

    def __init__(
        self, draft: Eagle3Draft, target: TargetRows, config: TrainConfig
    ) -> None:
        self.step = TrainStep(draft, target, config)

    def run(
        self, samples: Sequence[Sample], lr_scale: float = 1.0
    ) -> StepResult | None:
        """Train on documents as one batch; None when nothing could be trained."""
        if not samples:
            return None
        batch = pack(samples, branches=self.step.trains_branches)
        return self.step.run(batch, lr_scale)

    def gather(self) -> None:
        """Make the trainer's draft equal to the one trained, which it is here."""

    def restore(self) -> None:
        """Go on from the trainer's draft, and forget the optimizer's moments."""
        self.step.reset()

    def replace(self, draft: Eagle3Draft) -> None:
        """The trainer has another draft object now; the vocabulary may differ too."""
        self.step = TrainStep(draft, self.step.target, self.step.config)

    def save(self, directory: str | Path, state: TrainState) -> Path:
        """Write a checkpoint; OSError if it could not be: training may go on."""
        return checkpoint.save(directory, self.step, state)

    def load(self, path: str | Path) -> TrainState:
        return checkpoint.load(path, self.step)

    def idle(self) -> None:
        """Call at least every few minutes while nothing is trained."""

    def close(self) -> None:
        """Let the other ranks end."""


def deal_documents(samples: Sequence[Sample], size: int) -> list[list[Sample]]:
    """Share documents out so that the ranks have about equal rows.

    Longest first to the rank with the fewest rows (at most 4/3 of the best split,
    Graham 1969). All documents of one request stay together. Some shares are empty
    when there are fewer requests than ranks.
    """
    requests = by_request(samples)
    rows = {key: sum(map(_num_rows, group)) for key, group in requests.items()}
    shares: list[list[Sample]] = [[] for _ in range(size)]
    loads = [0] * size
    for key in sorted(requests, key=lambda key: -rows[key]):
        least = loads.index(min(loads))
        shares[least] += requests[key]
        loads[least] += rows[key]
    return shares


def _num_rows(sample: Sample) -> int:
    return sample.num_tokens + num_branch_rows(sample)


class LeadRank:
    """Steps of a trainer that leads other ranks; methods as those of `OneRank`.

    Args:
        draft: The trainer's draft: whole, only read and overwritten here.
    """

    def __init__(
        self,
        ranks: Ranks,
        draft: Eagle3Draft,
        target: TargetRows,
        config: TrainConfig,
        setup: dict[str, Any],
    ) -> None:
        self.ranks, self.draft = ranks, draft
        self._target, self._config = target, config
        self._spoken = 0.0
        self._broken = False
        with self._together():
            self._order("setup", **setup)
        self.restore()

    def run(
        self, samples: Sequence[Sample], lr_scale: float = 1.0
    ) -> StepResult | None:
        """The result is of all ranks.

        Raises:
            RankLost: A rank is gone. What was published stays published.
        """
        shares = deal_documents(samples, self.ranks.size)
        batches = [self._pack(share) for share in shares]
        with self._together():
            self._order("step", lr_scale=lr_scale)
            for rank, batch in enumerate(batches):
                if rank != LEADER:
                    send(batch, rank)
            return self.step.run(batches[LEADER], lr_scale)

    def gather(self) -> None:
        with self._together(), torch.no_grad():
            self._order("gather")
            mine = self.draft.named_tensors()
            for name, value in self.step.gathered():
                mine[name].copy_(value)

    def restore(self) -> None:
        draft = self.draft
        with self._together():
            self._order(
                "weights",
                draft_vocab_size=draft.config.draft_vocab_size,
                identity=draft.vocab.is_identity,
                owns_lm_head=draft.owns_lm_head,
            )
            if not draft.vocab.is_identity:
                dist.broadcast(draft.vocab.target_ids.contiguous(), LEADER)
            tensors = draft.named_tensors()
            for name in sorted(tensors):
                dist.broadcast(tensors[name].detach().cpu(), LEADER)
        copy = _draft_like(draft, tensors, draft.vocab, draft.owns_lm_head)
        self.step = ShardedStep(copy, self._target, self._config, self.ranks)

    def replace(self, draft: Eagle3Draft) -> None:
        self.draft = draft
        self.restore()

    def save(self, directory: str | Path, state: TrainState) -> Path:
        staged = checkpoint.begin(directory)
        with self._together():
            self._order("save", path=str(staged))
            failure = _write(staged, self.step)
        if failure is not None:
            raise failure
        return checkpoint.commit(staged, self.step, state)

    def load(self, path: str | Path) -> TrainState:
        state, count = checkpoint.verify(path, self.draft)
        with self._together():
            self._order("load", path=str(path), count=count)
            checkpoint.read_tensors(path, self.step, count)
        self.gather()
        return state

    def idle(self) -> None:
        """Tells the others that the leader lives, every `BEAT_S`."""
        if time.monotonic() - self._spoken >= BEAT_S:
            with self._together():
                self._order("beat")

    def close(self) -> None:
        if self._broken:  # others are in the middle of something, or gone
            return
        with contextlib.suppress(RankLost), self._together():
            self._order("stop")
        self.ranks.close()

    def _pack(self, share: Sequence[Sample]) -> PackedBatch | None:
        if not share:  # fewer requests than ranks
            return None
        return pack(share, branches=self.step.trains_branches)

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        """What all ranks do at once; after an exception they are out of step."""
        try:
            with watched():
                yield
        except BaseException:
            self._broken = True
            raise

    def _order(self, name: str, **details: Any) -> None:
        broadcast_json({"order": name, **details})
        self._spoken = time.monotonic()


Stepper = OneRank | LeadRank
"""Stepper of a `Trainer`: one rank or the lead of several."""


def beat(ranks: Ranks) -> None:
    """Tell the others, every `BEAT_S`, that the leader lives but has no `LeadRank` yet.

    Raises:
        RankLost: A rank is gone.
    """
    if ranks.size > 1:
        with watched():
            broadcast_json({"order": "beat"})


def setup_of(
    target_path: str, draft_path: str, shared: Sequence[str], config: TrainConfig
) -> dict[str, Any]:
    """Setup with which other ranks load the same target and draft shape."""
    return {
        "target_path": target_path,
        "draft_path": draft_path,
        "shared": list(shared),
        "config": config.model_dump(mode="json"),
    }


def load_setup(setup: dict[str, Any]) -> tuple[Eagle3Draft, TargetRows, TrainConfig]:
    from vllm_tide.draft.checkpoint import load_draft

    config = TrainConfig.model_validate(setup["config"])
    target = TargetRows.load(setup["target_path"], config.device)
    draft = load_draft(setup["draft_path"], target, frozenset(setup["shared"]))
    return draft, target, config


def follow(ranks: Ranks, build: Build = load_setup) -> None:
    """Serve the leader until it says stop, which signals do not.

    torchrun and a terminal signal all ranks at once: the leader finishes its step and
    then stops the others.

    `build` makes draft and target of the leader's setup; weights come afterwards.

    Raises:
        RankLost: The leader or another rank is gone.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    with watched():
        while (setup := broadcast_json())["order"] == "beat":
            pass
        draft, target, config = build(setup)
        step: ShardedStep | None = None
        while (order := broadcast_json())["order"] != "stop":
            name = order["order"]
            if name == "weights":
                step = ShardedStep(_receive_draft(draft, order), target, config, ranks)
            elif step is not None and name != "beat":
                _obey(step, order)
    ranks.close()


def _obey(step: ShardedStep, order: dict[str, Any]) -> None:
    match order["order"]:
        case "step":
            step.run(receive(), order["lr_scale"])
        case "gather":
            for _ in step.gathered():
                pass
        case "save":
            _write(order["path"], step)  # the leader says what went wrong
        case "load":
            checkpoint.read_tensors(order["path"], step, order["count"])
        case other:
            raise TransportError(
                f"ranks: the leader gave an unknown order {other!r}; all ranks must "
                "run the same version of vllm_tide."
            )


def _write(staged: str | Path, step: ShardedStep) -> OSError | None:
    try:
        checkpoint.write_tensors(staged, step)
    except OSError as error:
        return error
    return None


def _receive_draft(base: Eagle3Draft, order: dict[str, Any]) -> Eagle3Draft:
    size = order["draft_vocab_size"]
    vocab = VocabMap.identity(base.config.vocab_size)
    if not order["identity"]:
        ids = torch.empty(size, dtype=torch.int64)
        dist.broadcast(ids, LEADER)
        vocab = VocabMap.from_target_ids(ids, base.config.vocab_size)
    tensors = {}
    for name, mine in sorted(base.named_tensors().items()):
        shape = (size, *mine.shape[1:]) if name == "lm_head.weight" else mine.shape
        tensors[name] = torch.empty(shape)
        dist.broadcast(tensors[name], LEADER)
    return _draft_like(base, tensors, vocab, order["owns_lm_head"])


def _draft_like(
    base: Eagle3Draft, tensors: dict[str, Tensor], vocab: VocabMap, owns_lm_head: bool
) -> Eagle3Draft:
    config = replace(base.config, draft_vocab_size=vocab.target_ids.numel())
    return Eagle3Draft(
        config,
        tensors,
        vocab,
        base.embed,
        owns_lm_head=owns_lm_head,
        dtype=base.checkpoint_dtype,
    )
