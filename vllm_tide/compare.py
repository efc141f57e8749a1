"""Comparison of two configurations on the same traffic: `vllm-tide compare A B`.

Reads result files of `vllm bench serve --save-result --save-detailed`. Intervals are
95% Welch intervals over files, because requests of one run are not independent. With
one file per side there is neither interval nor verdict.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vllm_tide.config import ConfigError

# 97.5% quantiles of Student's t by degrees of freedom; the last one from 8 on.
_T_975 = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060)
SETTINGS = ("model_id", "request_rate", "max_concurrency")  # equal in all files
PROMPTS = 0.1  # largest relative difference of the mean prompt lengths of both sides
FAILED = 0.01  # share of failed requests of a side above which there is no verdict
RATE, TPOT = "output tokens/s", "TPOT, median (ms)"

Json = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """Contents of one result file.

    Attributes:
        figures: Values by name, in the order of the table.
        texts: Prompt length and output by request, if it was served and saved.
    """

    figures: Mapping[str, float]
    texts: Mapping[int, tuple[float, str]]
    prompt: float
    served: int
    failed: int
    settings: Mapping[str, str]


def read_side(side: Path) -> list[Run]:
    """Read the runs of a side, from a file or a folder of JSON files.

    Raises:
        ConfigError: A file is missing or not a result file, or a run occurs twice.
    """
    paths = sorted(side.glob("*.json")) if side.is_dir() else [side]
    if not paths:
        raise ConfigError(f"{side}: contains no JSON file.")
    runs = list(map(read, paths))
    for i, run in enumerate(runs):
        if run in runs[:i]:
            raise ConfigError(f"{paths[i]}: duplicate of another run; give it once.")
    return runs


def read(path: Path) -> Run:
    """Read one file.

    Raises:
        ConfigError: It is missing, not a result file, or has an invalid number.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path}: cannot be read as JSON ({reason}).") from None
    try:
        return _run_of(content)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except (AttributeError, LookupError, OverflowError, TypeError, ValueError):
        raise ConfigError(
            f"{path}: has no times of its requests; give a result file of `vllm bench "
            "serve --save-result --save-detailed`."
        ) from None


def _number(value: Any, name: str, least: float = 0.0) -> float:
    if isinstance(value, int | float) and least <= value <= 1e12:
        return float(value)
    shown = f"{value!r:.40}"
    raise ConfigError(f"{name}: {shown} is not a number from {least:g} to 1e12.")


def _run_of(content: Any) -> Run:
    errors = content.get("errors") or [""] * len(content["ttfts"])
    good = [i for i, error in enumerate(errors) if not error]

    def column(name: str, of: Callable[[Any], Any] = lambda x: x) -> np.ndarray:
        values = content[name]
        return np.array([_number(of(values[i]), name) for i in good])

    tokens, prompts = column("output_lens"), column("input_lens")
    if not tokens.sum():
        raise ConfigError("no request was served.")
    several = tokens > 1  # one token has no time per output token
    tpot = 1e3 * column("itls", math.fsum)[several] / (tokens[several] - 1)
    duration = _number(content["duration"], "duration", 1e-9)
    figures = {RATE: float(tokens.sum()) / duration}
    for label, times in (("TPOT", tpot), ("TTFT", 1e3 * column("ttfts"))):
        if times.any():  # all 0 for a server that does not stream
            figures[f"{label}, median (ms)"] = float(np.median(times))
            figures[f"{label}, P99 (ms)"] = float(np.quantile(times, 0.99))
    if (length := content.get("spec_decode_acceptance_length")) is not None:
        name = "spec_decode_acceptance_length"
        figures["acceptance length"] = _number(length, name, 1.0)
    outputs = content.get("generated_texts") or ()
    lengths = zip(good, prompts.tolist(), strict=True)
    return Run(
        figures=figures,
        texts={i: (length, outputs[i]) for i, length in lengths} if outputs else {},
        prompt=float(prompts.mean()),
        served=len(good),
        failed=len(errors) - len(good),
        settings={name: str(content.get(name)) for name in SETTINGS},
    )


def compare(a: Sequence[Run], b: Sequence[Run], names: tuple[str, str]) -> Json:
    """Compare two sides with the given names; return the document of `--json`.

    A figure has the means of both sides over their files (`a`, `b`), the `ratio` of
    geometric means, its interval (`low`, `high`) and a `verdict`: 1 if b is better, -1
    if worse, 0 if undecided. `identical` is the number of requests with equal outputs
    and of all common requests; None without outputs, or if the requests differ.
    """
    figures = [
        _figure(name, *([run.figures[name] for run in side] for side in (a, b)))
        for name in a[0].figures
        if all(run.figures.get(name) for run in (*a, *b))
    ]
    objection = _objection(a, b)
    verdict = _verdict(names, figures, objection)
    for f in figures[1:] if objection is None else ():
        if f["name"] != TPOT and f["verdict"] * (figures[0]["ratio"] - 1.0) < 0:
            change = "better" if f["verdict"] > 0 else "worse"
            verdict += f" But {f['name']} is {change}: {f['ratio']:.2f} times."
    failed = [sum(run.failed for run in side) for side in (a, b)]
    if any(failed):
        verdict += f" {failed[0]} and {failed[1]} requests failed."
    result = {"names": names, "verdict": verdict, "figures": figures}
    return {**result, "identical": _identical(a, b)}


def _figure(name: str, a: Sequence[float], b: Sequence[float]) -> Json:
    sides = np.log(a), np.log(b)
    middle = float(sides[1].mean() - sides[0].mean())
    means = {"name": name, "a": float(np.mean(a)), "b": float(np.mean(b))}
    figure = {**means, "ratio": math.exp(middle), "low": None, "high": None}
    if min(len(a), len(b)) < 2:
        return {**figure, "verdict": 0}
    variances = [float(np.var(side, ddof=1)) / len(side) for side in sides]
    total, half = sum(variances), 0.0
    if total:
        parts = (v**2 / (len(x) - 1) for v, x in zip(variances, sides, strict=True))
        freedom = min(max(1, int(total**2 / sum(parts))), len(_T_975))
        half = _T_975[freedom - 1] * math.sqrt(total)
    low, high = math.exp(middle - half), math.exp(min(middle + half, 700.0))
    higher = int(low > 1.0) - int(high < 1.0)
    verdict = -higher if name.endswith("(ms)") else higher
    return {**figure, "low": low, "high": high, "verdict": verdict}


def _interval(figure: Json) -> str:
    if figure["low"] is None:
        return ""
    return f" [{figure['low']:.2f}, {figure['high']:.2f}]"


def _identical(a: Sequence[Run], b: Sequence[Run]) -> tuple[int, int] | None:
    """Count equal outputs of common requests, file by file."""
    equal: list[bool] = []
    for x, y in zip(a, b, strict=False):
        pairs = [(x.texts[i], y.texts[i]) for i in x.texts.keys() & y.texts.keys()]
        same_lengths = all(one[0] == two[0] for one, two in pairs)
        if len(a) != len(b) or not pairs or not same_lengths:
            return None
        equal += [one == two for one, two in pairs]
    return sum(equal), len(equal)


def _objection(a: Sequence[Run], b: Sequence[Run]) -> str | None:
    """Return the reason why these files give no verdict, or None."""
    differ = []
    for name in SETTINGS:
        values = {run.settings[name] for run in (*a, *b)}
        if len(values) > 1:
            differ.append(f"{name} ({' and '.join(sorted(values))})")
    low, high = sorted(float(np.mean([run.prompt for run in side])) for side in (a, b))
    if high > (1 + PROMPTS) * low:
        differ.append(f"mean length of prompts ({low:.0f} and {high:.0f} tokens)")
    if differ:
        return f"no verdict: their settings differ in {', '.join(differ)}"
    for side in (a, b):
        failed = sum(run.failed for run in side)
        if failed > FAILED * (failed + sum(run.served for run in side)):
            return f"no verdict: more than {FAILED:.0%} of a side's requests failed"
    if min(len(a), len(b)) < 2:
        return "no verdict from one result; give a folder of two or more per side"
    return None


def _verdict(
    names: tuple[str, str], figures: Sequence[Json], objection: str | None
) -> str:
    """Return a sentence: decided by throughput, else by TPOT if both agree."""
    rate, a, b = figures[0], *names
    time = next((f for f in figures if f["name"] == TPOT), None)
    sentence = f"{b} serves {rate['ratio']:.2f} times the tokens/s of {a}"
    sentence += _interval(rate)
    decided = rate["verdict"]
    if time is not None:
        sentence += f", its median time per output token is {time['ratio']:.2f} times"
        sentence += f" {a}'s{_interval(time)}"
        decided = decided or time["verdict"]
        if time["verdict"] * (rate["ratio"] - 1.0) < 0:
            decided = 0
    advice = {1: f"use {b}", -1: f"keep {a}", 0: "these runs are inconclusive"}
    return f"{sentence}: {objection or advice[decided]}."


def lines(result: Json) -> Iterator[str]:
    """Yield the lines for a terminal, the verdict first."""
    yield f"{result['verdict']}\n"
    a, b = result["names"]
    width = max(map(len, (a, b, "123,456.78")))
    yield f"{'':18}  {a:>{width}}  {b:>{width}}  ratio"
    for f in result["figures"]:
        values = f"{f['a']:>{width},.2f}  {f['b']:>{width},.2f}  {f['ratio']:.3f}"
        mark = {1: " better", -1: " worse", 0: ""}[f["verdict"]]
        yield f"{f['name']:18}  {values}{_interval(f)}{mark}"
    if result["identical"] is not None:
        same, total = result["identical"]
        yield f"\nOutputs are equal in {same} of {total} requests."
