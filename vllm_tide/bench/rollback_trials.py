"""What became of each planted head, from the trainer's event log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .client import RequestResult
from .learning_events import number
from .rollback_plants import NAN, PERMUTED

_OUTCOMES = {"refused": "refused", "rollback": "rolled_back", "keep": "kept"}


def trials_of(
    events: Sequence[Mapping[str, Any]], results: Sequence[RequestResult]
) -> list[dict[str, Any]]:
    """Return a record for each planted head, in order.

    Args:
        events: Of `TrainerWatch.events`, with `t_s`.
        results: Requests of the arm.

    Returns:
        `plant`, `version`; `outcome`: refused, rolled_back, kept or undecided, with the
        `reason`; `requests_until`: requests that ended between the publication and the
        decision; `requests_on_it`: those that began with the planted head, as the
        trainer counted; `decided_after_s` the publication; `restored_version`, the
        publication that put the good head back.
    """
    ends = sorted(r.end_s for r in results if r.end_s is not None)
    out = []
    for place, event in enumerate(events):
        if event.get("event") != "planted":
            continue
        version = event.get("version")
        # The publication comes right before the note that it was planted.
        began = _time_of(events[: place + 1], "publish", version) or number(
            event.get("t_s")
        )
        verdict = _verdict(events[place + 1 :], version)
        decided = number(verdict.get("t_s"))
        until: int | None = None
        if began is not None and decided is not None:
            until = sum(began < end <= decided for end in ends)
        back = [
            e.get("version")
            for e in events[place + 1 :]
            if e.get("event") == "publish" and e.get("rollback_of") == version
        ]
        out.append(
            {
                "plant": event.get("plant"),
                "version": version,
                "outcome": _OUTCOMES.get(str(verdict.get("event")), "undecided"),
                "reason": verdict.get("reason"),
                "published_s": began,
                "decided_after_s": None
                if began is None or decided is None
                else round(decided - began, 2),
                "requests_until": until,
                "requests_on_it": verdict.get("requests"),
                "restored_version": back[0] if back else None,
            }
        )
    return out


def trial_problems(
    trials: Sequence[Mapping[str, Any]], plants: Sequence[str]
) -> list[str]:
    """Return what must not be: a NaN head that served, a permuted one that stayed.

    A head that is only slightly worse may be kept: it may be within the tolerance.
    """
    found = [
        f"{plant}: was never published"
        for plant in plants
        if plant not in [trial["plant"] for trial in trials]
    ]
    for trial in trials:
        outcome = trial["outcome"]
        if trial["plant"] == NAN and outcome != "refused":
            found.append(f"{NAN}: {outcome}, not refused")
        if trial["plant"] == PERMUTED and outcome not in ("refused", "rolled_back"):
            found.append(f"{PERMUTED}: {outcome}, not rolled back")
    return found


def table(trials: Sequence[Mapping[str, Any]]) -> str:
    """Return the closing table."""
    lines = [f"{'planted':12}{'outcome':>13}{'requests':>10}{'on it':>7}  reason"]
    for trial in trials:
        cells = [
            "-" if trial[key] is None else str(trial[key])
            for key in ("requests_until", "requests_on_it")
        ]
        lines.append(
            f"{trial['plant']!s:12}{trial['outcome']:>13}{cells[0]:>10}{cells[1]:>7}  "
            f"{trial['reason']}"
        )
    return "\n".join(lines)


def _time_of(
    events: Sequence[Mapping[str, Any]], kind: str, version: object
) -> float | None:
    for event in reversed(events):
        if event.get("event") == kind and event.get("version") == version:
            return number(event.get("t_s"))
    return None


def _verdict(events: Sequence[Mapping[str, Any]], version: object) -> Mapping[str, Any]:
    for event in events:
        if event.get("event") in _OUTCOMES and event.get("version") == version:
            return event
    return {}
