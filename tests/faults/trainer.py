"""The real trainer, which also publishes what it is told to.

It trains, deploys and rolls back as `vllm-tide train` does. Between two cycles it
carries out orders from the run directory: a head that is spoilt in some way is
published as if a cycle had made it.
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
from vllm_tide.deploy.deployment import Master, as_wire
from vllm_tide.sidecar import loop
from vllm_tide.train import reservoir, trainer
from vllm_tide.train.judgement import CycleResult
from vllm_tide.transport.shm import TransportError

PASSED_ON = ("shape", "names", "dtype", "norm")
"""Spoilt so that no trainer of ours could make it: published as it is."""
OFFERED = ("nan", "permuted")
"""Offered as a candidate that passed the held-out gate: refusal or trial follows."""
AGAIN = "again"
"""The good head once more."""
SURENESS = {"whole": 1.0, "sure": 8.0, "unsure": 0.125}
"""Passed on: the live head, and ones of the same best tokens whose logits are times so
much. Like `SWAPPED` heads the trainer does not know that they are served."""
SWAPPED = "swapped"
"""Passed on: permuted."""
POISON = "poison"
"""Nothing is published: the candidate in the trainer's memory becomes NaN."""


def order(run_dir: Path, what: str, seed: int) -> Path:
    """Order a head, atomically; the file is gone when the order was carried out."""
    path = run_dir / f"order-{time.time_ns()}-{secrets.token_hex(2)}.json"
    staged = path.with_suffix(".new")
    staged.write_text(json.dumps({"what": what, "seed": seed}), encoding="utf-8")
    os.replace(staged, path)
    return path


def spoilt(tensors: Master, what: str, seed: int) -> Master:
    """A head that the engine must refuse, or that is not the one it should be.

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
    """A sidecar that carries out orders between two cycles."""

    def _may_train(self) -> bool:
        for path in sorted(self._run_dir.glob("order-*.json")):
            order = json.loads(path.read_text(encoding="utf-8"))
            if self._carry_out(order["what"], order["seed"]):
                path.unlink()
        return super()._may_train()

    def _carry_out(self, what: str, seed: int) -> bool:
        """Whether it could be; if not, it is tried again."""
        trainer, deployment = self.trainer, self.deployment
        if what in OFFERED:
            return self._offer(what, seed)
        if what == POISON:
            trainer.draft.take(planted(trainer.snapshot(), Plant(what, NAN), seed))
            return True
        try:
            if what == AGAIN:
                deployment.republish(trainer.snapshot(), {"ordered": what})
            else:
                live = trainer.candidate_tensors(trainer.snapshot())
                self.feeds.publish(
                    as_wire(spoilt(live, what, seed)),
                    parent_version=deployment.published,
                    meta={"ordered": what},
                    engines=self.feeds.ids,
                )
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
    reservoir.HOLDOUT_TOKENS = trainer.HOLDOUT_TOKENS = 1024  # judged soon
    setattr(loop, "Sidecar", OrderedSidecar)  # noqa: B010 - a class, to mypy a type
    return command(["train", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
