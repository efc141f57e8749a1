"""What the server's log says of TIDE.

Loggers below `vllm` share vLLM's handler, format and level (VLLM_LOGGING_LEVEL).
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from threading import Timer
from typing import Any

from vllm_tide.capture.policy import REFUSALS
from vllm_tide.config import TideConfig

logger = logging.getLogger("vllm.tide")

_WHO = {
    "opt_out": "requests but those with vllm_xargs tide_capture false",
    "opt_in": "requests with vllm_xargs tide_capture true",
}


def say_start(config: TideConfig, run_dir: Path, engine: str, longest: int) -> None:
    """Say what is captured, from whom, where it goes and how to end it; what learns.

    Args:
        config: The `tide` section.
        run_dir: Where engine and trainer meet.
        engine: Its id.
        longest: num_speculative_tokens.
    """
    capture = config.capture
    if not capture.enabled or capture.consent == "off":
        knob = "consent is 'off'" if capture.enabled else "enabled is false"
        logger.info("vllm_tide: captures nothing: tide.capture.%s.", knob)
    else:
        logger.info(
            "vllm_tide: captures tokens and hidden states of %g%% of all %s%s, of "
            "every tenant, into shared memory for the trainers of run directory %s%s. "
            "`vllm-tide capture off` ends it, tide_capture false keeps a request out.",
            100 * capture.sample_rate,
            _WHO[capture.consent],
            "" if capture.salted else " or with a cache_salt",
            run_dir,
            " and the spool" if config.spool.url else "",
        )
    starts = config.train.autostart and capture.enabled and not config.spool.url
    logger.info(
        "vllm_tide: engine %s, policy %r, up to %d draft tokens; drafts are %sswapped; "
        "the trainer is %sstarted with the server.",
        engine,
        config.control.policy,
        longest,
        "" if config.swap.enabled else "not ",
        "" if starts else "not ",
    )


class MetricsLine:
    """One line each VLLM_LOG_STATS_INTERVAL with traffic, as vLLM's of speculation.

    From the engine core: once per engine, however many API servers there are, and none
    with --disable-log-stats, which asks for no numbers here.

    Args:
        longest: num_speculative_tokens, drafted where no policy chooses.
    """

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._before: dict[str, Any] = {}
        self._now: dict[str, Any] = {}
        self._since = 0.0
        self._timer: Timer | None = None

    def observe(self, report: dict[str, Any]) -> None:
        """Take a worker's totals; the line comes even if no step follows."""
        self._now = report
        if self._timer is None and _traffic(report) > _traffic(self._before):
            from vllm import envs

            self._since = time.monotonic()
            self._timer = Timer(envs.VLLM_LOG_STATS_INTERVAL, self._say)
            self._timer.daemon = True
            self._timer.start()

    def _say(self) -> None:
        before, now, seconds = self._before, self._now, time.monotonic() - self._since
        self._before = now

        def grown(key: str) -> int:
            return now.get(key, 0) - before.get(key, 0)

        rounds, last = grown("rounds"), before.get("dropped", {})
        dropped = {
            reason: total - last.get(reason, 0)
            for reason, total in now.get("dropped", {}).items()
            if total > last.get(reason, 0)
        }
        said = [
            f"{number} {'requests' if reason in REFUSALS else 'rows'} ({reason})"
            for reason, number in dropped.items()
        ]
        trainer = "collects" if now.get("collecting") else "asks for no rows"
        logger.info(
            "TIDE metrics: Draft version: %d, Mean drafted length: %.2f, Captured: "
            "%.1f rows/s, Dropped: %s, Trainer: %s",
            now.get("draft_version", 0),
            grown("draft_steps") / rounds if rounds else self._longest,
            grown("rows") / seconds,
            ", ".join(said) or "nothing",
            trainer if now.get("consumer_alive") else "none",
        )
        self._timer = None


def _traffic(totals: dict[str, Any]) -> int:
    counts = [totals.get("rows", 0), totals.get("rounds", 0)]
    for key in "dropped", "prefix_verified":
        counts += totals.get(key, {}).values()
    return sum(counts)
