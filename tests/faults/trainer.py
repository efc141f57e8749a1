"""The real trainer, which also publishes ordered drafts.

It trains, deploys and rolls back as `vllm-tide train` does. Between two cycles it
executes orders from the run directory: a damaged draft is published as if a cycle had
made it.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import time
from pathlib import Path

import torch

from bench.suites.planting import NAN, PERMUTED, Plant, planted
from vllm_tide.cli.main import main as command
from vllm_tide.deploy import canary
from vllm_tide.deploy.deployment import DraftState, Master
from vllm_tide.draft.tensor_bytes import to_bytes
from vllm_tide.sidecar import loop
from vllm_tide.train import reservoir, trainer
from vllm_tide.train.judgement import CycleResult
from vllm_tide.transport.shm import TransportError

PASSED_ON = ("shape", "names", "dtype", "norm")
"""Damaged as by no trainer of ours: published as it is."""
OFFERED = ("nan", "permuted")
"""Offered as a candidate that passed the held-out gate: refusal or canary follows."""
AGAIN = "again"
"""The good draft again."""
SURENESS = {"whole": 1.0, "sure": 8.0, "unsure": 0.125}
"""Published past the deployment, like `SWAPPED`: the live draft with logits times this
factor, which have the same best tokens."""
SWAPPED = "swapped"
"""Published past the deployment: permuted."""
POISON = "poison"
"""Not published: the candidate in the trainer's memory becomes NaN."""


def order(run_dir: Path, what: str, seed: int) -> Path:
    """Order a draft, atomically; its file is removed once the order was executed."""
    path = run_dir / f"order-{time.time_ns()}-{secrets.token_hex(2)}.json"
    staged = path.with_suffix(".new")
    staged.write_text(json.dumps({"what": what, "seed": seed}), encoding="utf-8")
    os.replace(staged, path)
    return path


def spoilt(tensors: Master, what: str, seed: int) -> Master:
    """Return a draft that the engine must refuse, or another one than expected.

    Args:
        tensors: By the names of the served checkpoint.
        what: One of `PASSED_ON` or `SURENESS`, or `SWAPPED`.
        seed: Chooses the tensor.
    """
    if what == SWAPPED:
        return planted(tensors, Plant(what, PERMUTED), seed)
    out = dict(tensors)
    if what in SURENESS:
        out["norm.weight"] = out["norm.weight"] * SURENESS[what]
        return out
    names = sorted(n for n, t in out.items() if t.is_floating_point() and t.dim() == 2)
    name = names[seed % len(names)]
    if what == "shape":
        out[name] = out[name][:-1].contiguous()
    elif what == "names":
        out["not." + name] = out.pop(name)
    elif what == "dtype":
        out[name] = out[name].to(torch.int32)
    else:
        out[name] = out[name] * 1e4
    return out


class OrderedSidecar(loop.Sidecar):
    """A sidecar that executes orders between two cycles."""

    def _may_train(self) -> bool:
        for path in sorted(self._run_dir.glob("order-*.json")):
            request = json.loads(path.read_text(encoding="utf-8"))
            if self._execute(request["what"], request["seed"]):
                path.unlink()
        return super()._may_train()

    def _execute(self, what: str, seed: int) -> bool:
        """Execute an order; return whether it succeeded, else it is retried."""
        trainer, deployment = self.trainer, self.deployment
        if what in OFFERED:
            return self._offer(what, seed)
        if what == POISON:
            trainer.draft.take(planted(trainer.snapshot(), Plant(what, NAN), seed))
            return True
        try:
            if what == AGAIN:
                draft = DraftState(trainer.snapshot())
                deployment.republish(draft, {"ordered": what})
            else:
                live = trainer.candidate_tensors(trainer.snapshot())
                current = self.feeds._draft
                self.feeds.publish(
                    to_bytes(spoilt(live, what, seed)), {"ordered": what}
                )
                self.feeds._draft = current  # for engines that join
        except TransportError:
            return False
        return True

    def _offer(self, what: str, seed: int) -> bool:
        trainer, deployment = self.trainer, self.deployment
        if deployment.canary.undecided or deployment.waiting_for:
            return False
        before = trainer.snapshot()
        bad = planted(before, Plant(what, what), seed)
        trainer.draft.take(bad)
        version = deployment.published
        result = CycleResult(0, 0.0, None, None, 0.0, 0.0, True, f"ordered: {what}")
        deployment.offer(result, time.monotonic())
        if deployment.published == version:
            trainer.restore(before)
            return False
        return True


def main() -> int:
    """Run `vllm-tide train` with this sidecar."""
    canary.BACKOFF_CYCLES = 0  # no order waits for the one before
    reservoir.HOLDOUT_TOKENS = trainer.HOLDOUT_TOKENS = 1024  # decided soon
    setattr(loop, "Sidecar", OrderedSidecar)  # noqa: B010 - a class, to mypy a type
    return command(["train", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
