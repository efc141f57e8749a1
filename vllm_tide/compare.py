"""Two ways to serve the same traffic, compared: `vllm-tide compare A B`.

Reads what `vllm bench serve --save-result --save-detailed` writes, and GuideLLM's JSON.
Where both sides have the same requests in the same order, they are compared one by one.
Intervals are of 95%: over files where each side has two or more (Welch), else over
requests (bootstrap).
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vllm_tide.config import ConfigError

RESAMPLES = 2000
_T_975 = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060)
_Z = 1.959964
LIMITS = ("ttft", "tpot", "e2el")
"""Names of limits, as vLLM's `--goodput` has them (ms)."""


@dataclass(frozen=True)
class Served:
    """One file's run.

    Attributes:
        seconds: From the first request to the end of the last.
        tokens: int64 [n], output tokens of each request that did not fail.
        ttft, tpot, e2el: float64 [n], milliseconds; nan where there is none.
        prompts: Length of each prompt.
        texts: Outputs, empty where they were not kept.
        acceptance: Mean tokens of a verify step; None without speculation.
    """

    seconds: float
    tokens: np.ndarray
    ttft: np.ndarray
    tpot: np.ndarray
    e2el: np.ndarray
    prompts: tuple[int, ...]
    texts: tuple[str, ...]
    failed: int
    acceptance: float | None

    @property
    def tokens_per_s(self) -> float:
        return float(self.tokens.sum()) / self.seconds

    def goodput(self, limits: Mapping[str, float]) -> float:
        """Requests per second that kept every limit."""
        kept = np.ones(len(self.tokens), bool)
        for name, most in limits.items():
            kept &= ~(getattr(self, name) > most)
        return float(kept.sum()) / self.seconds


@dataclass(frozen=True)
class Figure:
    """One line of the comparison.

    Attributes:
        a, b: Values of both sides.
        ratio: b over a.
        low, high: Of the ratio; None where nothing says how sure it is.
        better: "higher" or "lower".
    """

    name: str
    unit: str
    a: float
    b: float
    ratio: float
    low: float | None
    high: float | None
    better: str

    @property
    def verdict(self) -> int:
        """1: b is better, -1: worse, 0: not to be told apart."""
        if self.low is None or self.high is None or self.low <= 1.0 <= self.high:
            return 0
        return 1 if (self.ratio > 1.0) == (self.better == "higher") else -1


@dataclass(frozen=True)
class Comparison:
    """What `vllm-tide compare` says.

    Attributes:
        paired: Requests are the same on both sides.
        identical: Requests with equal outputs and requests compared; None: not kept.
    """

    names: tuple[str, str]
    figures: list[Figure]
    paired: bool
    identical: tuple[int, int] | None
    failed: tuple[int, int]
    verdict: str

    def to_json(self) -> dict[str, Any]:
        return {
            "a": self.names[0],
            "b": self.names[1],
            "verdict": self.verdict,
            "paired": self.paired,
            "identical": self.identical,
            "failed": self.failed,
            "figures": [{**vars(f), "verdict": f.verdict} for f in self.figures],
        }


def read_side(given: str) -> list[Served]:
    """Runs of one side: a file, several with commas between them, or a folder.

    Raises:
        ConfigError: A file is missing or is neither tool's.
    """
    paths: list[Path] = []
    for part in filter(None, given.split(",")):
        path = Path(part)
        paths += sorted(path.glob("*.json")) if path.is_dir() else [path]
    if not paths:
        raise ConfigError(f"{given!r}: no JSON file there.")
    return [run for path in paths for run in read(path)]


def read(path: Path) -> list[Served]:
    """Runs of one file; GuideLLM writes one for each of its rates."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        said = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path}: cannot be read as JSON ({said}).") from None
    try:
        if "benchmarks" in content:
            found = [_guidellm(each) for each in content["benchmarks"]]
        else:
            found = [_vllm(content)]
    except (KeyError, TypeError, ValueError, IndexError, AttributeError):
        raise ConfigError(
            f"{path}: has no times of its requests; give what `vllm bench serve "
            "--save-result --save-detailed` writes, or GuideLLM's JSON."
        ) from None
    if not all(len(run.tokens) and run.seconds > 0 for run in found):
        raise ConfigError(f"{path}: no request in it was served.")
    return found


def _vllm(content: Any) -> Served:
    errors = content.get("errors") or [""] * len(content["ttfts"])
    good = [i for i, error in enumerate(errors) if not error]
    lengths, waits = content["output_lens"], content["ttfts"]
    tokens = np.array([lengths[i] for i in good], np.int64)
    ttft = 1e3 * np.array([waits[i] for i in good], np.float64)
    after = 1e3 * np.array([math.fsum(content["itls"][i]) for i in good])
    texts = content.get("generated_texts") or ()
    return Served(
        seconds=float(content["duration"]),
        tokens=tokens,
        ttft=ttft,
        tpot=np.where(tokens > 1, after / np.maximum(tokens - 1, 1), np.nan),
        e2el=ttft + after,
        prompts=tuple(content["input_lens"][i] for i in good),
        texts=tuple(texts[i] for i in good) if texts else (),
        failed=len(errors) - len(good),
        acceptance=content.get("spec_decode_acceptance_length"),
    )


def _guidellm(content: Any) -> Served:
    requests = content["requests"]
    done = requests["successful"]
    ends = [row["request_end_time"] for row in done]
    starts = [row["request_start_time"] for row in done]

    def column(name: str, scale: float = 1.0) -> np.ndarray:
        found = (row.get(name) for row in done)
        return np.array([np.nan if x is None else scale * x for x in found])

    return Served(
        seconds=max(ends) - min(starts),
        tokens=np.array([row["output_tokens"] or 0 for row in done], np.int64),
        ttft=column("time_to_first_token_ms"),
        tpot=column("inter_token_latency_ms"),
        e2el=column("request_latency", 1e3),
        prompts=tuple(row["prompt_tokens"] or 0 for row in done),
        texts=tuple(row.get("output") or "" for row in done),
        failed=len(requests.get("errored") or ()),
        acceptance=None,
    )


def compare(
    a: Sequence[Served],
    b: Sequence[Served],
    names: tuple[str, str],
    goodput: Mapping[str, float] | None = None,
) -> Comparison:
    """Compare two sides.

    Args:
        names: What to call them.
        goodput: Limits (ms) by a name of `LIMITS`.
    """
    paired = [run.prompts for run in a] == [run.prompts for run in b]
    figures = [_rate("output tokens/s", "tokens/s", a, b, lambda run: run.tokens_per_s)]
    for name, label in (("tpot", "TPOT"), ("ttft", "TTFT"), ("e2el", "latency")):
        for share in (0.5, 0.99):
            word = "median" if share == 0.5 else f"P{100 * share:g}"
            found = _latency(f"{label}, {word}", name, share, a, b, paired)
            figures += [found] if found else []
    if goodput:
        figures.append(
            _rate("goodput", "requests/s", a, b, lambda run: run.goodput(goodput))
        )
    lengths = [[x.acceptance for x in side if x.acceptance] for side in (a, b)]
    if all(lengths):
        before, after = (float(np.mean(side)) for side in lengths)
        low, high = _welch(*lengths)
        name, ratio = "acceptance length", after / before
        figures.append(Figure(name, "", before, after, ratio, low, high, "higher"))
    identical = None
    if paired and all(run.texts for run in (*a, *b)):
        pairs = [
            one == two
            for x, y in zip(a, b, strict=True)
            for one, two in zip(x.texts, y.texts, strict=True)
        ]
        identical = sum(pairs), len(pairs)
    failed = sum(run.failed for run in a), sum(run.failed for run in b)
    verdict = _verdict(names, figures, failed)
    return Comparison(names, figures, paired, identical, failed, verdict)


def _rate(
    name: str,
    unit: str,
    a: Sequence[Served],
    b: Sequence[Served],
    of: Callable[[Served], float],
) -> Figure:
    ours, theirs = [of(run) for run in a], [of(run) for run in b]
    before, after = float(np.mean(ours)), float(np.mean(theirs))
    ratio = after / before if before else math.nan
    return Figure(name, unit, before, after, ratio, *_welch(ours, theirs), "higher")


def _welch(
    a: Sequence[float | None], b: Sequence[float | None]
) -> tuple[float | None, float | None]:
    """Interval of the ratio of geometric means, over files."""
    sides = [np.log([x for x in side if x]) for side in (a, b)]
    if min(map(len, sides)) < 2:
        return None, None
    shares = [float(np.var(side, ddof=1)) / len(side) for side in sides]
    middle, total = float(sides[1].mean() - sides[0].mean()), sum(shares)
    if total == 0:
        return math.exp(middle), math.exp(middle)
    parts = (s**2 / (len(x) - 1) for s, x in zip(shares, sides, strict=True))
    half = t_975(max(1, int(total**2 / sum(parts)))) * math.sqrt(total)
    return math.exp(middle - half), math.exp(middle + half)


def t_975(df: int) -> float:
    """Student's t that 2.5% exceed: of a table, else Cornish and Fisher's series."""
    if df <= len(_T_975):
        return _T_975[df - 1]
    z = _Z
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + math.fsum(term / df**power for power, term in enumerate(terms, 1))


def _latency(
    name: str,
    column: str,
    share: float,
    a: Sequence[Served],
    b: Sequence[Served],
    paired: bool,
) -> Figure | None:
    ours, theirs = (
        np.concatenate([getattr(r, column) for r in side]) for side in (a, b)
    )
    if paired:
        both = ~(np.isnan(ours) | np.isnan(theirs))
        ours, theirs = ours[both], theirs[both]
    else:
        ours, theirs = ours[~np.isnan(ours)], theirs[~np.isnan(theirs)]
    if not len(ours) or not len(theirs):
        return None
    before, after = float(np.quantile(ours, share)), float(np.quantile(theirs, share))
    if before <= 0:
        return None
    rng = np.random.default_rng(0)
    ratios = np.empty(RESAMPLES)
    for i in range(RESAMPLES):
        drawn = rng.integers(0, len(ours), len(ours))
        other = drawn if paired else rng.integers(0, len(theirs), len(theirs))
        ratios[i] = np.quantile(theirs[other], share) / np.quantile(ours[drawn], share)
    low, high = np.quantile(ratios, (0.025, 0.975))
    return Figure(
        name, "ms", before, after, after / before, float(low), float(high), "lower"
    )


def _verdict(
    names: tuple[str, str], figures: Sequence[Figure], failed: tuple[int, int]
) -> str:
    rate, a, b = figures[0], *names
    time = next((f for f in figures if f.name == "TPOT, median"), None)
    told = f"{b} serves {rate.ratio:.2f} times the tokens/s of {a}{_interval(rate)}"
    if time is not None:
        told += f", its median time per output token is {time.ratio:.2f} times"
        told += f" {a}'s{_interval(time)}"
    judged = rate.verdict or (0 if time is None else time.verdict)
    if rate.low is not None and time is not None and rate.verdict == -time.verdict:
        judged = 0
    said = {1: f"use {b}", -1: f"keep {a}", 0: "these runs cannot tell them apart"}
    lost = f" {failed[0]} and {failed[1]} requests failed." if any(failed) else ""
    return f"{told}: {said[judged]}.{lost}"


def _interval(figure: Figure) -> str:
    if figure.low is None:
        return ""
    return f" [{figure.low:.2f}, {figure.high:.2f}]"


def lines(found: Comparison) -> Iterator[str]:
    """Text for a terminal, the verdict first."""
    yield found.verdict
    yield ""
    width = max(len(name) for name in (*found.names, "123,456.78"))
    yield f"{'':24}{found.names[0]:>{width}}  {found.names[1]:>{width}}  ratio"
    for f in found.figures:
        mark = {1: "better", -1: "worse", 0: ""}[f.verdict]
        yield (
            f"{f.name:18}{f.unit[:5] if f.unit == 'ms' else '':6}"
            f"{f.a:>{width},.2f}  {f.b:>{width},.2f}  "
            f"{f.ratio:.3f}{_interval(f)} {mark}"
        ).rstrip()
    yield ""
    yield _notes(found)


def _notes(found: Comparison) -> str:
    said = ["Requests are the same on both sides." if found.paired else ""]
    if not found.paired:
        said = ["Requests differ: not compared one by one; use one dataset and seed."]
    if found.identical is not None:
        same, all_of_them = found.identical
        said.append(f"Outputs are equal in {same} of {all_of_them} requests.")
    if found.figures[0].low is None:
        said.append("Give two or more files a side for an interval of tokens/s.")
    return " ".join(said)


_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{a} and {b}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 56em; margin: 2em auto;
  padding: 0 1em; }}
table {{ border-collapse: collapse; width: 100%; }}
th, td {{ text-align: right; padding: .3em .7em; border-bottom: 1px solid #ddd; }}
th:first-child, td:first-child {{ text-align: left; }}
.better {{ background: #e3f4e3; }} .worse {{ background: #fbe4e4; }}
</style>
<h1>{verdict}</h1>
<table><tr><th></th><th>{a}</th><th>{b}</th><th>ratio</th><th>95%</th></tr>
{rows}
</table>
<p>{notes}</p>
"""


def page(found: Comparison) -> str:
    """The same as a page of HTML that needs nothing else."""
    rows = []
    for f in found.figures:
        mark = {1: "better", -1: "worse", 0: ""}[f.verdict]
        unit = f" ({f.unit})" if f.unit not in f.name else ""
        cells = f"<td>{f.a:,.2f}</td><td>{f.b:,.2f}</td><td>{f.ratio:.3f}</td>"
        interval = _interval(f).strip(" []").replace(", ", " to ") or "-"
        rows.append(
            f'<tr class="{mark}"><td>{html.escape(f.name + unit)}</td>'
            f"{cells}<td>{interval}</td></tr>"
        )
    a, b = map(html.escape, found.names)
    return _PAGE.format(
        a=a,
        b=b,
        verdict=html.escape(found.verdict),
        rows="\n".join(rows),
        notes=html.escape(_notes(found)),
    )
