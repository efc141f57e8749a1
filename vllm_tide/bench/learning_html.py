"""What the HTML report shows of a suite that learns while it serves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from .control_plots import learning_over_time
from .html_parts import arms_told, note, table, text

Json = Mapping[str, Any]
_LEGEND = note(
    "Acceptance length: tokens of a step that drafts, 1 if all it drafted is rejected. "
    "Dotted: the next part of the stream begins, triangle: a newly trained draft is "
    "served, for the arm of that colour. Shifted: after the traffic changed."
)
_LOSSES = note(
    "Acceptance length on held-out requests. Greedy: nothing is sampled; mass: draft "
    "and target sample; argmax mass: the target only. Gain: over the first draft."
)
# Long, and of use to a program only.
_LEFT_OUT = ("jobs", "offline", "trainer")
_COLUMNS = (
    "arm",
    "num requests",
    "failed requests",
    "output tokens per s",
    "shifted, output tokens per s",
    "acceptance length",
    "shifted, acceptance length",
    "training s",
    "acceptance length before first swap",
    "acceptance length last part",
    "swaps, count",
    "swaps, pause ms max",
)


def learning(results: Json) -> str:
    """Return plots and tables of a suite's `results`."""
    parts = [_LOSSES] if "jobs" in results else []
    # Lists first: they are the answer where there are any.
    for name, found in sorted(
        results.items(), key=lambda x: not isinstance(x[1], list)
    ):
        if name in _LEFT_OUT:
            continue
        parts.append(f"<h2>{escape(name.capitalize())}</h2>")
        items = found.items() if isinstance(found, dict) else ()
        arms = {k: v for k, v in items if isinstance(v, dict) and "windows" in v}
        if arms:
            parts += [arms_told(arms), learning_over_time(arms), _LEGEND]
            rows = [{"arm": arm, **figures} for arm, figures in arms.items()]
            parts.append(_records(rows, _COLUMNS))
        elif isinstance(found, list):
            parts.append(_records(found))
        else:
            parts.append(table(("figure", "value"), _flat(found)))
    return "".join(parts)


def _records(rows: Sequence[Json], names: Sequence[str] = ()) -> str:
    """A table of objects: some of their figures, or all."""
    flat = [dict(_flat(row)) for row in rows]
    every = names or list(dict.fromkeys(name for row in flat for name in row))
    shown = [
        name
        for name in every
        if any(row.get(name, "-") != "-" for row in flat) and "spread" not in name
    ]
    return table(shown, ([row.get(name, "-") for name in shown] for row in flat))


def _flat(found: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Names and values of an object and those in it, as HTML."""
    if isinstance(found, dict):
        for key, value in found.items():
            yield from _flat(value, f"{name}, {key}".strip(", ").replace("_", " "))
    elif not isinstance(found, list):
        yield escape(name), text(found, 3)
    elif found:
        yield escape(name), ", ".join(text(value, 3) for value in found)
