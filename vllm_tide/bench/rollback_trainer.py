"""A trainer whose candidates are planted: `python -m vllm_tide.bench.rollback_trainer`.

The real one (feeds, canary, rollback, status, events) but for one thing: instead of
training it waits for an order in the run directory, spoils the first head as ordered,
and offers that as a candidate which passed the held-out gate.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

from vllm_tide.config import TideConfig, parse_tide
from vllm_tide.speculative import read_json_object
from vllm_tide.train.events import EventLog
from vllm_tide.train.feeds import Feeds, open_feeds
from vllm_tide.train.judgement import CycleResult
from vllm_tide.train.prepare import prepare_process
from vllm_tide.train.sidecar import Sidecar, install_signal_handlers

from .rollback_plants import parse_plant, planted

PLANTED = "planted"
"""Event of a published planted head: `plant`, `version`, `offers`."""
ATTACH_S = 60.0


def order_path(run_dir: Path, place: int) -> Path:
    """Return the file that orders the planted head of a place (0, 1, ...)."""
    return run_dir / f"plant-{place:03d}.json"


def order(run_dir: Path, place: int, plant: str, seed: int) -> None:
    """Order a planted head, atomically."""
    path = order_path(run_dir, place)
    staged = path.with_suffix(".new")
    staged.write_text(json.dumps({"plant": plant, "seed": seed}), encoding="utf-8")
    os.replace(staged, path)


class PlantingSidecar(Sidecar):
    """A sidecar that offers planted heads.

    Args:
        feeds: The engine has joined.
        run_dir: Where orders are.
        config: Its `tide` section.
    """

    def __init__(self, feeds: Feeds, run_dir: Path, config: TideConfig) -> None:
        self._orders, self._place, self._offers = run_dir, 0, 0
        super().__init__(feeds, run_dir, config)
        self._first = self.trainer.snapshot()
        self._planted: set[int] = set()
        self._log = EventLog(run_dir, feeds.ids[0])

    def _tick(self) -> bool:
        """Also: a planted head that was kept gives way to the first one again.

        So every case begins with the good head and a window of its requests.
        """
        going = super()._tick()
        deployment = self.deployment
        if deployment.good in self._planted:
            self._planted.remove(deployment.good)
            deployment.put_back(self._first, {"restored": 0})
            deployment.canary.restart()
        return going

    def _may_train(self) -> bool:
        ordered = order_path(self._orders, self._place).exists()
        return ordered and not self.deployment.canary.undecided

    def _train(self) -> None:
        """Offer the ordered head; again with the next tick if it has to wait."""
        path = order_path(self._orders, self._place)
        wanted: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        plant = parse_plant(wanted["plant"])
        spoilt = planted(self._first, plant, wanted["seed"])
        self.trainer.draft.take(spoilt)
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
        self._log.add(
            PLANTED,
            plant=plant.name,
            version=self.deployment.published,
            offers=self._offers,
        )
        self._place, self._offers = self._place + 1, 0


def _wait_for_engine(run_dir: Path) -> Feeds:
    feeds = open_feeds(run_dir)
    until = time.monotonic() + ATTACH_S
    while not len(feeds):
        feeds.poll()
        if time.monotonic() > until:
            raise SystemExit(f"error: no live engine in {run_dir}")
        time.sleep(0.1)
    return feeds


def main() -> int:
    """Run until stopped."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--config", required=True)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    config = parse_tide(read_json_object(args.config)["tide"])
    feeds = _wait_for_engine(args.run_dir)
    prepare_process(config.train, feeds.ids[0])
    sidecar = PlantingSidecar(feeds, args.run_dir, config)
    install_signal_handlers(sidecar)
    sidecar.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
