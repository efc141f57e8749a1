"""The figures of a visit, by the names ``vllm bench serve`` gives them.

The names that the project's issue asks for are kept beside (``output_tokens_per_s``,
``mean_e2e_s``, ``mean_ttft_s``, ``tpot_ms_p50``, ``tpot_ms_p90``, ``failed``).
Definitions are vLLM's: TPOT = (end to end - TTFT) / (output tokens - 1) by request,
percentiles interpolate linearly.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from .client import RequestResult


def percentile(values: Sequence[float], share: float) -> float:
    """Return the linearly interpolated percentile (0 to 100); NaN if empty."""
    if not values:
        return math.nan
    ordered = sorted(values)
    place = (len(ordered) - 1) * share / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def tpots_ms(results: Sequence[RequestResult]) -> list[float]:
    """Return the TPOT of every finished request with two tokens or more, in ms."""
    values = [result.tpot_s for result in results if result.ok]
    return [1e3 * value for value in values if value is not None]


def _between_chunks_ms(results: Sequence[RequestResult]) -> list[float]:
    gaps = []
    for result in results:
        times = [t_s for t_s, _ in result.chunks]
        gaps += [1e3 * (b - a) for a, b in zip(times, times[1:], strict=False)]
    return gaps


def _or_none(value: float, digits: int = 3) -> float | None:
    return None if math.isnan(value) else round(value, digits)


def _spread(name: str, values: Sequence[float]) -> dict[str, float | None]:
    mean = statistics.fmean(values) if values else math.nan
    return {
        f"mean_{name}_ms": _or_none(mean),
        f"median_{name}_ms": _or_none(percentile(values, 50)),
        f"p90_{name}_ms": _or_none(percentile(values, 90)),
        f"p99_{name}_ms": _or_none(percentile(values, 99)),
    }


def request_figures(
    results: Sequence[RequestResult], duration_s: float, tokens: int, failed: int
) -> dict[str, object]:
    """Return the figures of a visit.

    Args:
        results: Measured requests.
        duration_s: Seconds that ``tokens`` took.
        tokens: Output tokens that arrived in them.
        failed: Requests that failed.
    """
    ok = [result for result in results if result.ok]
    tpots = tpots_ms(ok)
    ttfts = [1e3 * result.ttft_s for result in ok if result.ttft_s is not None]
    ends = [1e3 * result.e2e_s for result in ok]
    inputs = sum(
        result.num_prompt_tokens or len(result.prompt_token_ids) for result in ok
    )
    rate = tokens / duration_s if duration_s > 0 else math.nan
    e2e, ttft = _spread("e2el", ends), _spread("ttft", ttfts)
    mean_e2e, mean_ttft = e2e["mean_e2el_ms"], ttft["mean_ttft_ms"]
    return {
        "output_tokens_per_s": _or_none(rate),
        "mean_e2e_s": None if mean_e2e is None else round(mean_e2e / 1e3, 6),
        "mean_ttft_s": None if mean_ttft is None else round(mean_ttft / 1e3, 6),
        "tpot_ms_p50": _or_none(percentile(tpots, 50)),
        "tpot_ms_p90": _or_none(percentile(tpots, 90)),
        "failed": failed,
        "duration": round(duration_s, 4),
        "completed": len(ok),
        "total_input_tokens": inputs,
        "total_output_tokens": tokens,
        "request_throughput": _or_none(
            len(ok) / duration_s if duration_s > 0 else math.nan, 4
        ),
        "output_throughput": _or_none(rate),
        **ttft,
        **_spread("tpot", tpots),
        **_spread("itl", _between_chunks_ms(ok)),
        **e2e,
    }
