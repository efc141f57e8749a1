"""Log lines of TIDE in the server's log, through a child of vLLM's logger."""

from __future__ import annotations

import logging
import os
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_tide.capture.policy import ARGUMENTS
from vllm_tide.capture.switch import OFF, PAUSED, Switch
from vllm_tide.config import TideConfig, starts_trainer
from vllm_tide.speculative import notes, why_no_capture

logger = logging.getLogger("vllm.tide")


def log_start(config: TideConfig, run_dir: Path, longest: int) -> None:
    """Log what is captured and how to stop it, and the configuration of learning."""
    capture, opt_out = config.capture, config.capture.consent == "opt_out"
    folder = config.train.state_dir
    is_off = any(Switch(run_dir, name, folder).on for name in (OFF, PAUSED))
    if off := why_no_capture(config):
        logger.info("vllm_tide: captures nothing, as %s.", off)
    else:
        logger.info(
            "vllm_tide: captures tokens and hidden states of %s%s of all tenants%s, "
            "into shared memory%s. `vllm-tide capture off` stops it; "
            "tide_capture false in vllm_xargs excludes a request.%s",
            f"{100 * capture.sample_rate:g}% of " if capture.sample_rate < 1 else "",
            "all requests" if opt_out else "requests with tide_capture true",
            "" if capture.salted else " (not those with a cache_salt)",
            " and for tide.spool.url" if config.spool.url else "",
            " It is off now (`vllm-tide status`)." if is_off else "",
        )
    for note in notes(config, longest):
        logger.warning("vllm_tide: %s", note)
    logger.info(
        "vllm_tide: run directory %s; policy %r, up to %d draft tokens%s%s%s%s.",
        run_dir,
        config.control.policy,
        longest,
        "; n-gram memory" if config.test_time.memory == "ngram" else "",
        "" if (adapt := config.test_time.adapt) == "off" else f"; adaptation {adapt!r}",
        "" if config.swap.enabled else "; drafts are not swapped",
        "" if starts_trainer(config) else "; no trainer is started",
    )


_PERIOD_S = 10.0
_FEWEST_STEPS = 20  # per evaluation of whether drafting is off
_OFF, _ON = 0.9, 0.5  # share of steps without drafts
_WHY = {
    "no_gain": "no draft length is predicted to be faster (tide.control.min_gain)",
    "slo": "drafting is predicted to exceed a TPOT limit",
}
# Errors in requests, by reason of dropped rows and of malformed limits.
_ARGUMENTS = {
    "unknown_key": f"a tide_ key is not one of {', '.join(ARGUMENTS)}; such "
    "requests are not captured",
    "malformed_opt_out": "tide_capture is neither true nor false; such requests are "
    "not captured",
    "malformed_tenant": "tide_tenant is not a string of 1 to 256 characters; such "
    "requests are not captured",
    "ignored_limits": "tide_slo_tpot_ms is ignored, as "
    "tide.control.client_slo_tpot_ms is null",
    "malformed_limits": "tide_slo_tpot_ms is not a positive number and is ignored",
}


class ServerLog:
    """Log of changes while a worker serves, one line per change."""

    def __init__(self) -> None:
        self._collecting = True
        self._next = 0.0
        self._steps, self._off = 0, Counter[str]()
        self._why = ""
        self._noted: set[str] = set()

    def collect(self, collecting: bool) -> None:
        """Log whether the trainer requests rows, if that has changed."""
        if collecting != self._collecting:
            self._collecting = collecting
            logger.info(
                "vllm_tide: the trainer requests %s.",
                "rows again" if collecting else "no rows: it is paused",
            )

    def report(self, report: Mapping[str, Any], now: float) -> None:
        """Log changes in a report: errors in requests, drafting on or off."""
        names = ("malformed_limits", "ignored_limits")
        limits = {name: report.get(name, 0) for name in names}
        for reason, count in {**report.get("dropped", {}), **limits}.items():
            if count and reason in _ARGUMENTS and reason not in self._noted:
                self._noted.add(reason)
                logger.warning(
                    "vllm_tide: in vllm_xargs of a request, %s (%s; logged once).",
                    _ARGUMENTS[reason],
                    reason,
                )
        if "steps" in report and now >= self._next:
            self._drafting(report["steps"], report["steps_without_drafts"], now)

    def _drafting(self, steps: int, without: Mapping[str, int], now: float) -> None:
        if steps < self._steps:  # control was restarted
            self._steps, self._off = 0, Counter()
        grown = steps - self._steps
        if grown < _FEWEST_STEPS:
            return
        off = {reason: without.get(reason, 0) - self._off[reason] for reason in _WHY}
        self._next, self._steps = now + _PERIOD_S, steps
        self._off = Counter(without)
        reason, share = max(off, key=lambda name: off[name]), sum(off.values()) / grown
        why = "" if share <= _ON else reason if share >= _OFF else self._why
        if why == self._why:
            return
        self._why = why
        if not why:
            logger.info("vllm_tide: drafting is on again (%d steps).", grown)
            return
        logger.info(
            "vllm_tide: drafting is off (%s in %.0f%% of %d steps): %s.",
            why,
            100 * off[why] / grown,
            grown,
            _WHY[why],
        )


_EVENT = re.compile(r" INFO event=(\w+) (.*)$")
_RELAY_ERROR = re.compile(r" vllm_tide\.relay ERROR (.*)$")
_CYCLE = re.compile(r"cycle=(\d+) .*\breason=(.*)$")
_REPEATED = (
    "publish", "unpublished", "keep", "rollback", "refused", "purge", "shift",
    "state_dir_shared",
)  # fmt: skip
_MOST_BYTES = 1 << 20


class TrainerLog:
    """Copy of events of the trainer or relay in the server's log; they log to a file.

    Events consist of numbers and fixed words, without content of requests. A relay's
    event is an error of the storage, which it logs once per cause.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._at, self._next = path, 0, 0.0

    def repeat_new(self, now: float) -> None:
        """Log new events; at most one training cycle per ten seconds."""
        try:
            with self._path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < self._at:
                    self._at = 0  # truncated
                file.seek(self._at)
                data = file.read(_MOST_BYTES)
        except OSError:
            return
        whole = data if len(data) == _MOST_BYTES else data[: data.rfind(b"\n") + 1]
        self._at += len(whole)
        for line in whole.decode("ascii", "replace").splitlines():
            if event := _EVENT.search(line):
                self._repeat(event[1], event[2], now)
            elif error := _RELAY_ERROR.search(line):
                logger.error("vllm_tide: relay, %s", error[1])

    def _repeat(self, event: str, facts: str, now: float) -> None:
        cycle = _CYCLE.search(facts) if event == "cycle" else None
        if cycle and now >= self._next:
            self._next = now + _PERIOD_S
            logger.info("vllm_tide: trainer, cycle %s: %s", cycle[1], cycle[2])
        elif event in _REPEATED:
            logger.info("vllm_tide: trainer, %s: %s", event, facts)
