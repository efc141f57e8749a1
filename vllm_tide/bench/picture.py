"""The picture of a run: acceptance length and output rate over time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .scrape import ACCEPTED, DRAFTS, GENERATED, SWAPS, Scrape
from .stream import AFTER_SHIFT
from .summary import ArmRun

WINDOW_S = 12.0
COLORS = {"none": "#7f7f7f", "frozen": "#1f77b4", "tide": "#d62728"}
LABELS = {
    "none": "none: no speculation",
    "frozen": "frozen: draft never trained",
    "tide": "tide: draft trained while it serves",
}
_Rate = Callable[[Scrape, Scrape], float | None]


def _acceptance(start: Scrape, end: Scrape) -> float | None:
    drafts = end.value(DRAFTS) - start.value(DRAFTS)
    if drafts <= 0:
        return None
    return 1.0 + (end.value(ACCEPTED) - start.value(ACCEPTED)) / drafts


def _tokens_per_s(start: Scrape, end: Scrape) -> float | None:
    return (end.value(GENERATED) - start.value(GENERATED)) / (end.t_s - start.t_s)


def windowed(
    samples: Sequence[Scrape], rate: _Rate, window_s: float = WINDOW_S
) -> tuple[list[float], list[float]]:
    """Return times and values of a rate over the ``window_s`` before each sample."""
    times, values = [], []
    first = 0
    for last, sample in enumerate(samples):
        while samples[first].t_s < sample.t_s - window_s:
            first += 1
        # A short window at the very start says more about noise than about rates.
        if sample.t_s - samples[first].t_s < window_s / 3 or first == last:
            continue
        value = rate(samples[first], sample)
        if value is not None:
            times.append(sample.t_s)
            values.append(value)
    return times, values


def swap_times(samples: Sequence[Scrape]) -> list[float]:
    """Return when the swap counter was first seen grown."""
    times = []
    for before, after in zip(samples, samples[1:], strict=False):
        if after.value(SWAPS) > before.value(SWAPS):
            times.append(after.t_s)
    return times


def shift_time(run: ArmRun) -> float | None:
    """Return when the first request of the new domain started."""
    for segment in run.segments:
        if segment.name == AFTER_SHIFT:
            return min(result.start_s for result in segment.results)
    return None


def _panel(axis: Any, runs: Sequence[ArmRun], rate: _Rate, label: str) -> None:
    for run in runs:
        times, values = windowed(run.samples, rate)
        color = COLORS.get(run.name)
        if times:
            axis.plot(times, values, label=LABELS[run.name], color=color, linewidth=1.8)
        shift = shift_time(run)
        if shift is not None:
            axis.axvline(shift, color=color, linestyle=":", linewidth=1.2)
        for t in swap_times(run.samples):
            axis.axvline(t, color=color, alpha=0.35, linewidth=0.9)
            axis.plot([t], [1.0], marker="v", color=color, clip_on=False,
                      transform=axis.get_xaxis_transform())  # fmt: skip
    axis.set_ylabel(label)
    axis.grid(alpha=0.25)


def draw(runs: Sequence[ArmRun], path: Path, title: str) -> None:
    """Write the PNG."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 1, figsize=(10, 7), sharex=True)
    _panel(axes[0], runs, _acceptance, "acceptance length, tokens")
    _panel(axes[1], runs, _tokens_per_s, "output tokens/s")
    figure.suptitle(title)
    axes[1].set_xlabel(
        f"seconds since the arm's stream began (mean of {WINDOW_S:.0f} s)\ndotted: its "
        "prompts change domain; triangles: a newly trained draft is served"
    )
    handles, labels = axes[1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", bbox_to_anchor=(0.5, 0.96),
                  ncols=3, frameon=False)  # fmt: skip
    figure.tight_layout(rect=(0, 0, 1, 0.95))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
