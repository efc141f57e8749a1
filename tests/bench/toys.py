"""Scrapes, results and arms for the tests of suites."""

from __future__ import annotations

import os
from pathlib import Path

from bench.harness.arm import ArmRun, SegmentRun
from bench.harness.client import RequestResult
from bench.harness.scrape import Scrape
from bench.harness.stream import StreamRequest, segments


def scrape(t_s, *, drafts=0.0, accepted=0.0, generated=0.0, **tide):
    values = {
        ("vllm:spec_decode_num_drafts_total", ()): float(drafts),
        ("vllm:spec_decode_num_accepted_tokens_total", ()): float(accepted),
        ("vllm:generation_tokens_total", ()): float(generated),
    }
    values |= {(f"vllm_tide:{name}", ()): float(v) for name, v in tide.items()}
    return Scrape(t_s, values)


def result(request, start_s, end_s, tokens=8):
    """Return a request with two tokens at a time after the first."""
    chunks = [(start_s + 0.1, 1)]
    while sum(n for _, n in chunks) < tokens:
        chunks.append((start_s + 0.2, min(2, tokens - sum(n for _, n in chunks))))
    return RequestResult(
        index=request.index,
        segment=request.segment,
        start_s=start_s,
        ttft_s=0.1,
        end_s=end_s,
        prompt_token_ids=[1, 2],
        token_ids=[7] * tokens,
        chunks=chunks,
    )


def request(index, phase="0 python", domain="python", tokens=8):
    return StreamRequest(index, phase, domain, f"prompt {index}", tokens, 2)


def arm_run(name, stream, seconds=2.0, accepted=1.0):
    """One request after the other, `seconds` each; one draft a second."""
    t_s, parts, samples = 0.0, [], []
    generated = 0

    def page():
        samples.append(
            scrape(t_s, drafts=t_s, accepted=accepted * t_s, generated=generated)
        )
        return samples[-1]

    for part in segments(stream):
        start, results = page(), []
        for item in part:
            results.append(result(item, t_s, t_s + seconds, item.max_tokens))
            t_s += seconds
            generated += item.max_tokens
            page()
        parts.append(SegmentRun(part[0].segment, start, page(), results))
    return ArmRun(name, parts, samples, 3.0)


def options_for(kind, suite, folder: Path, **changes):
    """Return options that pass their checks without a vLLM installation."""
    (folder / "venv" / "bin").mkdir(parents=True, exist_ok=True)
    (folder / "venv" / "bin" / "vllm").touch()
    given = {
        "json": folder / "out" / "report.json",
        "work": folder / "work",
        "venv": folder / "venv",
        "model_sizes": (),
        # The defaults follow the cores that this process may use now.
        "engine_cpus": (min(os.sched_getaffinity(0)),),
        "other_cpus": (min(os.sched_getaffinity(0)),),
    }
    return kind(suite=suite, **(given | changes))
