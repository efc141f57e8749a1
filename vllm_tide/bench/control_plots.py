"""The plots of a report, as SVG text."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
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
    "adaspec_verifier": "#eb9054",
    "adaspec_calibration": "#d55e00",
    "adaspec_slo": "#7f3800",
}
MARKERS = {"threshold": "v", "tide_gate": "s", "vllm_dynamic": "D", "adaspec": "o"}
# Arms whose length over time is drawn, in this order, as far as they were run.
SERIES_ARMS = ("adaspec", "adaspec_slo", "adaspec_calibration", "vllm_dynamic")
MOST_SERIES = 3


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


def _svg(figure: Any) -> str:
    from matplotlib import pyplot as plt

    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _legend(figure: Any, axis: Any) -> None:
    handles, labels = axis.get_legend_handles_labels()
    if handles:
        figure.legend(
            handles,
            labels,
            loc="lower center",
            bbox_to_anchor=(0.5, 1.0),
            ncols=5,
            frameon=False,
        )


def _means(ratios: Sequence[Json]) -> tuple[list[float], list[list[float]]]:
    """Return means, and how far the least and the largest lie below and above."""
    return [ratio["mean"] for ratio in ratios], [
        [max(0.0, ratio["mean"] - ratio["min"]) for ratio in ratios],
        [max(0.0, ratio["max"] - ratio["mean"]) for ratio in ratios],
    ]


def speedup_by_batch(summary: Json) -> str:
    """Plot each arm's throughput over ``none``'s by batch size, a panel per domain.

    Args:
        summary: ``summary.control[target]`` of the report.
    """
    rows = summary["cells"]
    domains = list(dict.fromkeys(row["domain"] for row in rows))
    figure, axes = _figure(1, len(domains), (5.2 * len(domains), 3.8), sharey=True)
    for axis, domain in zip(axes[0], domains, strict=True):
        here = [row for row in rows if row["domain"] == domain]
        batches = sorted({row["batch"] for row in here})
        for arm in summary["arms"]:
            points = [
                (batches.index(row["batch"]), row["arms"][arm]["over_none"])
                for row in sorted(here, key=lambda row: row["batch"])
                if arm in row["arms"] and row["arms"][arm]["over_none"]
            ]
            if not points:
                continue
            places, ratios = zip(*points, strict=True)
            means, errors = _means(ratios)
            axis.errorbar(
                places,
                means,
                yerr=errors,
                label=arm,
                capsize=2,
                elinewidth=0.8,
                **_style(arm),
            )
        axis.set_xticks(range(len(batches)), [str(batch) for batch in batches])
        axis.set_title(domain)
        axis.set_xlabel("requests in flight")
        axis.axhline(1.0, color="#777777", linewidth=0.8)
        axis.grid(alpha=0.25)
    axes[0][0].set_ylabel("output tokens/s over no speculation")
    figure.tight_layout()
    _legend(figure, axes[0][0])
    return _svg(figure)


def length_over_time(cells: Sequence[Json]) -> str | None:
    """Plot batch size and chosen length over time (the paper's figure 13).

    Args:
        cells: Visits of one target and trace, with their ``series``.

    Returns:
        The SVG; None if no speculating arm has a series.
    """
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
    for arm in chosen:
        series, line = first[arm], ":" if "@" in arm else "-"
        look = {"color": _style(arm)["color"], "linewidth": 1.4, "linestyle": line}
        axes[0][0].step(
            series["t_s"],
            series["running"],
            where="post",
            label=arm,
            **look,
        )
        lengths = [float("nan") if x is None else x for x in series["length"]]
        # The dots show values that stand alone between two idle samples.
        axes[1][0].plot(series["t_s"], lengths, marker=".", markersize=3, **look)
    axes[0][0].set_ylabel("requests running")
    axes[1][0].set_ylabel("draft tokens verified\nper request and round")
    axes[1][0].set_xlabel("seconds since the trace's start")
    for axis in axes[:, 0]:
        axis.grid(alpha=0.25)
        axis.set_ylim(bottom=0)
    figure.tight_layout()
    _legend(figure, axes[0][0])
    return _svg(figure)


def attainment_by_scale(summaries: Mapping[str, Json]) -> str | None:
    """Plot SLO attainment by scale, a panel per trace.

    Args:
        summaries: ``summary.traces`` of the report.
    """
    shown = {k: v for k, v in summaries.items() if v["attainment"]["arms"]}
    if not shown:
        return None
    figure, axes = _figure(1, len(shown), (4.4 * len(shown), 3.8), sharey=True)
    for axis, (name, summary) in zip(axes[0], shown.items(), strict=True):
        found = summary["attainment"]
        for arm, shares in found["arms"].items():
            if "@" in arm:
                continue
            axis.plot(found["scales"], _percent(shares), label=arm, **_style(arm))
        for policy, shares in found.get("served", {}).items():
            style = _style(policy) | {"linestyle": "--", "marker": "*"}
            label = f"{policy}, given the limit"
            axis.plot(found["scales"], _percent(shares), label=label, **style)
        axis.axhline(90, color="#777777", linewidth=0.8, linestyle=":")
        axis.set_title(f"{name}\nscale 1 = {found['p90_tpot_ms']:.1f} ms", fontsize=10)
        axis.set_xticks(found["scales"])
        axis.set_xlabel("SLO scale")
        axis.grid(alpha=0.25)
    axes[0][0].set_ylabel("requests within the limit, %")
    figure.tight_layout()
    _legend(figure, axes[0][0])
    return _svg(figure)


def _percent(shares: Sequence[float | None]) -> list[float]:
    return [float("nan") if share is None else 100 * share for share in shares]


def speedup_by_trace(summaries: Mapping[str, Json]) -> str:
    """Plot each arm's mean end-to-end speed-up over ``none``, a panel per trace."""
    figure, axes = _figure(1, len(summaries), (4.4 * len(summaries), 3.4))
    order = dict.fromkeys(arm for s in summaries.values() for arm in s["arms"])
    for axis, (name, summary) in zip(axes[0], summaries.items(), strict=True):
        found = {a: summary["arms"].get(a, {}).get("speedup_over_none") for a in order}
        arms = [arm for arm, ratio in found.items() if ratio]
        ratios = [found[arm] for arm in arms]
        means, errors = _means(ratios)
        axis.barh(
            range(len(arms)),
            means,
            xerr=errors,
            color=[_style(arm)["color"] for arm in arms],
            error_kw={"elinewidth": 0.8, "capsize": 2},
        )
        axis.set_yticks(range(len(arms)), arms)
        axis.invert_yaxis()
        axis.axvline(1.0, color="#777777", linewidth=0.8)
        axis.set_title(name, fontsize=10)
        axis.set_xlabel("mean end-to-end speed-up over none")
    figure.tight_layout()
    return _svg(figure)


def learning_over_time(arms: Mapping[str, Json]) -> str:
    """Plot `windows` of arms that learn: acceptance length and output rate."""
    figure, axes = _figure(2, 1, (9, 5.6), sharex=True)
    labels = {
        "acceptance_length": "acceptance length, tokens",
        "output_tokens_per_s": "output tokens/s",
    }
    for axis, (key, label) in zip(axes[:, 0], labels.items(), strict=True):
        for i, (arm, found) in enumerate(arms.items()):
            windows, color = found["windows"], COLORS.get(arm, f"C{i}")
            times, swaps = windows["t_s"], windows["swaps"]
            values = [float("nan") if x is None else x for x in windows[key]]
            axis.plot(times, values, color=color, label=arm, marker=".")
            for part in found["segments"][1:]:
                axis.axvline(part["start_s"], color=color, linestyle=":")
            new = [i for i in range(1, len(swaps)) if swaps[i] != swaps[i - 1]]
            axis.plot(times, values, "^", color=color, markevery=new, markersize=8)
        axis.set_ylabel(label)
        axis.grid(alpha=0.25)
    axes[1][0].set_xlabel("seconds since the arm's stream began")
    figure.tight_layout()
    _legend(figure, axes[0][0])
    return _svg(figure)
