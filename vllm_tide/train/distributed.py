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
    broadcast_json,
    detect_lost_ranks,
    receive,
    send,
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

    def gathered(self) -> Iterator[tuple[str, Tensor]]:
        """Yield unsharded master weights one by one; every rank must iterate."""
        for name, value in self.draft.named_tensors().items():
            yield name, _unsharded(value.detach())


def _unsharded(value: Any) -> Any:
    """Gather a tensor if it is a shard (DTensor)."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def _sum_over_ranks(vector: Tensor) -> Tensor:
    out = vector.detach().clone()
    dist.all_reduce(out)
    return out


HEARTBEAT_S = 30.0  # longest time between two commands of an idle leader

# Setup sent by the leader -> (draft of that shape, target, knobs).
Build = Callable[[dict[str, Any]], tuple[Draft, TargetRows, TrainConfig]]


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
    """Training steps on many ranks; same methods as `OneRank`.

    Args:
        draft: The trainer's draft, unsharded; read and overwritten, not trained.
    """

    def __init__(
        self,
        ranks: Ranks,
        draft: Draft,
        target: TargetRows,
        config: TrainConfig,
        setup: dict[str, Any],
    ) -> None:
        self.ranks, self.draft = ranks, draft
        self._target, self._config = target, config
        self._last_command_s = 0.0
        self._broken = False
        with self._collective():
            self._send_command("setup", **setup)
        self.restore()

    def run(
        self, samples: Sequence[Sample], lr_scale: float = 1.0
    ) -> StepResult | None:
        """Run a step on all ranks; the result is reduced over them.

        Raises:
            RankLost: A rank is gone. Published versions stay published.
        """
        shares = split_documents(samples, self.ranks.size)
        batches = [self._pack(share) for share in shares]
        with self._collective():
            self._send_command("step", lr_scale=lr_scale)
            for rank, batch in enumerate(batches):
                if rank != LEADER:
                    send(batch, rank)
            return self.step.run(batches[LEADER], lr_scale)

    def gather(self) -> None:
        with self._collective(), torch.no_grad():
            self._send_command("gather")
            mine = self.draft.named_tensors()
            for name, value in self.step.gathered():
                mine[name].copy_(value)

    def restore(self) -> None:
        draft = self.draft
        with self._collective():
            self._send_command(
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

    def replace(self, draft: Draft) -> None:
        self.draft = draft
        self.restore()

    def save(self, directory: str | Path, state: TrainState) -> Path:
        staged = checkpoint.begin(directory)
        with self._collective():
            self._send_command("save", path=str(staged))
            failure = _write(staged, self.step)
        if failure is not None:
            raise failure
        return checkpoint.commit(staged, self.step, state)

    def load(self, path: str | Path) -> TrainState:
        state, count = checkpoint.verify(path, self.draft)
        with self._collective():
            self._send_command("load", path=str(path), count=count)
            checkpoint.read_tensors(path, self.step, count)
        self.gather()
        return state

    def idle(self) -> None:
        """Send the other ranks a heartbeat every `HEARTBEAT_S`."""
        if time.monotonic() - self._last_command_s >= HEARTBEAT_S:
            with self._collective():
                self._send_command("heartbeat")

    def close(self) -> None:
        if self._broken:  # other ranks are amid a collective, or gone
            return
        with contextlib.suppress(RankLost), self._collective():
            self._send_command("stop")
        self.ranks.close()

    def _pack(self, share: Sequence[Sample]) -> PackedBatch | None:
        if not share:  # fewer requests than ranks
            return None
        return pack(share, branches=self.step.trains_branches)

    @contextlib.contextmanager
    def _collective(self) -> Iterator[None]:
        """Run a collective of all ranks; an exception leaves them out of step."""
        try:
            with detect_lost_ranks():
                yield
        except BaseException:
            self._broken = True
            raise

    def _send_command(self, name: str, **details: Any) -> None:
        broadcast_json({"command": name, **details})
        self._last_command_s = time.monotonic()


Stepper = OneRank | LeadRank
"""Stepper of a `Trainer`: one rank or the lead of several."""


def send_heartbeat(ranks: Ranks) -> None:
    """Send a heartbeat of a leader without a `LeadRank`; due every `HEARTBEAT_S`.

    Raises:
        RankLost: A rank is gone.
    """
    if ranks.size > 1:
        with detect_lost_ranks():
            broadcast_json({"command": "heartbeat"})


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
    with detect_lost_ranks():
        while (setup := broadcast_json())["command"] == "heartbeat":
            pass
        draft, target, config = build(setup)
        step: ShardedStep | None = None
        while (command := broadcast_json())["command"] != "stop":
            name = command["command"]
            if name == "weights":
                step = ShardedStep(_recv_draft(draft, command), target, config, ranks)
            elif step is not None and name != "heartbeat":
                _run_command(step, command)
    ranks.close()


def _run_command(step: ShardedStep, command: dict[str, Any]) -> None:
    match command["command"]:
        case "step":
            step.run(receive(), command["lr_scale"])
        case "gather":
            for _ in step.gathered():
                pass
        case "save":
            _write(command["path"], step)  # the leader reports errors
        case "load":
            checkpoint.read_tensors(command["path"], step, command["count"])
        case other:
            raise TransportError(
                f"ranks: unknown command {other!r} from the leader; all ranks must "
                "run the same version of vllm_tide."
            )


def _write(staged: str | Path, step: ShardedStep) -> OSError | None:
    try:
        checkpoint.write_tensors(staged, step)
    except OSError as error:
        return error
    return None


def _recv_draft(base: Draft, command: dict[str, Any]) -> Draft:
    size = command["draft_vocab_size"]
    vocab = VocabMap.identity(base.config.vocab_size)
    if not command["identity"]:
        ids = torch.empty(size, dtype=torch.int64)
        dist.broadcast(ids, LEADER)
        vocab = VocabMap.from_target_ids(ids, base.config.vocab_size)
    tensors = {}
    for name, mine in sorted(base.named_tensors().items()):
        shape = (size, *mine.shape[1:]) if name == "lm_head.weight" else mine.shape
        tensors[name] = torch.empty(shape)
        dist.broadcast(tensors[name], LEADER)
    return _draft_like(base, tensors, vocab, command["owns_lm_head"])


def _draft_like(
    base: Draft, tensors: dict[str, Tensor], vocab: VocabMap, owns_lm_head: bool
) -> Draft:
    config = replace(base.config, draft_vocab_size=vocab.target_ids.numel())
    return type(base)(
        config,
        tensors,
        vocab,
        base.embed,
        owns_lm_head=owns_lm_head,
        dtype=base.checkpoint_dtype,
    )
