"""Plot of a quickstart run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

Json = Mapping[str, Any]
WINDOW_REQUESTS = 8
"""Requests of the moving mean, within one phase."""
PICTURE_ARMS = {
    "none": ("no speculation", "#7f7f7f"),
    "frozen": ("frozen draft, best static length", "#1f77b4"),
    "control": ("frozen draft, control and memory", "#2ca02c"),
    "tide": ("vllm_tide: draft trained while it serves", "#d62728"),
}


def _moving_mean(values: Sequence[float], shifts: Sequence[int]) -> list[float]:
    """Return means over the last `WINDOW_REQUESTS`, restarted at each shift."""
    means = []
    for i in range(len(values)):
        shift = max((at for at in shifts if at <= i), default=0)
        begin = max(shift, i + 1 - WINDOW_REQUESTS)
        part = values[begin : i + 1]
        means.append(sum(part) / len(part))
    return means


def draw(report: Json, path: Path) -> None:
    """Plot acceptance and time saved from a quickstart's report.

    The x axis is the request index, because all arms serve the same requests. Above:
    tokens per engine step. Below: time of `none` over the time of the arm.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    stream = report["environment"]["stream"]
    shifts = list(accumulate(stream["counts"][:-1]))
    arms = {
        name: report["arms"][name] for name in PICTURE_ARMS if name in report["arms"]
    }
    spent: dict[str, list[float]] = {}
    ends: list[tuple[float, float, str]] = []
    figure, axes = plt.subplots(2, 1, figsize=(9, 5.4), squeeze=False, sharex=True)
    above, below = axes[:, 0]
    for name, arm in arms.items():
        label, color = PICTURE_ARMS[name]
        requests = arm["requests"]
        seconds = zip(requests["start_s"], requests["end_s"], strict=True)
        spent[name] = _moving_mean([end - start for start, end in seconds], shifts)
        index = range(1, len(spent[name]) + 1)
        style = {"color": color, "linewidth": 2.4 if name == "tide" else 1.5}
        if name in ("frozen", "tide"):
            above.plot(
                index, _moving_mean(requests["tokens_per_step"], shifts), **style
            )
        if "none" in spent:
            pairs = zip(spent["none"], spent[name], strict=True)
            ratios = [none / own for none, own in pairs]
            below.plot(index, ratios, label=label, **style)
            ends.append((ratios[-1], index[-1] + 0.5, color))
    low, high = below.get_ylim()
    lowest = low
    for ratio, right, color in sorted(ends):  # labels do not overlap
        at = max(ratio, lowest)
        lowest = at + 0.08 * (high - low)
        below.annotate(
            f"{ratio:.2f}x", (right, at), color=color, va="center",
            annotation_clip=False,
        )  # fmt: skip
    tide = arms.get("tide")
    for t_s in report["swaps"].get("at_s", ()) if tide else ():
        place = sum(end < t_s for end in tide["requests"]["end_s"]) + 1
        for axis in (above, below):
            axis.plot([place], [0.0], "^", color=PICTURE_ARMS["tide"][1], clip_on=False,
                      transform=axis.get_xaxis_transform())  # fmt: skip
    for axis, label in ((above, "tokens per step"), (below, "times as fast as none")):
        for shift in shifts:
            axis.axvline(shift + 0.5, color="black", linestyle=":", linewidth=1.2)
        axis.set_ylabel(label)
        axis.grid(alpha=0.25)
    for first, domain in zip([0, *shifts], stream["domains"], strict=True):
        above.annotate(
            f" {domain}", (first + 0.5, 1.0), xycoords=("data", "axes fraction"),
            va="top",
        )  # fmt: skip
    below.set_xlabel(
        f"requests answered (mean of {WINDOW_REQUESTS}); "
        "triangles: a newly trained draft is served"
    )
    handles, labels = below.get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", ncols=2, frameon=False,
                  bbox_to_anchor=(0.5, 0.94))  # fmt: skip
    gain = report["gain"]
    if {"final_over_frozen", "final_over_none"} <= gain.keys():
        figure.suptitle(
            f"New traffic: {gain['final_over_frozen']:.2f} times the tokens/s of the "
            f"frozen draft, {gain['final_over_none']:.2f} times those without "
            "speculation"
        )
    figure.tight_layout(rect=(0, 0, 0.98, 0.88))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)
