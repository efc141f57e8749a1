"""Lines of TIDE in the server's log: below vLLM's logger, so as its own lines."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path
from threading import Timer
from time import monotonic
from typing import Any

from vllm_tide.capture.policy import REFUSALS
from vllm_tide.config import TideConfig
from vllm_tide.engine.trainer_process import TrainerProcess

logger = logging.getLogger("vllm.tide")

_COUNTS = ("rows", "rounds", "draft_steps", "dropped", "prefix_verified")


def say_start(config: TideConfig, run_dir: Path, longest: int) -> None:
    """Logs what is captured, of whom, where it goes, how to end it, and what learns."""
    capture, everybody = config.capture, config.capture.consent == "opt_out"
    if not capture.enabled or capture.consent == "off":
        logger.info("vllm_tide: captures nothing (tide.capture).")
    else:
        logger.info(
            "vllm_tide: captures tokens and hidden states of %g%% of the requests, of "
            "every tenant, that %s%s, into memory shared with the trainer%s. "
            "`vllm-tide capture off` ends it, tide_capture false spares a request.",
            100 * capture.sample_rate,
            "do not say tide_capture false" if everybody else "say tide_capture true",
            "" if capture.salted else " and have no cache_salt",
            " and to tide.spool.url" if config.spool.url else "",
        )
    logger.info(
        "vllm_tide: run directory %s; policy %r, up to %d draft tokens%s%s.",
        run_dir,
        config.control.policy,
        longest,
        "" if config.swap.enabled else "; drafts are not swapped",
        "" if TrainerProcess.wanted(config) else "; no trainer is started",
    )


class MetricsLine:
    """A line each VLLM_LOG_STATS_INTERVAL with traffic, as vLLM has one.

    Made in the engine core: however many API servers there are, it is said once.
    `longest` is what is drafted where no policy chooses.
    """

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._before: dict[str, Any] = {"prefix_verified": {}}
        self._now = self._before
        self._timer: Timer | None = None

    def observe(self, totals: dict[str, Any]) -> None:
        """Take a report; the line comes even if no step follows."""
        before, self._now = self._before, totals
        if self._timer is None and any(totals.get(k) != before.get(k) for k in _COUNTS):
            from vllm import envs

            self._timer = Timer(envs.VLLM_LOG_STATS_INTERVAL, self._say, [monotonic()])
            self._timer.daemon = True
            self._timer.start()

    def _say(self, since: float) -> None:
        before, self._before, now = self._before, self._now, self._now
        rows, rounds, steps = (now.get(k, 0) - before.get(k, 0) for k in _COUNTS[:3])
        lost: Counter[str] = Counter(now.get("dropped"))
        lost -= Counter(before.get("dropped"))
        said = [
            f"{number} {'requests' if reason in REFUSALS else 'rows'} ({reason})"
            for reason, number in lost.items()
        ]
        trainer = "collects" if now.get("collecting") else "asks for no rows"
        logger.info(
            "TIDE metrics: Draft version: %d, Mean drafted length: %.2f, Captured: "
            "%.1f rows/s, Dropped: %s, Trainer: %s",
            now.get("draft_version", 0),
            steps / rounds if rounds else self._longest,
            rows / (monotonic() - since),
            ", ".join(said) or "nothing",
            trainer if now.get("consumer_alive") else "none",
        )
        self._timer = None
