"""Lines of TIDE in the server's log: below vLLM's logger, so as its own lines."""

from __future__ import annotations

import logging
from pathlib import Path

from vllm_tide.config import TideConfig
from vllm_tide.engine.trainer_process import TrainerProcess
from vllm_tide.speculative import notes

logger = logging.getLogger("vllm.tide")


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
    for note in notes(config, longest):
        logger.warning("vllm_tide: %s", note)
    logger.info(
        "vllm_tide: run directory %s; policy %r, up to %d draft tokens%s%s.",
        run_dir,
        config.control.policy,
        longest,
        "" if config.swap.enabled else "; drafts are not swapped",
        "" if TrainerProcess.wanted(config) else "; no trainer is started",
    )
