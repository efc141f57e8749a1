"""Replays a stream through the real trainer, without a server, on a clock of its own.

    online_replay.py --target DIR --draft DIR --samples FILE
        --case 'name={"learning_rate": 3e-4}' --case ... [--json FILE]

`--samples` is a file of `replay_samples.py`, or what `scripts/bench/run.py --suite loss
--work DIR` leaves in DIR. Requests end every `--request-s`; a step and an evaluation
take time by their rows (`--step-s`, `--evaluation-s`, as measured by
`train_step.py` on a quiet core, over the share of the core that the trainer gets). So
the same file gives the same cycles on any machine, however busy it is. Each request is
first drafted for by the live draft (teacher-forced, greedy), then handed to the
trainer. A case may also say `"prompts": true`: rows of the prompt are trained on too.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]
from bench.harness.samples import load_samples
from json_text import json_text
from vllm_tide.config import TrainConfig
from vllm_tide.draft.checkpoint import load_draft
from vllm_tide.draft.target import TargetRows
from vllm_tide.metrics import finite
from vllm_tide.train.evaluate import Evaluation
from vllm_tide.train.sample import Sample, by_request
from vllm_tide.train.trainer import Trainer

SETTINGS: dict[str, Any] = {
    "batch_tokens": 1024,
    "min_new_tokens": 512,
    "steps_per_cycle": 12,
    "holdout_share": 0.15,
    "max_passes": 24,
}
"""As the quickstart has them."""


class Stream:
    """The requests of all parts, handed to a trainer as its clock reaches their ends.

    Attributes:
        now: Seconds since the start; steps and evaluations move it.
        spent: Seconds by what they went into.
        accepted: By part, rows and accepted tokens of each request.
    """

    def __init__(
        self,
        trainer: Trainer,
        parts: dict[str, list[Sample]],
        args: argparse.Namespace,
        *,
        prompts: bool,
    ) -> None:
        self.trainer, self.args, self.prompts = trainer, args, prompts
        self.now, self.spent = 0.0, {"steps": 0.0, "evaluation": 0.0}
        self.accepted: dict[str, list[tuple[int, float]]] = {p: [] for p in parts}
        self.began: dict[str, float] = {}
        self._ahead: Iterator[tuple[str, list[Sample]]] = (
            (name, request)
            for name, samples in parts.items()
            for request in by_request(samples).values()
        )
        self._next = next(self._ahead, None)
        self._ends = args.request_s
        self._evaluate, self._step = trainer.evaluate, trainer.stepper.run
        trainer.evaluate = self._timed_evaluation  # type: ignore[method-assign]
        trainer.stepper.run = self._timed_step  # type: ignore[method-assign]

    def deliver(self) -> bool:
        """Hand over what has ended by now; True while there is more to come."""
        while self._next is not None and self._ends <= self.now:
            name, request = self._next
            self.began.setdefault(name, self._ends - self.args.request_s)
            live = self._evaluate(self.trainer.live, samples=request)
            self.accepted[name].append((live.num_rows, sum(live.reached["greedy"])))
            more = {"num_prompt_tokens": 1} if self.prompts else {}
            # Passes made over a document are its own: other cases get it without.
            self.trainer.add_samples(replace(s, trained=[], **more) for s in request)
            self._next = next(self._ahead, None)
            self._ends += self.args.request_s
        return self._next is not None

    def wait(self) -> bool:
        """Let the time pass until the next request has ended."""
        self.now = max(self.now, self._ends)
        return self.deliver()

    def _spend(self, what: str, rows: int, per_1024: float) -> None:
        seconds = per_1024 * rows / 1024
        self.spent[what] += seconds
        self.now += seconds

    def _timed_step(self, samples: list[Sample], lr_scale: float = 1.0) -> Any:
        rows = sum(s.num_tokens for s in samples)
        self._spend("steps", rows, self.args.step_s)
        return self._step(samples, lr_scale)

    def _timed_evaluation(
        self, draft: Any = None, progress: Any = None, samples: Any = None
    ) -> Evaluation:
        held = list(self.trainer.buffer.holdout) if samples is None else samples
        rows = sum(s.num_tokens for s in held)
        self._spend("evaluation", rows, self.args.evaluation_s)
        return self._evaluate(draft, progress, held)


def replay(
    target: TargetRows,
    draft: Path,
    shared: frozenset[str],
    parts: dict[str, list[Sample]],
    knobs: dict[str, Any],
    args: argparse.Namespace,
) -> dict[str, Any]:
    """One case: figures by part of the stream."""
    began, cpu = time.monotonic(), time.process_time()
    knobs = dict(knobs)
    prompts = knobs.pop("prompts", False)
    config = TrainConfig(**{**SETTINGS, **knobs})
    trainer = Trainer(
        load_draft(draft, target, shared),
        target,
        config,
        num_speculative_tokens=args.depth,
    )
    stream = Stream(trainer, parts, args, prompts=prompts)
    cycles: list[dict[str, Any]] = []
    ends: dict[str, Any] = {}  # part to the draft that was live at its end
    while True:
        buffer = trainer.buffer
        if buffer.new_tokens < config.min_new_tokens or not buffer.train_tokens:
            if not stream.wait():
                break
            continue
        at, rate = stream.now, trainer.rate
        # The end of the stream interrupts no cycle.
        result = trainer.train_cycle(lambda: stream.deliver() or True)
        part = list(stream.began)[-1]
        cycles.append(
            {
                "part": part,
                "began_s": round(at, 2),
                "ended_s": round(stream.now, 2),
                "steps": result.steps,
                "rate": round(rate, 3),
                "loss": round(result.loss, 4),
                "gain": round(result.gain, 3),
                "fresh": result.fresh_requests,
                "evidence": round(result.evidence, 2),
                "publish": result.publish,
                "reason": result.reason,
            }
        )
        if args.verbose:
            print(cycles[-1], flush=True)
        if result.publish:
            trainer.published()
        ends[part] = trainer.snapshot()
    found = {}
    for name, accepted in stream.accepted.items():
        shift = stream.began.get(name, 0.0)
        published = [
            round(c["ended_s"] - shift, 2)
            for c in cycles
            if c["publish"] and c["part"] == name
        ]
        found[name] = {
            "acceptance_length": round(_length(accepted), 4),
            "second_half": round(_length(accepted[len(accepted) // 2 :]), 4),
            "published_after_s": published,
        }
    return {
        "parts": found,
        "forgetting": _forgetting(trainer, stream, parts, ends),
        "steps": trainer.steps,
        "seconds": {k: round(v, 2) for k, v in stream.spent.items()},
        "cpu_s": round(time.process_time() - cpu),
        "wall_s": round(time.monotonic() - began),
        "cycles": cycles,
    }


def _forgetting(
    trainer: Trainer,
    stream: Stream,
    parts: dict[str, list[Sample]],
    ends: dict[str, Any],
) -> dict[str, float]:
    """Acceptance length on the last part's requests, by part after which it was live.

    Where the last part's domain is the first's: how much of it a shift costs.
    """
    last = list(parts.values())[-1]
    out = {}
    for name, tensors in list(ends.items())[:-1]:
        trainer.live.take(tensors)
        found = stream._evaluate(trainer.live, samples=last)
        out[name] = round(found.acceptance("greedy"), 4)
    return out


def _length(rows: list[tuple[int, float]]) -> float:
    return 1.0 + sum(a for _, a in rows) / max(1.0, sum(n for n, _ in rows))


def main() -> None:
    """Run the cases."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--samples", type=Path, required=True)
    parser.add_argument("--case", action="append", default=[], metavar="NAME=JSON")
    parser.add_argument("--request-s", type=float, default=2.0)
    parser.add_argument("--step-s", type=float, default=0.42, help="of 1,024 rows")
    parser.add_argument("--evaluation-s", type=float, default=0.25, help="of as many")
    parser.add_argument("--depth", type=int, default=5)
    parser.add_argument("--parts", type=int, help="only the first so many stretches")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--verbose", action="store_true", help="print every cycle")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    parts, facts = load_samples(args.samples)
    parts = dict(list(parts.items())[: args.parts])
    target = TargetRows.load(args.target)
    shared = frozenset(facts.get("shared", ()))
    out: dict[str, Any] = {}
    for name, _, text in (c.partition("=") for c in args.case):
        knobs = json.loads(text or "{}")
        out[name] = found = replay(target, args.draft, shared, parts, knobs, args)
        row = "  ".join(
            f"{part} {f['acceptance_length']:.3f}/{f['second_half']:.3f}"
            f" {f['published_after_s']}"
            for part, f in found["parts"].items()
        )
        facts = {k: found[k] for k in ("steps", "seconds", "forgetting", "cpu_s")}
        print(f"{name:16} {row}  {facts}", flush=True)
    if args.json is not None:
        options = {
            k: v.name if isinstance(v, Path) else v for k, v in vars(args).items()
        }
        data = finite({"options": options, "cases": out})
        args.json.write_text(json_text(data), encoding="utf-8")


if __name__ == "__main__":
    main()
