"""The day-0 suite: from a head that knows nothing, without a slowdown on the way.

* `none`: no speculation, before and after, so that the machine's own drift is seen;
* `fresh`: `"model": "fresh"`, policy adaspec, training;
* `ceiling`: the same first head trained offline to convergence on the stream but its
  last part, served in the same way on the last part, which neither was trained on when
  it began.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vllm_tide.draft.config import read_config
from vllm_tide.speculative import merged
from vllm_tide.train.sample import Sample
from vllm_tide.transport.header import TransportError

from .arm import Hooks
from .control_arms import BenchError
from .day0_ceiling import (
    EVALUATIONS,
    FINAL,
    LEARN,
    CeilingOptions,
    keep_published,
    train_ceiling,
)
from .day0_summary import requests_to_reach, slowdowns
from .learning_capture import capture
from .learning_events import TrainerWatch
from .learning_identity import identity_of, identity_problems
from .learning_options import SuiteOptions
from .learning_samples import load_samples, save_samples
from .learning_server import draft_config, private_run_dir, trained_section
from .learning_session import Session, StoppedError, all_cores, run_suite
from .learning_stream import read_domains, shift_stream, stretches
from .learning_summary import acceptance_by_requests, arm_figures
from .server import VllmServer
from .stream import StreamRequest

FRESH = "fresh"
LEAST_DRAFTS = 50
"""Verified drafts that a window of the learning curve needs: while the head is new,
control drafts rarely, and then where it expects most."""


@dataclass(frozen=True, kw_only=True)
class Day0Options(SuiteOptions):
    """Options of the day-0 suite.

    Attributes:
        final_share: Share of the stream that the ceiling is not trained on.
        repeats: Runs without speculation: the second one comes last.
        fit_steps: Optimizer steps of the ceiling.
        fit_tokens: Rows of one of its steps.
        window_requests: Requests of a window, for the curve and for the slowdown.
        share: Of the ceiling's acceptance length that counts as reached.
    """

    model_sizes: tuple[str, ...] = ("90m",)
    domains: tuple[str, ...] = ("python",)
    requests: tuple[int, ...] = (128,)
    output_tokens: int = 96
    concurrency: tuple[int, ...] = (4,)
    final_share: float = 0.25
    repeats: int = 2
    fit_steps: int = 400
    fit_tokens: int = 1024
    window_requests: int = 16
    share: float = 0.9

    def check(self) -> None:
        """See `SuiteOptions`."""
        super().check()
        if not 0 < self.final_share < 1:
            raise BenchError("--final-share lies between 0 and 1")
        if not 0 < self.share <= 1:
            raise BenchError("--share is above 0, at most 1")
        if self.repeats not in (1, 2):
            raise BenchError("--repeats is 1 or 2")
        for option, number, least in (
            ("--fit-steps", self.fit_steps, EVALUATIONS),
            ("--fit-tokens", self.fit_tokens, 64),
            ("--window-requests", self.window_requests, 1),
        ):
            if number < least:
                raise BenchError(f"{option} is at least {least}")

    def may_differ(self) -> tuple[str, ...]:
        """The second run without speculation may come in a further run."""
        return ("repeats",)


def day0_stream(options: Day0Options) -> list[StreamRequest]:
    """Return the stream: what is learnt from, then the final part.

    Several domains come mixed: day 0 is about a new head, not about a shift.

    Raises:
        BenchError: Prompts are missing or too few.
    """
    prompts = read_domains(options.prompts, options.domains)
    stream = shift_stream(
        prompts,
        options.counts(),
        options.output_tokens,
        options.concurrency,
        options.seed,
    )
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


def fresh_settings(target: Path) -> dict[str, Any]:
    """Return `tide.fresh` for a target: an inflated one's head is not inflated.

    Args:
        target: Folder of the served model.
    """
    config = read_config(target)
    width = int(config.get("intermediate_size") or 0)
    report = target / "inflated.json"
    if report.exists():
        width = int(
            json.loads(report.read_text(encoding="utf-8"))["intermediate_size"][0]
        )
    return {"intermediate_size": max(64, width)} if width else {}


def run(options: Day0Options) -> int:
    """Run the suite; return the exit status.

    Raises:
        BenchError: The options are no good.
    """
    options.check()
    stream = day0_stream(options)

    def measure(session: Session) -> None:
        _Day0(session, options, stream).run()

    return run_suite(options, measure)


class _Day0:
    """One run of the suite."""

    def __init__(
        self, session: Session, options: Day0Options, stream: list[StreamRequest]
    ) -> None:
        self.session, self.options, self.stream = session, options, stream
        self.fresh = merged(
            {**fresh_settings(session.target.path), "seed": options.seed},
            options.tide.get("fresh", {}),
        )
        self.arms = session.document.section("arms")
        self.last_head = options.work / "last-head.safetensors"

    def run(self) -> None:
        """Measure what is not measured yet, and compare what there is."""
        try:
            self._arm("none", None, self.stream)
            self._fresh()
            if self.options.repeats > 1:
                self._arm("none-again", None, self.stream)
            self._ceiling()
        except StoppedError:
            self._close()
            raise
        self._close()

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
        if name in self.arms:
            self.session.say(f"{name}: measured before")
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
        figures = arm_figures(run, stream, stretches(stream), watch, 10.0)
        figures["by_requests"] = acceptance_by_requests(
            run.samples, run.results, self.options.window_requests, LEAST_DRAFTS
        )
        self.session.outputs.save(name, run.results)
        self.arms[name] = figures
        self.session.document.write()
        self.session.say(
            f"{name}: {figures['output_tokens_per_s']} tokens/s, acceptance length "
            f"{[s['acceptance_length'] for s in figures['segments']]}"
        )

    def _fresh(self) -> None:
        if FRESH in self.arms:  # its run directory is kept as it is
            self.session.say(f"{FRESH}: measured before")
            return
        self.last_head.unlink(missing_ok=True)  # of an earlier run
        with private_run_dir(self.options.work / "run" / FRESH) as run_dir:
            section = trained_section(self.options, run_dir, {"fresh": self.fresh})

            def keep_head(_: VllmServer) -> None:
                try:
                    keep_published(run_dir, self.last_head)
                except TransportError as error:
                    self.session.document.problem(f"{FRESH}: {error}")

            self._arm(
                FRESH,
                draft_config(self.options, FRESH, section),
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
        if "ceiling" in self.arms:
            self.session.say("ceiling: measured before")
            return
        with private_run_dir(self.options.work / "run" / "ceiling") as run_dir:
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
            "max_sample_tokens": min(512, self.options.fit_tokens),
            "seed": self.options.seed,
            **self.options.tide.get("train", {}),
        }
        return {**own, "batch_tokens": self.options.fit_tokens}

    def _capture(self) -> dict[str, list[Sample]] | None:
        path = self.options.work / "samples.safetensors"
        if not (self.session.document.resumed and path.exists()):
            found = capture(
                self.session,
                self.stream,
                "capture",
                FRESH,
                tide={"fresh": self.fresh},
            )
            if found is None:
                return None
            save_samples(path, found.parts, {"lost": found.lost})
        return load_samples(path)[0]

    def _close(self) -> None:
        """Compare, over what is there."""
        document, outputs = self.session.document, self.session.outputs
        names = [n for n in ("none", "none-again", FRESH, "ceiling") if n in self.arms]
        results = {name: outputs.load(name) for name in names}
        with all_cores(self.options):
            identity = identity_of(
                results, self.session.target.path, self.options.dtype
            )
        document.results["identity"] = identity
        for problem in identity_problems(identity):
            document.problem(problem)
        for name in names:
            for problem in self.arms[name]["problems"]:
                document.problem(f"{name}: {problem}")
            if self.arms[name]["failed_requests"]:
                failed = self.arms[name]["failed_requests"]
                document.problem(f"{name}: {failed} requests failed")
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
