"""The day-0 suite: from a draft of random weights, without a slowdown on the way.

* `none`: no speculation, before and after, so that the machine's own drift is seen;
* `fresh`: what `"model": "fresh"` builds for the target before it is inflated (the
  draft's MLP would be inflated with it), policy adaspec, training;
* `ceiling`: the same first draft trained offline to convergence on the stream but its
  last part, served in the same way on the last part, which neither was trained on when
  it began.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bench.harness.arm import Hooks
from bench.harness.client import RequestResult
from bench.harness.common import BenchError, rounded
from bench.harness.options import SuiteOptions, option
from bench.harness.samples import capture, load_samples, save_samples
from bench.harness.server import VllmServer
from bench.harness.session import (
    Session,
    all_cores,
    draft_config,
    run_suite,
    trained_section,
)
from bench.harness.stream import (
    StreamRequest,
    shift_stream_of,
)
from bench.harness.summary import acceptance_by_requests
from bench.harness.trainers import TrainerWatch
from bench.suites.ceiling import (
    EVALUATIONS,
    FINAL,
    LEARN,
    CeilingOptions,
    keep_published,
    train_ceiling,
)
from vllm_tide.config import FreshConfig
from vllm_tide.draft.fresh import fresh_directory
from vllm_tide.speculative import merged
from vllm_tide.train.sample import Sample
from vllm_tide.transport.shm import TransportError


def blocks(
    results: Sequence[RequestResult], size: int
) -> list[tuple[str, Sequence[RequestResult]]]:
    """Cuts a stream into blocks of consecutive requests, within its segments."""
    parts: dict[str, list[RequestResult]] = {}
    for result in sorted(results, key=lambda r: r.index):
        parts.setdefault(result.segment, []).append(result)
    out: list[tuple[str, Sequence[RequestResult]]] = []
    for name, part in parts.items():
        count = max(1, (len(part) + size // 2) // size)
        for place in range(count):
            end = len(part) if place == count - 1 else (place + 1) * size
            out.append((name, part[place * size : end]))
    return out


def request_seconds(results: Sequence[RequestResult]) -> float:
    """Seconds that requests took in all, each from its start to its end."""
    return sum(r.end_s - r.start_s for r in results if r.end_s is not None)


def slowdowns(
    plain: Sequence[Sequence[RequestResult]],
    drafted: Sequence[RequestResult],
    size: int,
) -> dict[str, Any]:
    """Compares the latency of every block of requests with the same block undrafted."""
    mine = blocks(drafted, size)
    theirs = [blocks(results, size) for results in plain]
    out: dict[str, Any] = {
        "first_request": [],
        "seconds": [],
        "plain_seconds": [],
        "slowdown": [],
    }
    noise: list[float] = []
    for place, (_, block) in enumerate(mine):
        seconds = [request_seconds(found[place][1]) for found in theirs]
        mean, took = statistics.fmean(seconds), request_seconds(block)
        out["first_request"].append(block[0].index)
        out["seconds"].append(round(took, 3))
        out["plain_seconds"].append(round(mean, 3))
        out["slowdown"].append(round(took / mean - 1, 4))
        if len(seconds) > 1:
            noise.append(max(seconds) / min(seconds) - 1)
    whole = sum(out["seconds"]) / sum(out["plain_seconds"]) - 1 if mine else None
    return {
        **out,
        "worst": max(out["slowdown"], default=None),
        "whole": rounded(whole),
        "noise": rounded(max(noise, default=None)),
    }


def requests_to_reach(
    curve: dict[str, list[float]], length: float | None, share: float
) -> dict[str, Any]:
    """Requests until the served acceptance length reaches a share of the ceiling's."""
    out: dict[str, Any] = {
        "share": share,
        "wanted": rounded(None if length is None else share * length),
        "requests": None,
        "window_end": None,
        "kept": None,
    }
    values = curve["acceptance_length"]
    for place, value in enumerate(values):
        if length is not None and value >= share * length:
            out["requests"] = curve["requests"][place]
            out["window_end"] = curve["end_requests"][place]
            out["kept"] = statistics.fmean(values[place:]) >= share * length
            break
    return out


FRESH = "fresh"
LEAST_DRAFTS = 50
"""Verified drafts that a window of the learning curve needs: while the head is new,
control drafts rarely, and then where it expects most."""


@dataclass(frozen=True, kw_only=True)
class Day0Options(SuiteOptions):
    """Options of the day-0 suite."""

    model_sizes: tuple[str, ...] = ("90m",)
    requests: tuple[int, ...] = (128,)
    concurrency: tuple[int, ...] = (4,)
    final_share: float = option(0.25, "of the stream; the ceiling is not trained on it")
    repeats: int = option(2, "runs without speculation: the second one comes last")
    fit_steps: int = option(400, "optimizer steps of the ceiling")
    fit_tokens: int = option(1024, "rows of one of its steps")
    window_requests: int = option(16, "of a window: the curve's, the slowdown's")
    share: float = option(0.9, "of the ceiling's acceptance length: reached")

    def check(self) -> None:
        super().check()
        if not 0 < self.final_share < 1:
            raise BenchError("--final-share lies between 0 and 1")
        if not 0 < self.share <= 1:
            raise BenchError("--share is above 0, at most 1")
        if self.repeats not in (1, 2):
            raise BenchError("--repeats is 1 or 2")
        self.at_least(
            {"fit_steps": EVALUATIONS, "fit_tokens": 64, "window_requests": 1}
        )

    def may_differ(self) -> tuple[str, ...]:
        return ("repeats",)


def day0_stream(options: Day0Options) -> list[StreamRequest]:
    """Stream: what is learnt from, then the final part.

    Several domains come mixed: day 0 is about a new head, not about a shift.
    """
    stream = shift_stream_of(options)
    # Domains in turn, as their numbers of requests are to each other.
    seen = dict.fromkeys(options.domains, 0)
    counts = dict(zip(options.domains, options.counts(), strict=True))
    order: list[tuple[float, StreamRequest]] = []
    for request in stream:
        seen[request.domain] += 1
        order.append((seen[request.domain] / counts[request.domain], request))
    order.sort(key=lambda item: item[0])
    first_final = len(order) - max(1, round(options.final_share * len(order)))
    return [
        replace(
            request,
            index=index,
            phase=LEARN if index < first_final else FINAL,
            concurrency=options.concurrency[index // 4 % len(options.concurrency)],
        )
        for index, (_, request) in enumerate(order)
    ]


def run(options: Day0Options) -> int:
    options.check()
    stream = day0_stream(options)

    return run_suite(
        options,
        lambda session: _Day0(session, options, stream).run(),
        lambda session: _Day0(session, options, stream).close(),
    )


class _Day0:
    """One run of the suite."""

    def __init__(
        self, session: Session, options: Day0Options, stream: list[StreamRequest]
    ) -> None:
        self.session, self.options, self.stream = session, options, stream
        self.fresh = dict(options.tide.get("fresh", {}))
        self.arms = session.document.section("arms")
        self.last_head = options.work / "last-head.safetensors"

    def run(self) -> None:
        self._arm("none", None, self.stream)
        self._fresh()
        if self.options.repeats > 1:
            self._arm("none-again", None, self.stream)
        self._ceiling()

    def _arm(
        self,
        name: str,
        config: dict[str, Any] | None,
        stream: Sequence[StreamRequest],
        *,
        trained: bool = False,
        run_dir: Path | None = None,
        hooks: Hooks | None = None,
    ) -> None:
        if self.session.measured("arms", name):
            return
        watch = TrainerWatch(run_dir if trained else None)
        run = self.session.arm(
            name,
            config,
            stream,
            run_dir=run_dir,
            trained=trained,
            hooks=replace(hooks or Hooks(), on_sample=watch.on_sample),
        )
        if run is None:
            return
        figures = self.session.keep("arms", name, run, stream, watch, 10.0)
        figures["by_requests"] = acceptance_by_requests(
            run.samples, run.results, self.options.window_requests, LEAST_DRAFTS
        )
        self.session.document.write()
        self.session.say(
            f"{name}: {figures['output_tokens_per_s']} tokens/s, acceptance length "
            f"{[s['acceptance_length'] for s in figures['segments']]}"
        )

    def _fresh(self) -> None:
        if self.session.measured("arms", FRESH):  # its run directory is kept as it is
            return
        self.last_head.unlink(missing_ok=True)  # of an earlier run
        with self.session.run_dir(FRESH) as run_dir:
            section = trained_section(self.options, run_dir, {"fresh": self.fresh})

            def keep_head(_: VllmServer) -> None:
                try:
                    keep_published(run_dir, self.last_head)
                except TransportError as error:
                    self.session.document.problem(f"{FRESH}: {error}")

            head = fresh_directory(
                self.options.target,
                FreshConfig.model_validate(self.fresh),
                getattr(torch, self.options.dtype),
                self.options.work / "heads",
            )
            self._arm(
                FRESH,
                draft_config(self.options, str(head), section),
                self.stream,
                trained=True,
                run_dir=run_dir,
                hooks=Hooks(before_stop=keep_head),
            )

    def _ceiling(self) -> None:
        folder = self.options.work / "ceiling"
        results = self.session.document.results
        if "offline" not in results or not (folder / "config.json").exists():
            parts = self._capture()
            if parts is None:
                return
            self.session.left_s()
            with all_cores(self.options):  # no server runs now
                results["offline"] = train_ceiling(
                    parts,
                    CeilingOptions(
                        target=self.options.target,
                        fresh=self.fresh,
                        train=self._train(),
                        steps=self.options.fit_steps,
                        depth=self.options.num_speculative_tokens,
                        dtype=self.options.dtype,
                    ),
                    folder,
                    self.last_head,
                    self.session.say,
                )
            self.session.document.write()
        if self.session.measured("arms", "ceiling"):
            return
        with self.session.run_dir("ceiling") as run_dir:
            section = {"run_dir": str(run_dir), "preset": "control"}
            control = self.options.tide.get("control")
            if control:
                section = merged(section, {"control": control})
            final = [r for r in self.stream if r.segment == FINAL]
            config = draft_config(self.options, str(folder), section)
            self._arm("ceiling", config, final, run_dir=run_dir)

    def _train(self) -> dict[str, Any]:
        own = {
            "learning_rate": 1e-3,
            **self.options.tide.get("train", {}),
        }
        return {**own, "batch_tokens": self.options.fit_tokens}

    def _capture(self) -> dict[str, list[Sample]] | None:
        path = self.options.work / "samples.safetensors"
        if not (self.session.document.resumed and path.exists()):
            found = capture(
                self.session, self.stream, "capture", FRESH, tide={"fresh": self.fresh}
            )
            if found is None:
                return None
            save_samples(path, found.parts, {"lost": found.lost})
        return load_samples(path)[0]

    def close(self) -> None:
        document, outputs = self.session.document, self.session.outputs
        names = [n for n in ("none", "none-again", FRESH, "ceiling") if n in self.arms]
        document.results["identity"] = self.session.compare("arms", names)
        results = {name: outputs.load(name) for name in names}
        plain = [results[n] for n in ("none", "none-again") if results.get(n)]
        if FRESH in self.arms and plain:
            document.results["slowdown"] = slowdowns(
                plain, results[FRESH], self.options.window_requests
            )
        document.results["day0"] = self._goal()
        document.write()
        print(json.dumps(document.results["day0"], indent=1), flush=True)

    def _goal(self) -> dict[str, Any]:
        served = {
            name: self.arms[name]["segments"][-1]["acceptance_length"]
            for name in (FRESH, "ceiling")
            if name in self.arms
        }
        offline = self.session.document.results.get("offline") or {}
        heads = {
            name: (offline.get(name) or {}).get("greedy")
            for name in ("first_head", "day0", "ceiling")
        }
        curve = self.arms.get(FRESH, {}).get("by_requests")
        ceiling = served.get("ceiling")
        slow = self.session.document.results.get("slowdown") or {}
        return {
            "served_final": served,
            "served_ratio": _ratio(served.get(FRESH), ceiling),
            "held_out": heads,
            "held_out_ratio": _ratio(heads["day0"], heads["ceiling"]),
            "reach": None
            if curve is None
            else requests_to_reach(curve, ceiling, self.options.share),
            "worst_slowdown": slow.get("worst"),
            "whole_slowdown": slow.get("whole"),
            "noise": slow.get("noise"),
        }


def _ratio(value: float | None, base: float | None) -> float | None:
    return round(value / base, 4) if value is not None and base else None
