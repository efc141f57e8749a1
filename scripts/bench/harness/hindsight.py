"""Tokens per second that a recorded run left on the table, and to what.

Every step of a recording drafted all it could and verified it, so each request's
verdict is known for every length. On measured times, from the best down:

* `best_per_request`: each request's length, the verdicts known before; `best_uniform`:
  the same with one length for all requests of a step;
* verdicts unknown, chances right (fitted to these very verdicts): lost to *prediction*;
* the controller's own chances of that moment: lost to *calibration*;
* its own predicted times: lost to *times*;
* as it served (`realised`): the rest, *overhead*: depths chosen before confidences
  are known, probes and trials, time of its decisions, being off or on too long.

Each is a rate, and maximises tokens less seconds at that same rate. `time_error`: how
much longer the controller expects the longest step to take than it takes.

`fixed` are the lengths of static arms on the same steps and times, `control` what the
controller would have drafted and verified in them, its decisions' time included: all
share the times, so how fast the host is falls out of the ratios (`to_best`: the best
is chosen on odd parts of the recording and compared on even ones; `to_none`). Their
intervals are of the steps; how well the times are known, which are medians of few
steps in a short recording, is not in them. Neither is what a server without control
saves beside its decisions, nor probes and trials.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import geometric_mean
from typing import Any

import numpy as np

from bench.harness.blocks import NONE, Ratio, best_arm, ratio_of, to_best
from vllm_tide.control.verifier import ABSENT, select

BINS = 8
LEAST_JUDGED = 40
PARTS = 8
"""Of a recording's steps, one after another, for intervals."""
FIXED = {NONE: 0, "static1": 1, "static3": 3, "static5": 5}
CAUSES = ("prediction", "calibration", "times", "overhead")


@dataclass(slots=True)
class Step:
    """A step in which K tokens of n requests were drafted, and verified."""

    confidence: np.ndarray  # [K, n] of the draft
    survival: np.ndarray  # [K, n] float32, the controller's; ABSENT without room
    accepted: np.ndarray  # [n]
    target_s: np.ndarray  # [n * K + 1] the controller's, by verified tokens
    draft_s: np.ndarray  # [K + 1] the controller's, by draft steps
    depth: int = 0  # draft steps that the controller would have made
    lengths: np.ndarray | int = 0  # [n] tokens that it would have verified


@dataclass(slots=True)
class Recording:
    """A cell: its steps, the times of rounds, and what was realised."""

    requests: int
    most: int  # K
    steps: list[Step] = field(default_factory=list)
    # (verified tokens, target seconds, draft steps, seconds beside the target)
    times: list[tuple[int, float, int, float]] = field(default_factory=list)
    # (draft steps, seconds of them on the host, decisions included)
    hosts: list[tuple[int, float]] = field(default_factory=list)
    # (draft steps, seconds of the controller's decisions)
    decisions: list[tuple[int, float]] = field(default_factory=list)
    tokens: float = 0.0
    seconds: float = 0.0


Choose = Callable[[int, float], tuple[np.ndarray, int]]


def _curve(points: Iterable[tuple[int, float]], count: int) -> np.ndarray:
    """Medians by place, linear between them, never falling: [count].

    Where they fall, neighbours share their mean, each weighted by its points (the
    isotonic regression): one strange step must not lift all that is longer.
    """
    by_place: dict[int, list[float]] = {}
    for place, seconds in points:
        if np.isfinite(seconds):
            by_place.setdefault(place, []).append(seconds)
    pools: list[tuple[float, int, list[int]]] = []  # value, points, places
    for place in sorted(by_place):
        value, weight, places = (
            float(np.median(by_place[place])),
            len(by_place[place]),
            [place],
        )
        while pools and pools[-1][0] > value:
            before, points_before, earlier = pools.pop()
            total = weight + points_before
            value = (value * weight + before * points_before) / total
            weight, places = total, earlier + places
        pools.append((value, weight, places))
    known = [(place, value) for value, _, places in pools for place in places]
    return np.asarray(np.interp(np.arange(count), *zip(*known, strict=True)))


def fitted_survival(steps: Sequence[Step]) -> list[np.ndarray]:
    """[K, n] of each step: chances by depth and confidence, as they turned out."""
    depth = np.arange(steps[0].confidence.shape[0])[:, None]
    confidence = np.stack([step.confidence for step in steps])
    present = np.stack([step.survival >= 0 for step in steps])
    accepted = np.stack([step.accepted for step in steps])[:, None, :]
    judged, hit = present & (depth <= accepted), depth < accepted
    chance = np.empty_like(confidence, dtype=np.float64)
    for at in range(len(depth)):
        seen = judged[:, at]
        near = slice(None) if seen.sum() < LEAST_JUDGED else slice(at, at + 1)
        known = judged[:, near]
        x, y = confidence[:, near][known], hit[:, near][known]
        edges = np.quantile(x, np.linspace(0, 1, BINS + 1)[1:-1]) if len(x) else []
        bins = np.searchsorted(edges, x)
        hits, total = (np.bincount(bins, w, BINS) for w in (y, np.ones(len(x))))
        share = (hits + 0.5) / (total + 1.0)
        chance[:, at] = share[np.searchsorted(edges, confidence[:, at])]
    survival = np.cumprod(chance, axis=1).astype(np.float32)
    return list(np.where(present, np.maximum(survival, 1e-6), ABSENT))


def _beside(recording: Recording) -> np.ndarray:
    """Seconds beside the target by draft steps, [K + 1].

    A step that control was asked about and did not draft in has no time of the host:
    where it never rested, that is of the steps it drafted in, without its decisions.
    """
    points = [(d, s) for _, _, d, s in recording.times if np.isfinite(s)]
    if recording.hosts and not any(d == 0 for d, _ in points):
        deciding = _curve([(0, 0.0), *recording.decisions], recording.most + 1)
        rest = [s - deciding[d] for d, s in recording.hosts if d and np.isfinite(s)]
        points.append((0, max(float(np.median(rest)), 0.0)))
    return _curve(points, recording.most + 1)


def compare_arms(
    recording: Recording, target: np.ndarray, beside: np.ndarray
) -> dict[str, Any]:
    """Tokens/s of fixed lengths and of control on the recorded steps.

    Args:
        target: Seconds by verified tokens, [n * K + 1].
        beside: Seconds by draft steps, the controller's decisions included, [K + 1].
    """
    n, steps = recording.requests, recording.steps
    deciding = _curve([(0, 0.0), *recording.decisions], len(beside))

    def spent(arm: str, step: Step) -> tuple[int, float]:
        if arm == "control":
            lengths, depth, saved = step.lengths, step.depth, 0.0
        else:
            depth = min(FIXED[arm], recording.most)
            lengths = np.minimum((step.survival >= 0).sum(axis=0), depth)
            saved = deciding[depth]
        tokens = n + int(np.minimum(lengths, step.accepted).sum())
        return tokens, float(target[np.sum(lengths)] + beside[depth] - saved)

    def rate(arm: str, some: Sequence[Step]) -> float:
        tokens, seconds = zip(*(spent(arm, step) for step in some), strict=True)
        return sum(tokens) / sum(seconds)

    arms = [*FIXED, "control"]
    parts = [list(p) for p in np.array_split(np.arange(len(steps)), PARTS) if len(p)]
    logs: dict[str, dict[int, float]] = {arm: {} for arm in arms}
    for number, part in enumerate(parts, 1):
        some = [steps[at] for at in part]
        for arm in arms:
            logs[arm][number] = float(np.log(rate(arm, some) / rate(NONE, some)))
    best = best_arm({arm: logs[arm] for arm in FIXED})
    return {
        "fixed": {arm: round(rate(arm, steps), 2) for arm in FIXED},
        "control": round(rate("control", steps), 2),
        "best_fixed": best,
        "to_best": _rounded(to_best(logs["control"], logs[best])),
        "to_none": _rounded(ratio_of(list(logs["control"].values()))),
    }


def recorded_verdict(left: Sequence[Mapping[str, Any]]) -> str:
    """One sentence on control against fixed lengths, on recorded steps."""
    rows = [row for row in left if "to_best" in row]
    if not rows:
        return ""

    def over(arm: str) -> list[float]:
        return [row["control"] / row["fixed"][arm] for row in rows]

    mean = {arm: geometric_mean(over(arm)) for arm in FIXED}
    single = min((arm for arm in FIXED if arm != NONE), key=mean.__getitem__)
    worst = min(rows, key=lambda row: row["to_best"][0])
    return (
        f"on {sum(row['steps'] for row in rows)} recorded steps control is "
        f"{geometric_mean([row['to_best'][0] for row in rows]):.3f} of the best fixed "
        f"length of each cell, least {worst['to_best'][0]:.3f} ({worst['cell']}: "
        f"{worst['best_fixed']}); {mean[NONE]:.3f} of none, least "
        f"{min(over(NONE)):.3f}; {mean[single]:.3f} of {single}, the best single length"
    )


def _rounded(ratio: Ratio) -> list[float | None]:
    return [None if x is None else round(x, 4) for x in ratio]


def analyse(recording: Recording) -> dict[str, Any]:
    """Rates in tokens/s, and the share of the best that each cause took."""
    n, most, steps = recording.requests, recording.most, recording.steps
    target = _curve(((m, t) for m, t, _, _ in recording.times), n * most + 1)
    beside = _beside(recording)
    fitted = fitted_survival(steps)

    def per_request(at: int, bar: float) -> tuple[np.ndarray, int]:
        accepted, best = steps[at].accepted, (np.zeros(n, np.int64), 0)
        value = n - bar * (target[0] + beside[0])
        for depth in range(1, most + 1):
            lengths = np.minimum(accepted, depth)
            # Every token of it is right: the first m, whosever they are.
            gain = n + np.arange(lengths.sum() + 1)
            gain = gain - bar * (target[: len(gain)] + beside[depth])
            if gain.max() > value:
                value, total = gain.max(), int(gain.argmax())
                before = np.cumsum(lengths) - lengths
                best = np.clip(total - before, 0, lengths), depth
        return best

    def uniform(at: int, bar: float) -> tuple[np.ndarray, int]:
        room = (steps[at].survival >= 0).sum(axis=0)
        choices = [(np.minimum(room, depth), depth) for depth in range(most + 1)]
        return max(choices, key=lambda choice: value_of(at, choice, bar))

    def value_of(at: int, choice: tuple[np.ndarray, int], bar: float) -> float:
        lengths, depth = choice
        tokens = n + np.minimum(lengths, steps[at].accepted).sum()
        return float(tokens - bar * (target[lengths.sum()] + beside[depth]))

    def selecting(survival: Sequence[np.ndarray], own_times: bool) -> Choose:
        def choose(at: int, bar: float) -> tuple[np.ndarray, int]:
            by_total = steps[at].target_s if own_times else target
            by_depth = steps[at].draft_s if own_times else beside
            best = np.zeros(n, np.int64), 0
            value = n - bar * (by_total[0] + by_depth[0])
            for depth in range(1, most + 1):
                seconds = by_total[: depth * n + 1] + by_depth[depth]
                found = select(survival[at][:depth], n, seconds, bar=bar)
                if found.tokens - bar * found.seconds > value:
                    value = found.tokens - bar * found.seconds
                    best = found.lengths, depth
            return best

        return choose

    def rate(choose: Choose, own_times: bool = False) -> float:
        bar = reached = 0.0
        for _ in range(8):
            chosen = [choose(at, bar) for at in range(len(steps))]
            tokens = sum(
                n + int(np.minimum(lengths, step.accepted).sum())
                for (lengths, _), step in zip(chosen, steps, strict=True)
            )
            spent = sum(target[lengths.sum()] + beside[d] for lengths, d in chosen)
            reached = tokens / spent
            # What time is worth is known to the controller by its own clock.
            believed = sum(
                step.target_s[lengths.sum()] + step.draft_s[d]
                for (lengths, d), step in zip(chosen, steps, strict=True)
            )
            bar = tokens / (believed if own_times else spent)
        return float(reached)

    own = [step.survival for step in steps]
    realised = recording.tokens / recording.seconds
    best = rate(per_request)
    ladder = [
        best,
        rate(selecting(fitted, own_times=False)),
        rate(selecting(own, own_times=False)),
        rate(selecting(own, own_times=True), own_times=True),
        realised,
    ]
    lost = [(a - b) / best for a, b in zip(ladder, ladder[1:], strict=False)]
    predicted = np.median([step.target_s[-1] + step.draft_s[-1] for step in steps])
    return {
        "realised": round(realised, 2),
        "best_uniform": round(rate(uniform), 2),
        "best_per_request": round(best, 2),
        "lost_to": {k: round(v, 4) for k, v in zip(CAUSES, lost, strict=True)},
        "time_error": round(float(predicted / (target[-1] + beside[-1])) - 1.0, 4),
        "steps": len(steps),
        **compare_arms(recording, target, beside),
    }
