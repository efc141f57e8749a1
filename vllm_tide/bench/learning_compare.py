"""What the arms of the learning suite are to each other, on one kind of traffic."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .learning_events import number
from .learning_summary import rounded

TRAINED = ("always", "tide", "gated")


def compare_arms(arms: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Compare the arms over the shifted part.

    Args:
        arms: `arm_figures` by name, of one kind of traffic.

    Returns:
        `over_frozen` and `over_none`: ratios of output tokens/s; `against_always`, by
        gated arm: `training_s_ratio`; `gain_share`, its gain in tokens/s over the
        frozen draft as a share of always-training's; `tokens_per_s_ratio`;
        `segments`: by segment and arm the ratio to the frozen draft.
    """
    speed = {name: _speed(figures) for name, figures in arms.items()}
    found: dict[str, Any] = {
        f"over_{base}": {
            name: rounded(_ratio(speed[name], speed.get(base)))
            for name in arms
            if name != base
        }
        for base in ("frozen", "none")
        if base in arms
    }
    found["against_always"] = {
        name: _against_always(name, arms, speed)
        for name in ("tide", "gated")
        if name in arms and "always" in arms
    }
    found["segments"] = _segments(arms)
    return found


def verdicts(comparison: Mapping[str, Any]) -> dict[str, bool | None]:
    """Return whether the goals are met; None where it cannot be said.

    The best trained arm serves at least 1.25 times the frozen draft's tokens/s, and
    the gated one trains at most half as long as always for 97% of its gain.
    """
    over = [
        value
        for name, value in comparison.get("over_frozen", {}).items()
        if name in TRAINED and value is not None
    ]
    gated = comparison.get("against_always", {}).get("gated", {})
    ratio, share = gated.get("training_s_ratio"), gated.get("gain_share")
    return {
        "1.25_times_frozen": max(over) >= 1.25 if over else None,
        "gated_trains_half": None if ratio is None else ratio <= 0.5,
        "gated_has_97_percent_of_gain": None if share is None else share >= 0.97,
    }


def table(arms: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the closing table of one kind of traffic."""
    rows: list[tuple[str, list[Any]]] = [
        ("output tokens/s", [f.get("output_tokens_per_s") for f in arms.values()]),
        ("  shifted part", [_speed(f) for f in arms.values()]),
        ("acceptance length", [f.get("acceptance_length") for f in arms.values()]),
    ]
    names = {s["name"] for f in arms.values() for s in f.get("segments", ())}
    for name in sorted(names):
        cells = [
            next(
                (
                    s["acceptance_length"]
                    for s in f.get("segments", ())
                    if s["name"] == name
                ),
                None,
            )
            for f in arms.values()
        ]
        rows.append((f"  {name}", cells))
    rows.append(("training, s", [f.get("training_s") for f in arms.values()]))
    rows.append(("swaps", [f.get("swaps", {}).get("count") for f in arms.values()]))
    rows.append(("failed requests", [f.get("failed_requests") for f in arms.values()]))
    lines = [f"{'':26}" + "".join(f"{name:>10}" for name in arms)]
    lines += [
        f"{label:26}" + "".join(f"{_cell(cell):>10}" for cell in cells)
        for label, cells in rows
    ]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def _speed(figures: Mapping[str, Any]) -> float | None:
    return number(figures.get("shifted", {}).get("output_tokens_per_s"))


def _ratio(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None


def _against_always(
    name: str,
    arms: Mapping[str, Mapping[str, Any]],
    speed: Mapping[str, float | None],
) -> dict[str, Any]:
    trained = number(arms[name].get("training_s"))
    frozen, always, mine = speed.get("frozen"), speed["always"], speed[name]
    gain: float | None = None
    # A share of no gain says nothing.
    if None not in (frozen, always, mine) and always > frozen:  # type: ignore[operator]
        gain = (mine - frozen) / (always - frozen)  # type: ignore[operator]
    return {
        "training_s_ratio": rounded(
            _ratio(trained, number(arms["always"].get("training_s")))
        ),
        "gain_share": rounded(gain),
        "tokens_per_s_ratio": rounded(_ratio(mine, always)),
    }


def _segments(arms: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    frozen = {
        segment["name"]: number(segment.get("output_tokens_per_s"))
        for segment in arms.get("frozen", {}).get("segments", ())
    }
    out: dict[str, dict[str, Any]] = {}
    for name, figures in arms.items():
        for segment in figures.get("segments", ()) if name != "frozen" else ():
            base = frozen.get(segment["name"])
            ratio = _ratio(number(segment.get("output_tokens_per_s")), base)
            out.setdefault(segment["name"], {})[name] = rounded(ratio)
    return out
