"""The plots of a report, as SVG text, and the picture of a quickstart run."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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


WINDOW_REQUESTS = 8
"""Requests of which the picture shows the mean, those of one phase only."""
PICTURE_ARMS = {
    "none": ("no speculation", "#7f7f7f"),
    "frozen": ("frozen draft, best static length", "#1f77b4"),
    "no_learning": ("frozen draft, length under control", "#e69f00"),
    "tide": ("vllm_tide: draft trained while it serves", "#d62728"),
}


def _moving_mean(values: Sequence[float], first: int) -> list[float]:
    """Means over the last `WINDOW_REQUESTS`; the phase begins anew at `first`."""
    means = []
    for i in range(len(values)):
        begin = max(first if i >= first else 0, i + 1 - WINDOW_REQUESTS)
        part = values[begin : i + 1]
        means.append(sum(part) / len(part))
    return means


def draw(report: Json, path: Path) -> None:
    """Writes the picture of a quickstart's report: acceptance and time saved.

    Request by request, since all arms answer the same ones: tokens per engine step
    above, below the time that `none` took over that of the arm.
    """
    from matplotlib import pyplot as plt

    stream = report["environment"]["stream"]
    shift = stream["num_before"]
    arms = {
        name: report["arms"][name] for name in PICTURE_ARMS if name in report["arms"]
    }
    spent: dict[str, list[float]] = {}
    ends: list[tuple[float, float, str]] = []
    figure, axes = _figure(2, 1, (9, 5.4), sharex=True)
    above, below = axes[:, 0]
    for name, arm in arms.items():
        label, color = PICTURE_ARMS[name]
        requests = arm["requests"]
        seconds = zip(requests["start_s"], requests["end_s"], strict=True)
        spent[name] = _moving_mean([end - start for start, end in seconds], shift)
        index = range(1, len(spent[name]) + 1)
        look = {"color": color, "linewidth": 2.4 if name == "tide" else 1.5}
        if name in ("frozen", "tide"):
            above.plot(index, _moving_mean(requests["tokens_per_step"], shift), **look)
        if "none" in spent:
            pairs = zip(spent["none"], spent[name], strict=True)
            ratios = [none / own for none, own in pairs]
            below.plot(index, ratios, label=label, **look)
            ends.append((ratios[-1], index[-1] + 0.5, color))
    low, high = below.get_ylim()
    lowest = low
    for ratio, right, color in sorted(ends):  # one above the other
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
        axis.axvline(shift + 0.5, color="black", linestyle=":", linewidth=1.2)
        axis.set_ylabel(label)
        axis.grid(alpha=0.25)
    above.annotate(
        f" traffic shifts from {stream['before_domain']} to {stream['after_domain']}",
        (shift + 0.5, 1.0), xycoords=("data", "axes fraction"), va="top",
    )  # fmt: skip
    below.set_xlabel(
        f"requests answered (mean of {WINDOW_REQUESTS}); "
        "triangles: a newly trained draft is served"
    )
    handles, labels = below.get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", ncols=2, frameon=False,
                  bbox_to_anchor=(0.5, 0.94))  # fmt: skip
    gain = report["gain"]
    over = "final_tokens_per_s_speedup_over_"
    if {f"{over}frozen", f"{over}none"} <= gain.keys():
        figure.suptitle(
            f"New traffic: {gain[f'{over}frozen']:.2f} times the tokens/s of the "
            f"frozen draft, {gain[f'{over}none']:.2f} times those without speculation"
        )
    figure.tight_layout(rect=(0, 0, 0.98, 0.88))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)
