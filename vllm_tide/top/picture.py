"""All figures of one moment: what the screen shows and `--json` prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from vllm_tide.top.local_figures import (
    EngineFigures,
    TrainerFigures,
    engine_figures,
    trainer_figures,
)
from vllm_tide.top.samples import Sample
from vllm_tide.top.server_figures import ServerFigures, server_figures

OLD_S = 3600.0
"""Status files of trainers that ended longer ago (s) are counted, not shown."""


@dataclass(frozen=True, slots=True)
class Picture:
    """One moment.

    Attributes:
        old_trainers: Status files not shown.
    """

    unix_s: float
    run_dir: str
    servers: list[ServerFigures]
    engines: list[EngineFigures]
    trainers: list[TrainerFigures]
    old_trainers: int

    @property
    def empty(self) -> bool:
        """Whether nobody lives: no engine, no trainer, no server that answers."""
        return not (
            any(not server.error for server in self.servers)
            or any(engine.alive is not False for engine in self.engines)
            or any(trainer.running for trainer in self.trainers)
        )

    def to_json(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)


def make_picture(history: Sequence[Sample], run_dir: str) -> Picture:
    """Figures from the samples of the last seconds.

    Args:
        history: Samples, oldest first; not empty.
        run_dir: Shown.
    """
    now = history[-1]
    shown = [look for look in now.trainers if look.age_s < OLD_S]
    return Picture(
        unix_s=now.unix_s,
        run_dir=run_dir,
        servers=[server_figures(history, url) for url in now.pages],
        engines=[engine_figures(history, look) for look in now.engines],
        trainers=[trainer_figures(look, now.unix_s) for look in shown],
        old_trainers=len(now.trainers) - len(shown),
    )
