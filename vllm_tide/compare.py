"""Two ways to serve the same traffic, compared: `vllm-tide compare A B`.

Reads what `vllm bench serve --save-result --save-detailed` writes, and GuideLLM's JSON.
Intervals are of 95% and over files (Welch): requests of one run share what made it fast
or slow, so without two or more files a side there is neither interval nor advice.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vllm_tide.config import ConfigError

_T_975 = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060)
_Z = 1.959964
LIMITS = ("ttft", "tpot", "e2el")
"""Names of limits, as vLLM's `--goodput` has them (ms)."""
SETTINGS = ("model_id", "request_rate", "max_concurrency")
"""Fields of vLLM's files that have to be equal in all of them."""
PROMPTS = 0.1
"""Share by which the mean length of both sides' prompts may differ."""
FAILED = 0.01
"""Share of requests; where more of a side fail, there is no advice."""


@dataclass(frozen=True)
class Served:
    """One file's run.

    Attributes:
        seconds: From the first request to the end of the last.
        tokens: int64 [n], output tokens of each request that did not fail.
        ttft, tpot, e2el: float64 [n], milliseconds; nan where there is none.
        prompts: Length of each request's prompt; None: it failed.
        texts: Outputs, None of what failed; empty where they were not kept.
        acceptance: Mean tokens of a verify step; None without speculation.
        settings: Values of `SETTINGS` as text; empty for GuideLLM's.
    """

    seconds: float
    tokens: np.ndarray
    ttft: np.ndarray
    tpot: np.ndarray
    e2el: np.ndarray
    prompts: tuple[float | None, ...]
    texts: tuple[str | None, ...]
    failed: int
    acceptance: float | None
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def tokens_per_s(self) -> float:
        return float(self.tokens.sum()) / self.seconds

    def goodput(self, limits: Mapping[str, float]) -> float:
        """Requests per second that kept every limit; what was not measured did not.

        As in vLLM, one token has no time per output token and keeps its limit.
        """
        kept = np.ones(len(self.tokens), bool)
        for name, most in limits.items():
            short = self.tokens <= 1 if name == "tpot" else False
            kept &= (getattr(self, name) <= most) | short
        return float(kept.sum()) / self.seconds


@dataclass(frozen=True)
class Figure:
    """One line of the comparison.

    Attributes:
        a, b: Values of both sides, means over their files.
        ratio: b over a; of geometric means, where no file has a zero.
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
        return 1 if (self.low > 1.0) == (self.better == "higher") else -1


@dataclass(frozen=True)
class Comparison:
    """What `vllm-tide compare` says.

    Attributes:
        paired: Requests are as many, and prompts as long, on both sides; None: one has
            more files.
        identical: Requests with equal outputs and requests that both sides served;
            None: not kept, or not paired.
    """

    names: tuple[str, str]
    figures: list[Figure]
    paired: bool | None
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
        ConfigError: A file is missing, is neither tool's or is there twice.
    """
    paths: list[Path] = []
    for part in filter(None, given.split(",")):
        path = Path(part)
        paths += sorted(path.glob("*.json")) if path.is_dir() else [path]
    if not paths:
        raise ConfigError(f"{given!r}: no JSON file there.")
    runs: dict[tuple[float, bytes], Served] = {}
    for path in paths:
        run = read(path)
        if runs.setdefault((run.seconds, run.e2el.tobytes()), run) is not run:
            raise ConfigError(f"{path}: the same run is there twice; give it once.")
    return list(runs.values())


def read(path: Path) -> Served:
    """The run of one file.

    Raises:
        ConfigError: It is missing, is neither tool's, has a wrong number or has several
            rates of GuideLLM's.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        said = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path}: cannot be read as JSON ({said}).") from None
    try:
        run = _guidellm(content) if "benchmarks" in content else _vllm(content)
        if not run.tokens.sum():
            raise ConfigError("no request in it was served.")
        _number(run.seconds, "duration", 1e-9)
    except (ConfigError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}") from None
    except (AttributeError, LookupError, OverflowError, TypeError, ValueError):
        raise ConfigError(
            f"{path}: has no times of its requests; give what `vllm bench serve "
            "--save-result --save-detailed` writes, or GuideLLM's JSON."
        ) from None
    return run


def _number(value: Any, name: str, least: float = 0.0) -> float:
    if isinstance(value, int | float) and least <= value <= 1e12:
        return float(value)
    said = f"{value!r:.40}"
    raise ConfigError(f"{name}: {said} is not a number from {least:g} to 1e12.")


def _vllm(content: Any) -> Served:
    errors = content.get("errors") or [""] * len(content["ttfts"])
    good = [i for i, error in enumerate(errors) if not error]

    def column(name: str, of: Callable[[Any], Any] = lambda x: x) -> np.ndarray:
        found = content[name]
        return np.array([_number(of(found[i]), name) for i in good])

    tokens = column("output_lens").astype(np.int64)
    ttft, after = 1e3 * column("ttfts"), 1e3 * column("itls", math.fsum)
    length = content.get("spec_decode_acceptance_length")
    prompts = dict(zip(good, column("input_lens").tolist(), strict=True))
    texts = content.get("generated_texts") or ()
    if texts and len(texts) != len(errors):
        raise ConfigError(f"generated_texts: {len(texts)} of {len(errors)} requests.")
    return Served(
        seconds=content["duration"],
        tokens=tokens,
        ttft=ttft,
        tpot=np.where(tokens > 1, after / np.maximum(tokens - 1, 1), np.nan),
        e2el=ttft + after,
        prompts=tuple(map(prompts.get, range(len(errors)))),
        texts=tuple(text if i in prompts else None for i, text in enumerate(texts)),
        failed=len(errors) - len(good),
        acceptance=length
        if length is None
        else _number(length, "spec_decode_acceptance_length"),
        settings={name: str(content.get(name)) for name in SETTINGS},
    )


def _guidellm(content: Any) -> Served:
    count = len(content["benchmarks"])
    if count != 1:
        raise ConfigError(f"has {count} benchmarks; give files of one (one rate) each.")
    requests = content["benchmarks"][0]["requests"]
    done = sorted(  # they are listed as they ended
        requests["successful"], key=lambda row: row.get("request_start_time") or 0.0
    )

    def column(name: str, scale: float = 1.0, none: float = np.nan) -> np.ndarray:
        found = (row.get(name) for row in done)
        return np.array(
            [none if x is None else scale * _number(x, name) for x in found]
        )

    starts, ends = column("request_start_time"), column("request_end_time")
    return Served(
        seconds=float(ends.max(initial=0.0) - starts.min(initial=np.inf)),
        tokens=column("output_tokens", none=0.0).astype(np.int64),
        ttft=column("time_to_first_token_ms"),
        tpot=column("inter_token_latency_ms"),
        e2el=column("request_latency", 1e3),
        prompts=tuple(column("prompt_tokens", none=0.0).tolist()),
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
    paired = None
    if len(a) == len(b):
        paired = all(
            len(x.prompts) == len(y.prompts)
            and all(one == two for one, two in _both(x.prompts, y.prompts))
            for x, y in zip(a, b, strict=True)
        )
    figures: list[Figure] = []

    def add(name: str, unit: str, of: Callable[[Served], float | None]) -> None:
        sides = [[x for x in map(of, side) if x is not None] for side in (a, b)]
        if (len(sides[0]), len(sides[1])) == (len(a), len(b)):
            figures.append(_figure(name, unit, *sides))

    add("output tokens/s", "tokens/s", lambda run: run.tokens_per_s)
    for column, label in (("tpot", "TPOT"), ("ttft", "TTFT"), ("e2el", "latency")):
        for share, word in ((0.5, "median"), (0.99, "P99")):
            of = partial(_quantile, column=column, share=share)
            add(f"{label}, {word}", "ms", of)
    if goodput:
        add("goodput", "requests/s", lambda run: run.goodput(goodput))
    add("acceptance length", "", lambda run: run.acceptance)
    identical = None
    if paired and all(run.texts for run in (*a, *b)):
        pairs = [
            one == two
            for x, y in zip(a, b, strict=True)
            for one, two in _both(x.texts, y.texts)
        ]
        identical = sum(pairs), len(pairs)
    failed = sum(run.failed for run in a), sum(run.failed for run in b)
    verdict = _verdict(names, figures, _doubt(a, b))
    if any(failed):
        verdict += f" {failed[0]} and {failed[1]} requests failed."
    return Comparison(names, figures, paired, identical, failed, verdict)


def _both(a: Sequence[Any], b: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    """Pairs of what neither side failed at."""
    return (pair for pair in zip(a, b, strict=True) if None not in pair)


def _quantile(run: Served, column: str, share: float) -> float | None:
    """None where nothing was measured: what is not streamed has times of 0."""
    times = getattr(run, column)
    times = times[~np.isnan(times)]
    return (float(np.quantile(times, share)) if len(times) else 0.0) or None


def _figure(name: str, unit: str, a: Sequence[float], b: Sequence[float]) -> Figure:
    before, after = float(np.mean(a)), float(np.mean(b))
    better = "lower" if unit == "ms" else "higher"
    if min(*a, *b) <= 0:  # no logarithm: nothing says how sure it is
        ratio = after / before if before else math.nan
        return Figure(name, unit, before, after, ratio, None, None, better)
    return Figure(name, unit, before, after, *_welch(a, b), better)


def _welch(
    a: Sequence[float], b: Sequence[float]
) -> tuple[float, float | None, float | None]:
    """Ratio of geometric means over files, and its interval."""
    sides = np.log(a), np.log(b)
    middle = float(sides[1].mean() - sides[0].mean())
    if min(map(len, sides)) < 2:
        return math.exp(middle), None, None
    shares = [float(np.var(side, ddof=1)) / len(side) for side in sides]
    total, half = sum(shares), 0.0
    if total:
        parts = (s**2 / (len(x) - 1) for s, x in zip(shares, sides, strict=True))
        half = t_975(max(1, int(total**2 / sum(parts)))) * math.sqrt(total)
    high = math.exp(min(middle + half, 700.0))
    return math.exp(middle), math.exp(middle - half), high


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


def _doubt(a: Sequence[Served], b: Sequence[Served]) -> str | None:
    """Why these files cannot decide, if so."""
    differ = []
    for name in SETTINGS:
        values = {run.settings.get(name, "None") for run in (*a, *b)}
        if len(values) > 1:
            differ.append(f"{name} ({' and '.join(sorted(values))})")
    lengths = [
        float(np.mean([n for run in side for n in run.prompts if n is not None]))
        for side in (a, b)
    ]
    if max(lengths) > (1 + PROMPTS) * min(lengths):
        means = " and ".join(f"{length:.0f}" for length in sorted(lengths))
        differ.append(f"mean length of prompts ({means} tokens)")
    if differ:
        return f"no verdict, as their settings differ: {', '.join(differ)}"
    for side in (a, b):
        failed = sum(run.failed for run in side)
        if failed > FAILED * (failed + sum(len(run.tokens) for run in side)):
            return f"no verdict, as more than {FAILED:.0%} of a side's requests failed"
    if min(len(a), len(b)) < 2:
        return (
            "one result cannot tell them apart; give two or more of each side (three "
            "are better)"
        )
    return None


def _verdict(
    names: tuple[str, str], figures: Sequence[Figure], doubt: str | None
) -> str:
    rate, a, b = figures[0], *names
    time = next((f for f in figures if f.name == "TPOT, median"), None)
    told = f"{b} serves {rate.ratio:.2f} times the tokens/s of {a}{_interval(rate)}"
    judged = rate.verdict
    if time is not None:
        told += f", its median time per output token is {time.ratio:.2f} times"
        told += f" {a}'s{_interval(time)}"
        judged = rate.verdict or time.verdict
        if time.verdict * (rate.ratio - 1.0) < 0:
            judged = 0
    said = {1: f"use {b}", -1: f"keep {a}", 0: "these runs cannot tell them apart"}
    return f"{told}: {doubt or said[judged]}."


def _interval(figure: Figure) -> str:
    if figure.low is None or figure.high is None:
        return ""
    if figure.high > 1000 * figure.low:
        return " [very wide]"
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
    said = ["Requests differ in number, order or length: use one dataset and seed."]
    if found.paired is None:
        said = ["Requests are not paired, as one side has more files."]
    if found.paired:
        said = ["Requests are as many, and their prompts as long, on both sides."]
    if found.identical is not None:
        same, all_of_them = found.identical
        said.append(f"Outputs are equal in {same} of {all_of_them} requests.")
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
