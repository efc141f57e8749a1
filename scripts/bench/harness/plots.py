"""The plots of a report, as SVG text, and the picture of a quickstart run."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.harness.arm import ArmRun
from bench.harness.scrape import GENERATED, SWAPS, Scrape
from bench.harness.stream import AFTER_SHIFT
from bench.harness.summary import acceptance_length

Json = Mapping[str, Any]
# Static lengths in shades of one colour; hues that colour-blind readers can tell apart.
COLORS = {
    "none": "#777777",
    "static1": "#a6cee3",
    "static3": "#6baed6",
    "static5": "#3182bd",
    "static7": "#08519c",
    "threshold": "#e69f00",
    "tide_gate": "#009e73",
    "vllm_dynamic": "#cc79a7",
    "adaspec": "#d55e00",
    "adaspec_drafter": "#f5c09a",
    "adaspec_calibration": "#d55e00",
    "adaspec_slo": "#7f3800",
}
MARKERS = {"threshold": "v", "tide_gate": "s", "vllm_dynamic": "D", "adaspec": "o"}
# Arms whose length over time is drawn, in this order, as far as they were run.
SERIES_ARMS = ("adaspec", "adaspec_slo", "adaspec_calibration", "vllm_dynamic")
MOST_SERIES = 3
_NONE = {"color": "#777777", "linewidth": 0.8}  # where there is no speculation


def _style(arm: str) -> dict[str, Any]:
    policy = arm.partition("@")[0]
    main = policy == "adaspec"
    return {
        "color": COLORS.get(arm, COLORS.get(policy, "#56b4e9")),
        "marker": MARKERS.get(policy, "."),
        "linewidth": 2.4 if main else 1.4,
        "markersize": 6 if main else 4.5,
        "zorder": 3 if main else 2,
    }


def _figure(rows: int, columns: int, size: tuple[float, float], **options: Any) -> Any:
    import matplotlib as mpl

    mpl.use("Agg")
    # Text stays text: smaller, and it can be searched and copied.
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "vllm_tide"})
    from matplotlib import pyplot as plt

    return plt.subplots(rows, columns, figsize=size, squeeze=False, **options)


def _svg(figure: Any, legend: bool = True) -> str:
    from matplotlib import pyplot as plt

    figure.tight_layout()
    handles, labels = figure.axes[0].get_legend_handles_labels()
    if handles and legend:
        where = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0)}
        figure.legend(handles, labels, ncols=5, frameon=False, **where)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _means(ratios: Sequence[Json]) -> tuple[list[float], list[list[float]]]:
    return [ratio["mean"] for ratio in ratios], [
        [max(0.0, ratio["mean"] - ratio["min"]) for ratio in ratios],
        [max(0.0, ratio["max"] - ratio["mean"]) for ratio in ratios],
    ]


def _numbers(values: Sequence[float | None], scale: float = 1.0) -> list[float]:
    return [math.nan if value is None else scale * value for value in values]


def length_over_time(cells: Sequence[Json]) -> str | None:
    """Requests running and tokens verified over a trace (the paper's figure 13)."""
    first: dict[str, Json] = {}
    for cell in cells:
        if cell.get("series", {}).get("t_s"):
            first.setdefault(cell["arm"], cell["series"])
    preferred = [arm for arm in SERIES_ARMS if arm in first]
    others = [arm for arm in first if arm not in preferred and arm != "none"]
    chosen = (preferred + others)[:MOST_SERIES]
    if not chosen:
        return None
    figure, axes = _figure(2, 1, (9, 4.6), sharex=True)
    running, verified = axes[:, 0]
    for arm in chosen:
        series, line = first[arm], ":" if "@" in arm else "-"
        look = {"color": _style(arm)["color"], "linewidth": 1.4, "linestyle": line}
        running.step(series["t_s"], series["running"], where="post", label=arm, **look)
        # The dots show values that stand alone between two idle samples.
        dots = {"marker": ".", "markersize": 3}
        verified.plot(series["t_s"], _numbers(series["length"]), **dots, **look)
    running.set_ylabel("requests running")
    verified.set_ylabel("draft tokens verified\nper request and round")
    verified.set_xlabel("seconds since the trace's start")
    for axis in axes[:, 0]:
        axis.grid(alpha=0.25)
        axis.set_ylim(bottom=0)
    return _svg(figure)


def attainment_by_scale(summaries: Mapping[str, Json]) -> str | None:
    """Share of requests within the limit, by its scale; a panel per trace."""
    shown = {k: v for k, v in summaries.items() if v["attainment"]["arms"]}
    if not shown:
        return None
    figure, axes = _figure(1, len(shown), (4.4 * len(shown), 3.8), sharey=True)
    for axis, (name, summary) in zip(axes[0], shown.items(), strict=True):
        found = summary["attainment"]
        for arm, shares in found["arms"].items():
            if "@" not in arm:
                shares = _numbers(shares, 100)
                axis.plot(found["scales"], shares, label=arm, **_style(arm))
        for policy, shares in found.get("served", {}).items():
            style = _style(policy) | {"linestyle": "--", "marker": "*"}
            label = f"{policy}, given the limit"
            axis.plot(found["scales"], _numbers(shares, 100), label=label, **style)
        axis.axhline(90, linestyle=":", **_NONE)
        axis.set_title(f"{name}\nscale 1 = {found['p90_tpot_ms']:.1f} ms", fontsize=10)
        axis.set_xticks(found["scales"])
        axis.set_xlabel("SLO scale")
        axis.grid(alpha=0.25)
    axes[0][0].set_ylabel("requests within the limit, %")
    return _svg(figure)


def speedup_by_trace(summaries: Mapping[str, Json]) -> str:
    """End-to-end speed-up over arm `none`; a panel per trace."""
    figure, axes = _figure(1, len(summaries), (4.4 * len(summaries), 3.4))
    order = dict.fromkeys(arm for s in summaries.values() for arm in s["arms"])
    for axis, (name, summary) in zip(axes[0], summaries.items(), strict=True):
        found = {a: summary["arms"].get(a, {}).get("speedup_over_none") for a in order}
        arms = [arm for arm, ratio in found.items() if ratio]
        means, errors = _means([found[arm] for arm in arms])
        look = {"color": [_style(arm)["color"] for arm in arms]}
        bars = {"elinewidth": 0.8, "capsize": 2}
        axis.barh(range(len(arms)), means, xerr=errors, error_kw=bars, **look)
        axis.set_yticks(range(len(arms)), arms)
        axis.invert_yaxis()
        axis.axvline(1.0, **_NONE)
        axis.set_title(name, fontsize=10)
        axis.set_xlabel("mean end-to-end speed-up over none")
    return _svg(figure, legend=False)


def learning_over_time(arms: Mapping[str, Json]) -> str:
    """Acceptance length and output rate over time; triangles are swaps."""
    figure, axes = _figure(2, 1, (9, 5.6), sharex=True)
    labels = {
        "acceptance_length": "acceptance length, tokens",
        "output_tokens_per_s": "output tokens/s",
    }
    for axis, (key, label) in zip(axes[:, 0], labels.items(), strict=True):
        for i, (arm, found) in enumerate(arms.items()):
            windows, color = found["windows"], COLORS.get(arm, f"C{i}")
            times, swaps = windows["t_s"], windows["swaps"]
            values = _numbers(windows[key])
            axis.plot(times, values, color=color, label=arm, marker=".")
            for part in found["segments"][1:]:
                axis.axvline(part["start_s"], color=color, linestyle=":")
            new = [i for i in range(1, len(swaps)) if swaps[i] != swaps[i - 1]]
            axis.plot(times, values, "^", color=color, markevery=new, markersize=8)
        axis.set_ylabel(label)
        axis.grid(alpha=0.25)
    axes[1][0].set_xlabel("seconds since the arm's stream began")
    return _svg(figure)


WINDOW_S = 12.0
PICTURE_COLORS = {
    "none": "#7f7f7f",
    "frozen": "#1f77b4",
    "no_learning": "#e69f00",
    "tide": "#d62728",
}
LABELS = {
    "none": "none: no speculation",
    "frozen": "frozen: draft never trained",
    "no_learning": "no_learning: its length under control",
    "tide": "tide: draft trained while it serves",
}
_Rate = Callable[[Scrape, Scrape], float | None]


def _acceptance(start: Scrape, end: Scrape) -> float | None:
    return acceptance_length([(start, end)])


def _tokens_per_s(start: Scrape, end: Scrape) -> float | None:
    return (end.value(GENERATED) - start.value(GENERATED)) / (end.t_s - start.t_s)


def windowed(
    samples: Sequence[Scrape], rate: _Rate, window_s: float = WINDOW_S
) -> tuple[list[float], list[float]]:
    """Times and values of a rate over a window that ends there."""
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


def _panel(axis: Any, runs: Sequence[ArmRun], rate: _Rate, label: str) -> None:
    for run in runs:
        times, values = windowed(run.samples, rate)
        color = PICTURE_COLORS.get(run.name)
        if times:
            axis.plot(times, values, label=LABELS[run.name], color=color, linewidth=1.8)
        for segment in run.segments:
            if segment.name == AFTER_SHIFT:
                shift = min(result.start_s for result in segment.results)
                axis.axvline(shift, color=color, linestyle=":", linewidth=1.2)
        for before, after in zip(run.samples, run.samples[1:], strict=False):
            if after.value(SWAPS) > before.value(SWAPS):
                axis.axvline(after.t_s, color=color, alpha=0.35, linewidth=0.9)
                axis.plot([after.t_s], [1.0], marker="v", color=color, clip_on=False,
                          transform=axis.get_xaxis_transform())  # fmt: skip
    axis.set_ylabel(label)
    axis.grid(alpha=0.25)


def draw(runs: Sequence[ArmRun], path: Path, title: str) -> None:
    """Writes the picture of a quickstart run: acceptance length and rate over time."""
    from matplotlib import pyplot as plt

    figure, axes = _figure(2, 1, (10, 7), sharex=True)
    above, below = axes[:, 0]
    _panel(above, runs, _acceptance, "acceptance length, tokens")
    _panel(below, runs, _tokens_per_s, "output tokens/s")
    figure.suptitle(title)
    below.set_xlabel(
        f"seconds since the arm's stream began (mean of {WINDOW_S:.0f} s)\ndotted: its "
        "prompts change domain; triangles: a newly trained draft is served"
    )
    handles, labels = below.get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", bbox_to_anchor=(0.5, 0.96),
                  ncols=3, frameon=False)  # fmt: skip
    figure.tight_layout(rect=(0, 0, 1, 0.95))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
