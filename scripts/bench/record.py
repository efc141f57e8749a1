r"""Records control's decisions in an engine of its own: what did it leave on the table?

    scripts/bench/record.py --model DIR --draft DIR --requests FILE --json FILE

`--requests`: {"cells": [{"cell", "batch", "prompts": [[token, ...], ...]}], ...}, which
`run.py --suite control` writes and calls this for. Waves of a batch that decodes
together: in every other one control serves as it does, in those between each step
drafts a set length, mostly the longest, verified whole (`harness/hindsight.py`).
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]
from bench.harness.hindsight import Recording, Step, analyse
from json_text import json_text
from vllm_tide.control.adaspec import AdaSpecPolicy
from vllm_tide.control.batch import Batch, Outcome, Plan

OUTPUT_TOKENS = 96
FEWEST_STEPS = 24


class RecordedPolicy(AdaSpecPolicy):
    """The controller, told in some waves how far to draft; all is verified there."""

    recording: Recording
    forced: itertools.cycle[int] | None = None
    length: int | None = None  # of the step under way, if it is a set one
    waiting: Step | None = None
    depth = 0  # draft steps that it would have made in a step of a set length
    decided = 0.0  # seconds of its decisions about that
    since: float | None = None  # when the step before was known

    def plan(self, batch: Batch, now: float) -> Plan:
        whole = len(batch) == self.recording.requests
        room = int(batch.room.min()) >= self._settings.k_max if len(batch) else False
        self.length = None
        if self.forced is None or not (whole and room):
            self.waiting = None
            return super().plan(batch, now)
        self.length, decide = next(self.forced), self.gate.decide

        def ask(*given: float) -> str:
            self.depth = 0 if decide(*given) else self._settings.k_max
            return ""  # whether it is off is only noted

        self.gate.decide = ask  # type: ignore[method-assign]
        self.gate.check_due = lambda *_: False  # type: ignore[method-assign]
        began = time.perf_counter()
        try:
            super().plan(batch, now)
        finally:
            del self.gate.decide, self.gate.check_due
        self.decided = time.perf_counter() - began
        self._confidences: list[np.ndarray] = []
        return Plan(self.length, "" if self.length else "override")

    def go_on(self, step: int, confidence: np.ndarray) -> bool:
        began = time.perf_counter()
        more = super().go_on(step, confidence)
        if self.length is None:
            return more
        self.decided += time.perf_counter() - began
        if not more:
            self.depth = min(self.depth, step)
        self._confidences.append(np.array(confidence, np.float64))
        return step < self.length

    def choose(self) -> np.ndarray:
        if self.length is None or self._batch is None:
            return super().choose()
        depth, drafted, costs = min(self.depth, self.length), self._step, self._costs
        self._step = depth or drafted
        began = time.perf_counter()
        lengths = super().choose()
        self.decided += time.perf_counter() - began
        self.recording.decisions.append((drafted, self.decided))
        self._step, sent = drafted, len(lengths) * self.length
        # What is compared with the time it takes: all of it is verified.
        spent = float(costs.target[sent] + costs.draft[drafted])
        self._predicted = self._predicted[0], spent
        if self.length == self.recording.most:
            self.waiting = Step(
                np.stack(self._confidences),
                self._survival[: self.length].copy(),
                np.empty(0),
                self._costs.target.copy(),
                self._costs.draft.copy(),
                depth,
                lengths if depth else np.zeros_like(lengths),
            )
        return np.full(len(lengths), self.length)

    def observe(self, outcome: Outcome) -> None:
        recording, sample = self.recording, outcome.sample
        whole = len(outcome.slots) == recording.requests
        if sample and sample.requests == recording.requests and not sample.prefill:
            drafts = np.nansum([sample.draft_first_s, sample.draft_next_s])
            recording.hosts.append((sample.steps, float(sample.host_s)))
            recording.times.append(
                (
                    sample.verified,
                    sample.target_s,
                    sample.steps,
                    float(drafts + sample.host_s),
                )
            )
        if whole and outcome.emitted.all() and not self._fresh[outcome.slots].any():
            if self.waiting is not None and (outcome.verified == recording.most).all():
                self.waiting.accepted = outcome.accepted.copy()
                recording.steps.append(self.waiting)
            if self.forced is None and self.since is not None:
                recording.tokens += float(outcome.emitted.sum()) * outcome.rounds
                recording.seconds += outcome.now - self.since
        self.waiting, self.since = None, outcome.now
        super().observe(outcome)


def record(engine: Any, policy: RecordedPolicy, cell: Any, seconds: float) -> None:
    """Serves waves of a cell's prompts until the seconds are over."""
    from vllm import SamplingParams

    batch, prompts = cell["batch"], itertools.cycle(cell["prompts"])
    most = policy.recording.most
    # Mostly the longest: its verdicts are what is wanted, of the others the times.
    lengths = [most, most, 0, most, most, 1, most, most, 3, most, most, 5]
    chosen = itertools.cycle([min(length, most) for length in lengths])
    sampling = SamplingParams(
        max_tokens=OUTPUT_TOKENS, ignore_eos=True, temperature=0.0
    )
    began = time.monotonic()
    for wave in itertools.count():
        enough = len(policy.recording.steps) >= FEWEST_STEPS
        if wave > 1 and enough and time.monotonic() - began > seconds:
            break
        policy.forced = chosen if wave % 2 else None
        policy.since = None
        names = [f"{cell['cell']} {wave} {i}" for i in range(batch)]
        for name in names:
            engine.add_request(name, {"prompt_token_ids": next(prompts)}, sampling)
        # A wave ends with its first request: until then all of them decode.
        while not any(output.finished for output in engine.step()):
            pass
        engine.abort_request(names)
        while engine.has_unfinished_requests():
            engine.step()


def main() -> int:
    """Record every cell and write what each left on the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    for name in ("--model", "--draft", "--requests", "--json"):
        parser.add_argument(name, type=Path, required=True)
    args = parser.parse_args()
    plan = json.loads(args.requests.read_text(encoding="utf-8"))
    from vllm_tide.config import ControlConfig
    from vllm_tide.engine.policy_start import start_policy
    from vllm_tide.engine.profiler import open_engine

    most, left = plan["most"], []
    config = ControlConfig.model_validate(plan["control"])
    kept: list[Any] = []

    def listen(worker: Any) -> None:
        start_policy(worker, worker.tide.control, config)
        kept.append(worker.tide.control)

    with open_engine(str(args.model), str(args.draft), most, plan["arguments"]) as e:
        e.collective_rpc(listen)
        (control,) = kept
        started = control.policy
        for cell in plan["cells"]:
            policy = RecordedPolicy(started._settings, control.times)
            policy.recording = Recording(cell["batch"], most)
            control.policy = policy
            record(e, policy, cell, plan["seconds"])
            left.append({"cell": cell["cell"], **analyse(policy.recording)})
            args.json.write_text(json_text({"left_on_the_table": left}))
            print(left[-1], flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
