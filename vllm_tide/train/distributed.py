"""Training of one draft on many ranks: torchrun, FSDP2, gloo on CPUs, NCCL on GPUs.

Only the leader (rank 0) has engines, buffers and the gate. It distributes the documents
of every batch over the ranks and computes its own share; the other ranks wait in
`follow` for its commands. Sums and counts of the loss are reduced before they are
divided, so the loss curve equals that of one rank with the same batches.
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
from vllm_tide.draft.module import Draft
from vllm_tide.draft.target import TargetRows
from vllm_tide.draft.vocab import VocabMap
from vllm_tide.train import checkpoint
from vllm_tide.train.checkpoint import TrainState
from vllm_tide.train.losses import StepResult
from vllm_tide.train.packing import PackedBatch, num_branch_rows, pack
from vllm_tide.train.ranks import (
    LEADER,
    RankLost,
    Ranks,
    detect_lost_ranks,
    pack_message,
    unpack_message,
)
from vllm_tide.train.sample import Sample, by_request
from vllm_tide.train.step import GRAD_CLIP, TrainStep
from vllm_tide.transport.shm import TransportError


class _Loss(nn.Module):
    """The loss of a batch as a module, which FSDP's forward hooks require."""

    def __init__(self, draft: Draft) -> None:
        super().__init__()
        self.draft = draft

    def forward(self, compute: Callable[[], Any]) -> Any:
        return compute()


class ShardedStep(TrainStep):
    """A `TrainStep` with the draft sharded over all ranks (FSDP2).

    A draft reads its parameters directly, without the forward of submodules, so
    the whole loss is one module and FSDP gathers around its forward. The weights stay
    gathered until the backward pass: a draft has one layer, so resharding in between
    saves no memory.
    """

    def __init__(
        self, draft: Draft, target: TargetRows, config: TrainConfig, ranks: Ranks
    ) -> None:
        self._module = _Loss(draft)
        # Imported here: a single rank does not need FSDP.
        from torch.distributed.fsdp import fully_shard

        fully_shard(self._module, mesh=ranks.mesh, reshard_after_forward=False)
        if ranks.mesh.device_type == "cpu":  # gloo cannot average
            self._module.set_force_sum_reduction_for_comms(True)
        super().__init__(draft, target, config, reduce=_sum_over_ranks)

    def loss_of(self, packed: PackedBatch | None) -> tuple[Tensor, StepResult] | None:
        """Compute the loss with gathered parameters, which stay so until backward."""
        compute = super().loss_of
        result: tuple[Tensor, StepResult] | None = self._module(lambda: compute(packed))
        if result is None:  # no backward pass follows
            self._module.reshard()
        return result

    def clip_gradients(self) -> float:
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, GRAD_CLIP)
        return float(_unsharded(norm))


def _unsharded(value: Any) -> Any:
    """Gather a tensor if it is a shard (DTensor)."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def _sum_over_ranks(vector: Tensor) -> Tensor:
    out = vector.detach().clone()
    dist.all_reduce(out)
    return out


HEARTBEAT_S = 30.0  # longest time between two commands of an idle leader

Tensors = dict[str, Tensor]
Build = Callable[[dict[str, Any]], tuple[Draft, TargetRows, TrainConfig]]
"""Setup sent by the leader -> draft of that shape, target, knobs."""


class OneRank:
    """Training steps in one process; `LeadRank` has the same methods for many."""

    def __init__(self, draft: Draft, target: TargetRows, config: TrainConfig) -> None:
        self.step = TrainStep(draft, target, config)

    def run(
        self, samples: Sequence[Sample], lr_scale: float = 1.0
    ) -> StepResult | None:
        """Train on documents as one batch; None without a row to train."""
        if not samples:
            return None
        batch = pack(samples, branches=self.step.trains_branches)
        return self.step.run(batch, lr_scale)

    def gather(self) -> None:
        """Copy the trained weights to the trainer's draft; here they are the same."""

    def restore(self) -> None:
        """Restart from the trainer's draft; clear the optimizer's moments."""
        self.step.reset()

    def replace(self, draft: Draft) -> None:
        """Use another draft object, possibly with another vocabulary."""
        self.step = TrainStep(draft, self.step.target, self.step.config)

    def save(self, directory: str | Path, state: TrainState) -> Path:
        """Write a checkpoint; on OSError training may continue."""
        return checkpoint.save(directory, self.step, state)

    def load(self, path: str | Path) -> TrainState:
        return checkpoint.load(path, self.step)

    def idle(self) -> None:
        """Send a heartbeat; call every few minutes while no step runs."""

    def close(self) -> None:
        """End the other ranks."""


def split_documents(samples: Sequence[Sample], size: int) -> list[list[Sample]]:
    """Distribute documents so that all ranks have about equal numbers of rows.

    The longest request goes first, to the rank with the fewest rows (at most 4/3 of the
    best split, Graham 1969). All documents of a request go to one rank. With fewer
    requests than ranks some shares are empty.
    """
    requests = by_request(samples)
    rows = {
        key: sum(sample.num_tokens + num_branch_rows(sample) for sample in group)
        for key, group in requests.items()
    }
    shares: list[list[Sample]] = [[] for _ in range(size)]
    loads = [0] * size
    for key in sorted(requests, key=lambda key: -rows[key]):
        least = loads.index(min(loads))
        shares[least] += requests[key]
        loads[least] += rows[key]
    return shares


COMMANDS = "heartbeat", "take_weights", "train", "gather_weights", "write", "read"
"""Methods of `Member`."""


class Member:
    """One rank's part of the steps; all ranks run the same command at the same time.

    Args:
        draft: Of the leader's shape, unsharded; not trained.
    """

    step: ShardedStep

    def __init__(
        self, ranks: Ranks, draft: Draft, target: TargetRows, config: TrainConfig
    ) -> None:
        self.ranks, self.draft = ranks, draft
        self._target, self._config = target, config

    def execute(self, command: str, tensors: Tensors, details: dict[str, Any]) -> Any:
        if command not in COMMANDS:
            raise TransportError(
                f"ranks: unknown command {command!r} from the leader; all ranks must "
                "run the same version of vllm_tide."
            )
        return getattr(self, command)(tensors, **details)

    def heartbeat(self, _: Tensors) -> None:
        """Reset the timeout of the ranks that wait."""

    def take_weights(self, vocab: Tensors, owns_lm_head: bool) -> None:
        """Begin new steps from the weights of the leader's draft."""
        base, ids = self.draft, vocab["target_ids"]
        tensors = {}
        for name, mine in sorted(base.named_tensors().items()):
            if not self.ranks.is_leader:
                size = ids.numel() if name == "lm_head.weight" else len(mine)
                mine = torch.empty(size, *mine.shape[1:])
            tensors[name] = mine.detach().cpu()
            dist.broadcast(tensors[name], LEADER)
        draft = type(base)(
            replace(base.config, draft_vocab_size=ids.numel()),
            tensors,
            VocabMap.from_target_ids(ids, base.config.vocab_size),
            base.embed,
            owns_lm_head=owns_lm_head,
            dtype=base.checkpoint_dtype,
        )
        self.step = ShardedStep(draft, self._target, self._config, self.ranks)

    def train(
        self, batch: Tensors, lr_scale: float, lists: dict[str, Any] | None
    ) -> StepResult | None:
        packed = None if lists is None else unpack_message(lists, batch)
        return self.step.run(packed, lr_scale)

    @torch.no_grad()
    def gather_weights(self, _: Tensors) -> None:
        """Copy the trained weights to the leader's draft."""
        mine = self.draft.named_tensors()
        for name, value in self.step.draft.named_tensors().items():
            whole = _unsharded(value)
            if self.ranks.is_leader:
                mine[name].copy_(whole)

    def write(self, _: Tensors, path: str) -> OSError | None:
        """Write this rank's shards; an error of one rank is returned on all."""
        try:
            checkpoint.write_tensors(path, self.step)
        except OSError as error:
            return error
        return None

    def read(self, _: Tensors, path: str, count: int) -> None:
        checkpoint.read_tensors(path, self.step, count)


class LeadRank(Member):
    """Training steps on many ranks; same methods as `OneRank`.

    Args:
        draft: The trainer's draft, unsharded; read and overwritten, not trained.
        setup: See `Build`.
    """

    def __init__(
        self,
        ranks: Ranks,
        draft: Draft,
        target: TargetRows,
        config: TrainConfig,
        setup: dict[str, Any],
    ) -> None:
        super().__init__(ranks, draft, target, config)
        self._broken = False
        with self._collective():
            ranks.send("setup", setup)
        self.restore()

    def run(
        self, samples: Sequence[Sample], lr_scale: float = 1.0
    ) -> StepResult | None:
        """Run a step on all ranks; the result is reduced over them.

        Raises:
            RankLost: A rank is gone. Published versions stay published.
        """
        batches = [
            pack(share, branches=self.step.trains_branches) if share else None
            for share in split_documents(samples, self.ranks.size)
        ]
        with self._collective():
            for rank, batch in enumerate(batches[1:], start=1):
                lists, tensors = pack_message(batch) if batch else (None, {})
                details = {"lr_scale": lr_scale, "lists": lists}
                self.ranks.send("train", details, tensors, rank)
            return self.step.run(batches[LEADER], lr_scale)

    def gather(self) -> None:
        self._run_on_all("gather_weights")

    def restore(self) -> None:
        vocab = {"target_ids": self.draft.vocab.target_ids}
        self._run_on_all("take_weights", vocab, owns_lm_head=self.draft.owns_lm_head)

    def replace(self, draft: Draft) -> None:
        self.draft = draft
        self.restore()

    def save(self, directory: str | Path, state: TrainState) -> Path:
        staged = checkpoint.begin(directory)
        if (failure := self._run_on_all("write", path=str(staged))) is not None:
            raise failure
        return checkpoint.commit(staged, self.step, state)

    def load(self, path: str | Path) -> TrainState:
        state, count = checkpoint.verify(path, self.draft)
        self._run_on_all("read", path=str(path), count=count)
        self.gather()
        return state

    def idle(self) -> None:
        """Send the other ranks a heartbeat every `HEARTBEAT_S`."""
        if time.monotonic() - self._last_command_s >= HEARTBEAT_S:
            self._run_on_all("heartbeat")

    def close(self) -> None:
        if self._broken:  # other ranks are amid a collective, or gone
            return
        with contextlib.suppress(RankLost), self._collective():
            self.ranks.send("stop")
        self.ranks.close()

    @contextlib.contextmanager
    def _collective(self) -> Iterator[None]:
        """Run a collective of all ranks; an exception leaves them out of step."""
        self._last_command_s = time.monotonic()
        try:
            with detect_lost_ranks():
                yield
        except BaseException:
            self._broken = True
            raise

    def _run_on_all(
        self, command: str, tensors: Tensors | None = None, **details: Any
    ) -> Any:
        with self._collective():
            self.ranks.send(command, details, tensors)
            return self.execute(command, tensors or {}, details)


Stepper = OneRank | LeadRank
"""Stepper of a `Trainer`: one rank or the lead of several."""


def send_heartbeat(ranks: Ranks) -> None:
    """Send a heartbeat of a leader without a `LeadRank`; due every `HEARTBEAT_S`.

    Raises:
        RankLost: A rank is gone.
    """
    with detect_lost_ranks():
        ranks.send("heartbeat")


def setup_of(
    target_path: str, draft_path: str, shared: Sequence[str], config: TrainConfig
) -> dict[str, Any]:
    """Build the setup from which other ranks load the same target and draft shape."""
    return {
        "target_path": target_path,
        "draft_path": draft_path,
        "shared": list(shared),
        "config": config.model_dump(mode="json", exclude={"ttt_steps"}),
        "ttt_steps": config.ttt_steps,  # DFlash: not limited as the knob is
    }


def load_setup(setup: dict[str, Any]) -> tuple[Draft, TargetRows, TrainConfig]:
    from vllm_tide.draft.checkpoint import load_draft

    config = TrainConfig.model_validate(setup["config"])
    config = config.model_copy(update={"ttt_steps": setup["ttt_steps"]})
    target = TargetRows.load(setup["target_path"], config.device)
    draft = load_draft(setup["draft_path"], target, frozenset(setup["shared"]))
    return draft, target, config


def follow(ranks: Ranks, build: Build = load_setup) -> None:
    """Run the leader's commands until `stop`; SIGTERM and SIGINT are ignored.

    torchrun and a terminal signal all ranks at once: the leader finishes its step and
    then stops the other ranks.

    `build` creates draft and target from the leader's setup; weights follow later.

    Raises:
        RankLost: The leader or another rank is gone.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    member: Member | None = None
    with detect_lost_ranks():
        while (received := ranks.receive())[0] != "stop":
            command, details, tensors = received
            if command == "setup":
                member = Member(ranks, *build(details))
            elif member is not None:  # else a heartbeat
                member.execute(command, tensors, details)
    ranks.close()
