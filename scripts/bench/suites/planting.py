"""Trainer that publishes planted bad drafts, run as a script.

It is the real trainer (feeds, canary, rollback, status, events) except for training: it
waits for a command in the run directory, corrupts the first draft (NaN, permuted rows,
or noise), and offers it as a candidate that passed the held-out gate.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm_tide.config import TideConfig, parse_tide
from vllm_tide.deploy import canary, schedule
from vllm_tide.deploy.deployment import DraftState
from vllm_tide.sidecar.loop import Sidecar, prepare_process
from vllm_tide.speculative import read_json_object
from vllm_tide.train.judgement import CycleResult
from vllm_tide.transport.feeds import Feeds, open_feeds
from vllm_tide.transport.process import stopped_by_signals

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]
from bench.harness.common import BenchError

NAN, PERMUTED, NOISE = "nan", "permuted", "noise"


@dataclass(frozen=True, slots=True)
class Plant:
    """Kind and strength of a planted draft."""

    name: str  # as on the command line
    kind: str  # `nan`, `permuted` or `noise`
    # Standard deviation of the noise, as a share of each tensor's.
    noise: float = 0.0


def parse_plant(text: str) -> Plant:
    """Parse `nan`, `permuted` or `noise0.1`."""
    if text in (NAN, PERMUTED):
        return Plant(text, text)
    try:
        share = float(text.removeprefix(NOISE)) if text.startswith(NOISE) else 0.0
    except ValueError:
        share = 0.0
    if not 0 < share < 100:
        raise BenchError(
            f"--plants: unknown plant {text!r}; give nan, permuted, or noise with its "
            "share, such as noise0.1"
        )
    return Plant(text, NOISE, share)


def planted(
    tensors: Mapping[str, Tensor], plant: Plant, seed: int
) -> dict[str, Tensor]:
    """Return a corrupted copy of a draft with the same shapes and types.

    * `nan`: one weight of `fc` is NaN;
    * `permuted`: permute the rows of every matrix except embeddings and output rows;
    * `noise`: add Gaussian noise to every float tensor.
    """
    random = torch.Generator().manual_seed(seed)
    out = {name: tensor.clone() for name, tensor in tensors.items()}
    if plant.kind == NAN:
        (name,) = [name for name in out if name.endswith("fc.weight")]
        out[name].view(-1)[0] = float("nan")
        return out
    for name, tensor in out.items():
        if not tensor.is_floating_point():
            continue
        if plant.kind == NOISE:
            wide = tensor.float()
            added = torch.randn(tensor.shape, generator=random) * wide.std()
            tensor.copy_(wide + plant.noise * added)
        elif tensor.dim() == 2 and not name.endswith(
            ("lm_head.weight", "tokens.weight")
        ):
            tensor.copy_(tensor[torch.randperm(tensor.shape[0], generator=random)])
    return out


PLANTED = "planted"
"""Event of a published planted draft: `plant`, `version`, `offers`."""
ATTACH_S = 60.0


def order_path(run_dir: Path, place: int) -> Path:
    """Return the file that requests the planted draft of an index (0, 1, ...)."""
    return run_dir / f"plant-{place:03d}.json"


def order(run_dir: Path, place: int, plant: str, seed: int) -> None:
    path = order_path(run_dir, place)
    staged = path.with_suffix(".new")
    staged.write_text(json.dumps({"plant": plant, "seed": seed}), encoding="utf-8")
    os.replace(staged, path)


class PlantingSidecar(Sidecar):
    """A sidecar that offers planted drafts.

    Args:
        feeds: Feeds with an attached engine.
        run_dir: Folder of the order files.
        config: The `tide` section.
    """

    def __init__(self, feeds: Feeds, run_dir: Path, config: TideConfig) -> None:
        self._orders, self._place, self._offers = run_dir, 0, 0
        super().__init__(feeds, run_dir, config)
        self._first = self.trainer.snapshot()
        self._planted: set[int] = set()

    def _tick(self) -> bool:
        """Tick; replace a planted draft that the canary accepted by the first draft.

        Every case then begins with the good draft and a window of its requests.
        """
        going = super()._tick()
        deployment = self.deployment
        if deployment.good in self._planted:
            self._planted.remove(deployment.good)
            deployment.republish(DraftState(self._first), {"restored": 0})
            deployment.canary.restart()
        return going

    def _may_train(self) -> bool:
        ordered = order_path(self._orders, self._place).exists()
        return ordered and not self.deployment.canary.undecided

    def _train(self) -> None:
        path = order_path(self._orders, self._place)
        command: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        plant = parse_plant(command["plant"])
        corrupted = planted(self._first, plant, command["seed"])
        self.trainer.draft.take(corrupted)
        before = self.deployment.published
        result = CycleResult(
            steps=0,
            loss=0.0,
            new=None,
            live=None,
            gain=0.0,
            gain_error=0.0,
            publish=True,
            reason=f"planted {plant.name}",
        )
        self.deployment.offer(result, time.monotonic())
        self._offers += 1
        if self.deployment.published == before:
            time.sleep(0.05)
            return
        self._planted.add(self.deployment.published)
        self.report.add(
            PLANTED,
            plant=plant.name,
            version=self.deployment.published,
            offers=self._offers,
        )
        self._place, self._offers = self._place + 1, 0


def _wait_for_engine(run_dir: Path) -> Feeds:
    feeds = open_feeds(run_dir)
    deadline = time.monotonic() + ATTACH_S
    while not len(feeds):
        feeds.poll()
        if time.monotonic() > deadline:
            raise SystemExit(f"error: no live engine in {run_dir}")
        time.sleep(0.1)
    return feeds


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--config", required=True)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    config = parse_tide(read_json_object(args.config)["tide"])
    schedule.EPSILON = 1.0  # disable shift detection
    # The cases are independent, so there is no backoff after a rollback.
    canary.BACKOFF_CYCLES = 0
    feeds = _wait_for_engine(args.run_dir)
    prepare_process(config.train, feeds.ids[0])
    sidecar = PlantingSidecar(feeds, args.run_dir, config)
    with stopped_by_signals(sidecar.stop):
        sidecar.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
