"""Pieces of a report's HTML; what it tells a stranger of suites and arms."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from .control_arms import STATIC

SUITES = {
    "control": "How fast is each speculation policy, by requests in flight?",
    "traces": "How long do requests of recorded traces take under each policy?",
    "ablation": "What does each part of adaspec bring?",
    "learning": "Does a draft that learns while it serves follow shifting traffic?",
    "day0": "How soon is a random draft, trained while it serves, a good one?",
    "loss": "Which training loss gives the best acceptance length?",
    "rollback": "Are bad drafts refused or taken back, after how many requests?",
    "multi": "Two servers, two domains, one trainer: do both drafts get better?",
}
_ARMS = {
    "none": "no speculation",
    "threshold": "drafts while its mean confidence is high",
    "tide_gate": "a fixed length, on and off by predicted speed-up",
    "vllm_dynamic": "vLLM's length by batch size",
    "vllm_adaptive": "vLLM's adaptive verification",
    "adaspec": "the length of most predicted tokens/s, step by step",
    "adaspec_adaptive": "adaspec, its drafts cut by vLLM's adaptive verification",
    "adaspec_drafter": "adaspec that verifies all it drafts, uncalibrated",
    "adaspec_verifier": "adaspec, uncalibrated",
    "adaspec_calibration": "adaspec",
    "adaspec_slo": "adaspec, told to keep none's P90 time per output token",
    "frozen": "never trained",
    "always": "trained on all new traffic",
    "tide": "trained when acceptance falls",
    "gated": "trained when acceptance of a kind of requests falls",
    "none-again": "none at the end: the machine's own drift",
    "fresh": "random at first, trained while it serves",
    "ceiling": "like fresh, but trained offline",
    "planted": "a good draft with bad ones between",
}


def text(value: Any, digits: int = 2) -> str:
    """A value for a cell, escaped."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, float):
        return f"{value:.{digits}f}"
    return escape(str(value))


def note(words: str) -> str:
    """An explanation, of HTML."""
    return f'<p class="note">{words}</p>'


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; cells are HTML, heads are not."""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f'<div class="wide"><table><tr>{top}</tr>{body}</table></div>'


def arms_told(arms: Iterable[str]) -> str:
    """What arms do, as far as that is known."""
    told = {escape(arm): _told(*arm.partition("@")) for arm in arms}
    shown = (f"<strong>{a}</strong>: {words}" for a, words in told.items() if words)
    return note("; ".join(shown))


def _told(name: str, at: str, number: str) -> str:
    static = STATIC.match(name)
    words = f"always {static[1]} draft tokens" if static else _ARMS.get(name, "")
    if at and words:
        what = (
            "given the limit at scale" if "adaspec" in name else "least requests apart"
        )
        words += f", {what} {escape(number)}"
    return words
